"""Caches against the length of a text."""

from __future__ import annotations

from ..record import Report
from ..say import say_bytes, say_bytes_tick
from .canvas import Canvas
from .curves import Curve, draw_curves, room
from .scales import scale
from .words import say_tokens


def growth_words(report: Report) -> str:
    growth = report.cache_growth
    last = ", ".join(f"{row.model} {say_bytes(row.kv_bytes[-1])}" for row in growth.results)
    return f"Bytes of one sequence's cache against its tokens. At {growth.contexts[-1]:,} tokens: {last}."


def draw_growth(canvas: Canvas, report: Report) -> None:
    """Bytes that a sequence keeps cached, against its length."""
    growth = report.cache_growth
    by_name = {row.model: row.kv_bytes for row in growth.results}
    axes = canvas.axes(62 if canvas.size.narrow else 70, room(canvas, 100, 196))
    several, ticks = len(growth.contexts) > 1, 5 if canvas.size.narrow else 8
    scale(axes.xaxis, growth.contexts, say_tokens, base=2, pad=0, log=several, ticks=ticks)
    scale(axes.yaxis, [b for held in by_name.values() for b in held], say_bytes_tick, base=2, pad=0.05, log=True)
    curves = [
        Curve(number, row, growth.contexts, by_name[row.name], say_bytes_tick(by_name[row.name][-1]))
        for number, row in enumerate(report.results)
        if row.name in by_name
    ]
    draw_curves(canvas, axes, report, curves)
    canvas.name_axes(axes, "tokens of context", "KV cache of one sequence")
