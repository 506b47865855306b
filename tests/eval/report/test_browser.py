"""Reports opened in a real browser, headless and without a network."""

from __future__ import annotations

import shutil

import pytest

from kvfold.eval.report.record import leaves, to_json
from kvfold.eval.report.write import write_report

from .made import make_report, make_result
from .shown import agrees, as_attribute

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
# Of every figure: key, full value, what is read, and whether it takes any room.
FIGURES = """() => [...document.querySelectorAll("data")].map(one => [
    one.dataset.key, one.getAttribute("value"), one.textContent,
    one.checkVisibility() && one.getBoundingClientRect().width > 0])"""
SMALLEST_TEXT = """() => Math.min(...[...document.querySelectorAll("svg text")].filter(one => one.checkVisibility())
    .map(one => parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a))"""

# Of everything with text of its own: the text, its colour, and the colour behind.
INKS = """() => [...document.body.querySelectorAll("*")].filter(one => one.checkVisibility()
        && [...one.childNodes].some(node => node.nodeType == 3 && node.data.trim())
        && !["title", "desc"].includes(one.tagName)).map(one => {
    let behind = one;
    while (getComputedStyle(behind).backgroundColor == "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    const style = getComputedStyle(one);
    return [one.textContent.slice(0, 40), one instanceof SVGElement ? style.fill : style.color,
        getComputedStyle(behind).backgroundColor];
})"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module", params=["real", "many"])
def made(request, tmp_path_factory):
    """A folder and its figures: of three conversions that were measured, and of thirteen that were not."""
    if request.param == "real":
        real = request.getfixturevalue("real")
        return real.folder, real.figures
    kinds = ("GQA", "MQA", "MLA")
    report = make_report(*(make_result(f"result-{n}<b>", kinds[n % 3], 1 + n * n / 40) for n in range(13)))
    folder = tmp_path_factory.mktemp("many") / "page"
    write_report(report, folder)
    return folder, to_json(report)


@pytest.fixture
def page(browser, made, request):
    """The page at a size and in a colour scheme; whatever it asks for or complains of fails the test."""
    size, scheme = request.param
    context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
    opened = context.new_page()
    asked, complaints = [], []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    address = (made[0] / "index.html").as_uri()
    opened.goto(address)
    yield opened
    context.close()
    assert [url for url in asked if not url.startswith("data:")] == [address]
    assert complaints == []


@pytest.mark.parametrize(
    "page",
    [(LAPTOP, "light"), (LAPTOP, "dark"), (PHONE, "light"), (PHONE, "dark")],
    indirect=True,
    ids=lambda case: f"{case[0]['width']}-{case[1]}",
)
def test_a_report_is_read_from_its_page(page, made, tmp_path):
    page.screenshot(path=tmp_path / "page.png", full_page=True)  # for whoever wants to look: pytest keeps the last
    check_it_fits(page)
    assert page.evaluate(SMALLEST_TEXT) >= 11
    light = page.evaluate("matchMedia('(prefers-color-scheme: light)').matches")
    assert (luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.5) == light

    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    check_it_fits(page)
    poor = {(text, ink, ground) for text, ink, ground in page.evaluate(INKS) if contrast(ink, ground) < 4.5}
    assert not poor
    figures = dict(leaves(made[1]))
    shown = page.evaluate(FIGURES)
    assert {key for key, *_ in shown} == figures.keys()
    for key, value, text, visible in shown:
        assert visible, key
        assert value == as_attribute(figures[key]), key
        assert agrees(text, figures[key]), (key, text, figures[key])


def check_it_fits(page):
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def luminance(colour):
    """Of `rgb(...)`, as WCAG 2 says."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(ink, ground):
    dark, light = sorted(map(luminance, (ink, ground)))
    return (light + 0.05) / (dark + 0.05)
