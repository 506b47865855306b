"""The charts of a report. Each is drawn three times: for a wide page, for a phone, and as a PNG with all names beside.

Colour and marker say the kind of attention, a number says which result: the one that it has in the report's table.
What is in front (no other result has both a smaller cache and a lower perplexity) is strong, the rest is pale.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib

from ..palette import LIGHT
from ..record import Report, Uptraining
from .canvas import TEXT, Canvas, Size, open_canvas, to_png, to_svg
from .growth import draw_growth, growth_words
from .layers import draw_layers, layer_words
from .speed import draw_speed, speed_words
from .svg import inline
from .tradeoff import draw_tradeoff, tradeoff_words
from .uptraining import draw_uptraining
from .words import colour_of, label, short

_SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kvfold",  # the same file at every run
    "text.parse_math": False,  # names may hold dollars
    "font.family": ["DejaVu Sans"],  # which comes with matplotlib
}
_HEAD, _KEY = 34, 200  # what a picture has around its chart


@dataclass(frozen=True)
class Chart:
    """One chart in all its forms.

    Attributes:
        key: of its file, and of its place in the page.
        title, description: what it shows, in words.
        wide, narrow: SVG elements.
        png: a file.
    """

    key: str
    title: str
    description: str
    wide: str
    narrow: str
    png: bytes


def draw_charts(report: Report) -> list[Chart]:
    """Draw what the report has figures for."""
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font of the PNG lacks
        charts = [
            _draw(report, "trade-off", "Quality against cache", tradeoff_words(report), draw_tradeoff, 760, 470),
            _draw(report, "cache", "Cache growth with context", growth_words(report), draw_growth),
        ]
        if any(any(error is not None for error in row.layer_errors) for row in report.results):
            charts.append(_draw(report, "layers", "Error layer by layer", layer_words(report), draw_layers))
        if report.speed:
            charts.append(_draw(report, "speed", "Decode speed", speed_words(report), draw_speed))
        for number, run in enumerate(report.uptraining):
            words = (
                f"Cross entropy of training text and held-out loss of {run.model} against the tokens read, "
                "in nats a token."
            )
            title = f"Uptraining of {short(run.model, 26)}"

            def draw(canvas: Canvas, report: Report, run: Uptraining = run) -> None:
                draw_uptraining(canvas, run)

            charts.append(_draw(report, f"uptraining-{number}", title, words, draw, names=False))
    return charts


def _draw(
    report: Report,
    key: str,
    title: str,
    description: str,
    draw: Callable[[Canvas, Report], None],
    width: float = 500,
    height: float = 350,
    *,
    names: bool = True,
) -> Chart:
    sizes = {"wide": Size(width, height), "narrow": Size(330, 330, narrow=True)}
    shown = {}
    for form, size in sizes.items():
        canvas = open_canvas(size)
        draw(canvas, report)
        shown[form] = inline(
            to_svg(canvas), prefix=f"{key}-{form}", title=title, description=description, hints=canvas.hints
        )
    room = _KEY if names else 0
    canvas = open_canvas(Size(width + room, height + _HEAD, head=_HEAD, key=room))
    draw(canvas, report)
    _add_title_and_key(canvas, title, report)
    return Chart(key, title, description, shown["wide"], shown["narrow"], to_png(canvas))


def _add_title_and_key(canvas: Canvas, title: str, report: Report) -> None:
    """What the page says around a chart."""
    width, height = canvas.size.width, canvas.size.height
    text = f"{title}: {short(report.title, 40)}"
    style = {"fontsize": 14, "weight": "bold", "color": LIGHT["ink"]}
    canvas.figure.text(8 / width, 1 - 14 / height, text, va="center", **style)
    step = min(18, (height - _HEAD - 20) / len(report.results))
    for number, row in enumerate(report.results if canvas.size.key else ()):
        canvas.figure.text(
            1 - (canvas.size.key - 12) / width,
            1 - (_HEAD + 34 + step * number) / height,
            label(number, row),
            va="center",
            fontsize=min(TEXT, step),
            color=LIGHT[colour_of(row)],
            weight="bold" if row.name == report.verdict.best else "normal",
        )
