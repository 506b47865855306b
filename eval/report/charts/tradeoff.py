"""Quality against cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.markers import CARETUP
from matplotlib.ticker import FixedLocator

from ..palette import LIGHT
from ..record import Report, Result
from ..say import say_bytes_tick, say_tick
from .canvas import TEXT, Canvas
from .labels import place_labels
from .scales import LOG_FROM, log_mark, note, scale
from .words import MARKERS, colour_of, hint, label, say_numbers

_NEAR = 2.0  # times the source's perplexity
_FEW = 5  # sizes of caches that the axis names one by one
_MANY = 8  # results from which on labels in front only have their names


def tradeoff_words(report: Report) -> str:
    rows = "; ".join(hint(number, row) for number, row in enumerate(report.results) if row.perplexity is not None)
    return f"Perplexity against cached bytes a token. {rows}."


def draw_tradeoff(canvas: Canvas, report: Report) -> None:
    """Perplexity against cached bytes a token; lower left is better."""
    axes = canvas.axes(58 if canvas.size.narrow else 62, 22, bottom=48)
    shown = [(number, row) for number, row in enumerate(report.results) if row.perplexity is not None]
    if not shown:
        canvas.name_axes(axes, "KV cache per token, all layers", "perplexity: of no model")
        return
    sizes = sorted({row.kv_bytes_per_token for _, row in shown})
    scale(axes.xaxis, sizes, say_bytes_tick, base=2, pad=0.12, log=True)
    if len(sizes) <= _FEW and all(2 * b >= 3 * a for a, b in pairwise(sizes)):
        axes.xaxis.set_major_locator(FixedLocator(sizes))
    good = report.source.perplexity and report.source.perplexity * report.verdict.max_ratio
    top = _scale_perplexity(axes, report, good)
    if good and axes.get_ylim()[0] < good:
        axes.axhspan(axes.get_ylim()[0], min(good, top.limit), color=LIGHT["good-soft"], zorder=0.5, linewidth=0)
        note(axes, good, f"within {report.verdict.max_ratio:g}×", "bottom", "good")
    within = [(number, row) for number, row in shown if row.perplexity <= top.limit]
    front = sorted((row.kv_bytes_per_token, row.perplexity) for _, row in within if row.pareto)
    if front:
        axes.plot(*zip(*front, strict=True), color=LIGHT["faint"], linewidth=1.5, linestyle=(0, (4, 3)), zorder=2)
    named = len(shown) <= _MANY
    labels = []
    for number, row in within:
        marker, size = ("*", 15) if number == 0 else MARKERS[row.attention_kind]
        _mark(canvas, axes, number, row, row.perplexity, marker, size)
        style = {
            "color": LIGHT[colour_of(row)],
            "weight": "bold" if row.name == report.verdict.best else "normal",
        }
        text = label(number, row, name=not canvas.size.narrow and (named or row.pareto))
        labels.append((row, (text, row.kv_bytes_per_token, row.perplexity, style)))
    labels.sort(key=lambda pair: (not pair[0].pareto, pair[0].perplexity))
    place_labels(axes, [label for _, label in labels], size=TEXT)
    canvas.name_axes(axes, "KV cache per token, all layers", f"perplexity{log_mark(axes.yaxis)}, lower is better")
    _put_beyond(canvas, axes, [pair for pair in shown if pair not in within], top, named)


def _mark(canvas: Canvas, axes: Any, number: int, row: Result, height: float, marker: Any, size: float) -> None:
    colour = LIGHT[colour_of(row)]
    (drawn,) = axes.plot(
        row.kv_bytes_per_token,
        height,
        marker=marker,
        markersize=size,
        linestyle="none",
        color=colour,
        markerfacecolor=colour if row.pareto else LIGHT["surface"],
        markeredgewidth=1.6,
        zorder=5 if row.pareto else 3,
    )
    drawn.set_gid(f"point-{number}")
    canvas.hints[f"point-{number}"] = hint(number, row)


def _put_beyond(canvas: Canvas, axes: Any, beyond: Sequence[tuple[int, Result]], top: Top, named: bool) -> None:
    """Put results that are beyond the scale above it: one arrow for those with equal caches, and their figures."""
    if not beyond:
        return
    axes.axhline(top.limit, color=LIGHT["line"], linewidth=1.2, zorder=1)
    note(axes, top.limit, "above: beyond the scale", "top", "muted")
    middle = axes.transData.inverted().transform(axes.get_window_extent().get_points().mean(axis=0))[0]
    for size in sorted({row.kv_bytes_per_token for _, row in beyond}):
        group = [(number, row) for number, row in beyond if row.kv_bytes_per_token == size]
        for number, row in group:
            _mark(canvas, axes, number, row, top.place, CARETUP, 11)
        if canvas.size.narrow:
            text = say_numbers([number for number, _ in group])
        else:
            name = named and len(group) == 1
            text = ", ".join(f"{label(number, row, name=name)} ({say_tick(row.perplexity)})" for number, row in group)
        left = size > middle
        axes.annotate(
            text,
            (size, top.place),
            (-11 if left else 11, 1),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=TEXT,
            color=LIGHT[colour_of(group[0][1])],
        )


@dataclass(frozen=True)
class Top:
    """Of an axis: up to which perplexity it is a scale, and where what is beyond is put."""

    limit: float
    place: float


def _scale_perplexity(axes: Any, report: Report, good: float | None) -> Top:
    """Scale the y axis to the perplexities of models that work, and to that up to which a result will do; if most are
    near the source's and some far from it, to those that are near: a few bad results would press all that matter flat.
    """
    everything = [row.perplexity for row in report.results if row.perplexity is not None]
    found = [row.perplexity for row in report.results if row.perplexity is not None and row.passed] or everything
    near = [value for value in found if good and value <= max(_NEAR * report.source.perplexity, good)]
    if 2 * len(near) > len(found) and max(found) > LOG_FROM * min(found):
        found = near
    if good and good <= 2 * max(found):
        found = [*found, good]
    scale(axes.yaxis, found, say_tick, pad=0.12)
    low, high = map(float, axes.get_ylim())
    if max(everything) <= high:
        return Top(high, high)
    log = axes.get_yscale() == "log"
    rise = (high / low) if log else (high - low)
    axes.set_ylim(low, high * rise**0.13 if log else high + 0.13 * rise)
    return Top(high, high * rise**0.065 if log else high + 0.065 * rise)
