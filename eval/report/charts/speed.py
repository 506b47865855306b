"""How fast models decode."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.ticker import FuncFormatter, MaxNLocator

from ...speed.record import SpeedRow
from ..record import Report
from ..say import say_number, say_tick
from .canvas import Canvas
from .curves import Curve, draw_curves, room
from .scales import LOG_FROM, log_mark, scale
from .words import say_tokens


def speed_words(report: Report) -> str:
    assert report.speed
    rows: Mapping[str, str] = {
        row.model: f"{row.model} {say_number(row.tokens_per_second)} at {row.context:,}"
        for row in report.speed.results
        if row.tokens_per_second
    }
    return f"Tokens decoded a second against tokens cached. At the longest measured: {', '.join(rows.values())}."


def _span(row: SpeedRow) -> tuple[float, float]:
    """The slowest and the fastest block, around the median."""
    median = row.tokens_per_second
    return min(row.tokens_per_second_min or median, median), max(row.tokens_per_second_max or median, median)


def draw_speed(canvas: Canvas, report: Report) -> None:
    """Tokens a second against tokens cached, of the smallest batch that was measured: medians, and from the slowest to
    the fastest block."""
    assert report.speed
    rows = [row for row in report.speed.results if row.tokens_per_second]
    axes = canvas.axes(62, room(canvas))
    if not rows:
        canvas.name_axes(axes, "tokens of context", "tokens decoded per second")
        return
    batch = min(row.batch_size for row in rows)
    rows = [row for row in rows if row.batch_size == batch]
    contexts = sorted({row.context for row in rows})
    scale(axes.xaxis, contexts, say_tokens, base=2, pad=0.02, log=len(contexts) > 1)
    spans = {(row.model, row.context): _span(row) for row in rows}
    speeds = [speed for span in spans.values() for speed in span]
    if max(speeds) / min(speeds) > LOG_FROM:
        scale(axes.yaxis, speeds, say_tick, pad=0.06)
    else:
        axes.set_ylim(0, max(speeds) * 1.1)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: say_tick(value)))
    curves = []
    for number, row in enumerate(report.results):
        found = {one.context: one.tokens_per_second for one in rows if one.model == row.name}
        if found:
            ends = [spans[row.name, context] for context in found]
            curves.append(Curve(number, row, list(found), list(found.values()), spans=ends))
    draw_curves(canvas, axes, report, curves, markers=True)
    canvas.name_axes(axes, "tokens cached", f"tokens decoded per second, batch {batch}{log_mark(axes.yaxis)}")
