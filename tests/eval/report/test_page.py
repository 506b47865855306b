from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import matplotlib
import pytest

from kvfold.eval.report.charts.canvas import Size, open_canvas
from kvfold.eval.report.charts.draw import draw_charts
from kvfold.eval.report.charts.growth import draw_growth
from kvfold.eval.report.charts.labels import spread
from kvfold.eval.report.charts.speed import draw_speed
from kvfold.eval.report.charts.tradeoff import draw_tradeoff
from kvfold.eval.report.headings import heading, meaning
from kvfold.eval.report.palette import LIGHT
from kvfold.eval.report.record import leaves, to_json
from kvfold.eval.report.say import say
from kvfold.eval.report.write import FIGURES, PAGE, report_files

from .made import make_report, make_result, make_source
from .shown import Page, agrees, as_attribute

NASTY = """$x_1$<script>alert(1)</script>"&'"""
BARE = {"kl": None, "layer_errors": [], "first_bad_layer": None, "passed": False, "reason": "the loss is nan"}

REPORTS = {
    "three": lambda: make_report(),
    "one": lambda: make_report(make_result("only"), speed=False, healed=False),
    "no figures": lambda: make_report(make_result("broken", ratio=None, top1_agreement=0.0, **BARE), healed=False),
    "no source": lambda: make_report(
        make_result("x", ratio=None, **BARE),
        source=make_source(perplexity=None, perplexity_ratio=None, loss=None, passed=False, reason="nan"),
    ),
    "far": lambda: make_report(
        *(make_result(f"r{n}", "MLA", 1 + n / 100) for n in range(5)), make_result("z", "MQA", 1e300)
    ),
    "many": lambda: make_report(*(make_result(f"r{n}", ("GQA", "MQA", "MLA")[n % 3], 1 + n / 9) for n in range(15))),
    "nasty": lambda: replace(
        make_report(
            make_result(NASTY, reason=NASTY, kv_bytes_per_token=3 * 2**40), make_result("long-" * 30 + "日本語")
        ),
        title=NASTY,
    ),
}


@cache
def drawn(name):
    """A report and its files."""
    report = REPORTS[name]()
    return report, report_files(report)


@pytest.fixture(params=REPORTS)
def made(request):
    return drawn(request.param)


def test_every_figure_is_on_the_page_in_full_and_rounded(made):
    report, files = made
    page = Page(files[PAGE].decode())
    figures = dict(leaves(json.loads(files[FIGURES])))
    assert figures == dict(leaves(to_json(report)))
    assert {key for key, *_ in page.figures} == figures.keys()
    for key, value, text in page.figures:
        assert value == as_attribute(figures[key]), key
        assert agrees(text, figures[key]), (key, text, figures[key])


def test_the_page_stands_alone(made):
    _, files = made
    html = files[PAGE].decode()
    page = Page(html)
    assert len(html) < 2_000_000
    assert "default-src 'none'" in html
    names = [tag for tag, _ in page.tags]
    assert not {"script", "iframe", "img", "object", "form"} & set(names)
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("href", "src", "xlink:href")]
    assert all(link.startswith("#") or link in ("report.json", "charts/", "data:,") for link in links)
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert names.count("h1") == 1


def test_ids_are_unique_and_used(made):
    html = made[1][PAGE].decode()
    ids = re.findall(r'\sid="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:url\(#|href="#)([^")]*)', html)
    assert used and set(used) <= set(ids)


def test_charts_have_the_colours_of_the_page(made):
    svg = "".join(re.findall(r"<svg.*?</svg>", made[1][PAGE].decode(), flags=re.DOTALL))
    tags = "".join(re.findall(r"<[^>]*>", svg))
    assert "var(--ink)" in tags
    assert not re.findall(r"(?:fill|stroke): (?!none|var\(--)[^;\"]*", tags)


def test_the_pictures_are_pictures(made):
    files = made[1]
    pictures = {name: content for name, content in files.items() if name.startswith("charts/")}
    assert {"charts/trade-off.png", "charts/cache.png"} <= pictures.keys()
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())


def test_untrusted_text_stays_text():
    html = drawn("nasty")[1][PAGE].decode()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert re.search(r"<text[^>]*>1 \$x_1\$&lt;script", html)  # in a chart; not set as mathematics


def test_the_same_report_is_the_same_bytes():
    assert report_files(REPORTS["one"]()) == drawn("one")[1]


def test_what_is_not_there_is_said():
    html = report_files(make_report(make_result("only", layer_errors=[]), speed=False, healed=False))[PAGE].decode()
    assert "Decode speed: " in html
    assert "Uptraining: no result" in html
    assert "none were measured" in html
    assert 'id="layers"' not in html and 'id="speed"' not in html


