"""Errors layer by layer."""

from __future__ import annotations

from matplotlib.ticker import MaxNLocator

from ..record import Report
from ..say import say_number, say_tick
from .canvas import Canvas
from .curves import Curve, draw_curves, room
from .scales import log_mark, scale


def layer_words(report: Report) -> str:
    ends = ", ".join(
        f"{row.name} {say_number(row.layer_errors[-1])}"
        for row in report.results
        if row.layer_errors and row.layer_errors[-1] is not None
    )
    return f"Relative error of each decoder layer's output. After the last layer: {ends}."


def draw_layers(canvas: Canvas, report: Report) -> None:
    """The relative error of each result's hidden states, layer by layer."""
    rows = [row for row in report.results if any(error is not None for error in row.layer_errors)]
    found = [error for row in rows for error in row.layer_errors if error is not None]
    axes = canvas.axes(58, room(canvas))
    positive = [error for error in found if error > 0]
    if positive and max(positive) / min(positive) > 10:
        scale(axes.yaxis, positive, say_tick, pad=0.06)
    else:
        axes.set_ylim(0, max(found) * 1.08 or 1)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    depth = max(len(row.layer_errors) for row in rows)
    axes.set_xlim(-0.3 if depth > 1 else -0.5, depth - 1 + (0.1 if depth > 1 else 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(min(8, depth), integer=True, min_n_ticks=1))
    curves = [
        Curve(number, row, list(range(len(row.layer_errors))), row.layer_errors)
        for number, row in enumerate(report.results)
        if row in rows
    ]
    draw_curves(canvas, axes, report, curves)
    canvas.name_axes(axes, "decoder layer", f"relative error of its output{log_mark(axes.yaxis)}")