def test_results_far_beyond_the_others_do_not_press_them_flat():
    """Four of five marks use most of the height, and the fifth is above them with its figure."""
    html = drawn("far")[1][PAGE].decode()
    heights = [
        float(re.search(rf'id="trade-off-wide-point-{n}">.*?<use [^>]*y="([\d.]+)"', html, flags=re.DOTALL)[1])
        for n in range(1, 7)
    ]
    assert heights == sorted(heights, reverse=True)  # down is larger in SVG
    assert heights[0] - heights[4] > 60
    assert "beyond the scale" in html and "e+301" in html


def test_speeds_have_whiskers_from_the_slowest_to_the_fastest_block():
    report = make_report(make_result("a"), healed=False)
    canvas = open_canvas(Size(500, 350))
    draw_speed(canvas, report)
    (axes,) = canvas.figure.axes
    drawn = [line.tolist() for spans in axes.collections for line in spans.get_segments()]
    rows = sorted(report.speed.results, key=lambda row: [row.model == "a", row.context])
    assert drawn == [
        [[row.context, row.tokens_per_second_min], [row.context, row.tokens_per_second_max]] for row in rows
    ]
    assert axes.get_ylim()[1] > max(row.tokens_per_second_max for row in rows)


def test_marks_are_filled_where_the_chart_fills_them():
    report, files = drawn("many")
    html = files[PAGE].decode()
    assert {row.pareto for row in report.results[1:]} == {True, False}
    for number, row in enumerate(report.results[1:], 1):
        found = re.findall(rf'<span class="no">{number}</span>\s*<span class="([^"]*)" aria-hidden', html)
        assert len(found) >= 3
        assert set(found) == {f"dot k-{row.attention_kind.lower()}{'' if row.pareto else ' hollow'}"}


def test_no_heading_is_a_bare_field_name(made):
    report, _ = made
    data = to_json(report)
    keys = {*data["results"][0], *data["protocol"], *(data["speed"] or {}).get("results", [{}])[0]}
    assert not [key for key in keys if "_" in heading(key) or not heading(key).strip()]
    for key in ("floor_share", "bound", "x_first", "pareto", "kv_ratio"):
        assert heading(key).lower() != key.replace("_", " ") and meaning(key)


@pytest.mark.parametrize("draw", [draw_tradeoff, draw_growth])
def test_labels_stay_where_they_are_at_every_resolution(draw):
    canvas = open_canvas(Size(600, 400))
    draw(canvas, REPORTS["many"]())

    def places(dpi):
        canvas.figure.set_dpi(dpi)
        texts = [text for text in [*canvas.figure.texts, *canvas.figure.axes[0].texts] if text.get_text()]
        boxes = [text.get_window_extent(canvas.figure.canvas.get_renderer()) for text in texts]
        return [[(box.x0 + box.x1) * 72 / dpi, (box.y0 + box.y1) * 72 / dpi] for box in boxes]

    coarse, fine = places(72), places(288)
    assert len(coarse) > 5
    assert [pytest.approx(place, abs=4) for place in coarse] == fine


def test_no_global_setting_is_changed():
    before = dict(matplotlib.rcParams)
    draw_charts(make_report(make_result("a"), speed=False, healed=False))
    assert dict(matplotlib.rcParams) == before


def test_colours_are_told_apart_by_their_light_value():
    assert len(set(LIGHT.values())) == len(LIGHT)


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [
        ([5, 50], [5, 50]),
        ([50, 50], [45, 55]),
        ([0, 0, 0], [0, 10, 20]),
        ([100, 99, 98], [100, 90, 80]),
        ([20, 40, 21], [15.5, 40, 25.5]),
    ],
)
def test_labels_are_spread(wanted, placed):
    assert spread(wanted, 10, 0, 100) == placed


def test_more_labels_than_fit_are_still_in_order_and_within():
    placed = spread([1, 2, 3, 4, 5, 6], 10, 0, 20)
    assert placed == sorted(placed) and placed[0] >= 0 and placed[-1] <= 20 + 1e-9


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("results.2.perplexity", 18.7, "18.70"),
        ("results.2.perplexity", 1234.5, "1,234"),
        ("results.0.perplexity_ratio", 1.0, "1.000×"),
        ("results.0.kl", 1.5e-7, "1.500e-07"),
        ("results.0.kl", 0.0, "0"),
        ("results.0.kv_ratio", 0.125, "12.5 %"),
        ("results.0.kv_bytes_per_token", 512, "512 B"),
        ("cache_growth.results.0.kv_bytes.3", 1023 * 1024, "1,023 KiB"),
        ("results.0.kv_bytes", 34359738368, "32.0 GiB"),
        ("results.0.parameters", 2361472, "2.36 M"),
        ("results.0.first_bad_layer", 0, "0"),
        ("verdict.within", False, "no"),
        ("results.0.reason", "", "–"),
        ("results.0.kl", None, "–"),
    ],
)
def test_figures_are_said_with_their_units(name, value, text):
    assert say(name, value) == text
