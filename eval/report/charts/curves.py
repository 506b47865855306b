"""Lines of several models, each named at its right end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..palette import LIGHT
from ..record import Report, Result
from .canvas import TEXT, Canvas
from .labels import spread
from .words import MARKERS, colour_of, label, say_numbers, short

_DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))


@dataclass(frozen=True)
class Curve:
    """A line of one model, and what is said at its end; a y of None leaves a gap.

    Attributes:
        spans: from where to where each y was found, if that is to be shown.
    """

    number: int
    row: Result
    x: Sequence[float]
    y: Sequence[float | None]
    end: str = ""
    spans: Sequence[tuple[float, float]] = ()


def draw_curves(canvas: Canvas, axes: Any, report: Report, curves: Sequence[Curve], *, markers: bool = False) -> None:
    """Draw lines, named at their right ends; lines that are the same are drawn once, with all their names."""
    groups: dict[tuple, list[Curve]] = {}
    for curve in curves:
        groups.setdefault((*curve.x, None, *curve.y), []).append(curve)
    seen: dict[str, int] = {}
    ends = []
    for same in sorted(groups.values(), key=lambda same: not any(curve.row.pareto for curve in same)):
        lead = min(same, key=lambda curve: (not curve.row.pareto, curve.number))
        strong = lead.row.pareto or len(groups) <= 6
        colour = colour_of(lead.row)
        dash = _DASHES[seen.setdefault(colour, 0) % len(_DASHES)]
        seen[colour] += 1
        y = [float("nan") if value is None else value for value in lead.y]
        (line,) = axes.plot(
            lead.x,
            y,
            color=LIGHT[colour],
            linewidth=2.2 if strong else 1.2,
            alpha=1 if strong else 0.45,
            linestyle=dash,
            marker=MARKERS[lead.row.attention_kind][0] if markers or len(lead.x) == 1 else None,
            markersize=5,
            zorder=4 if strong else 3,
        )
        line.set_gid(f"curve-{lead.number}")
        canvas.hints[f"curve-{lead.number}"] = "; ".join(label(one.number, one.row) for one in same)
        if lead.spans:
            lows, highs = zip(*lead.spans, strict=True)
            style = {"color": LIGHT[colour], "linewidth": 1.4, "alpha": 1 if strong else 0.45, "zorder": 3}
            axes.vlines(lead.x, lows, highs, **style).set_gid(f"span-{lead.number}")
            for ends_at in (lows, highs):
                axes.plot(lead.x, ends_at, linestyle="none", marker="_", markersize=7, **style)
        last = next((place for place in reversed(range(len(y))) if lead.y[place] is not None), None)
        if last is not None:
            ends.append((same, lead, strong, lead.x[last], y[last]))
    _name_ends(canvas, axes, ends)


def _name_ends(canvas: Canvas, axes: Any, ends: Sequence[tuple]) -> None:
    width, height = canvas.size.width, canvas.size.height
    points = [axes.transData.transform((x, y)) for *_, x, y in ends]
    box = axes.get_window_extent()
    ups = spread([float(y) for _, y in points], TEXT + 2, box.y0 + 2, box.y1)
    for (same, lead, strong, *_), (x, y), up in zip(ends, points, ups, strict=True):
        if len(same) == 1:
            text = label(lead.number, lead.row, name=not canvas.size.narrow)
        else:
            text = say_numbers([one.number for one in same])
        if lead.end and not canvas.size.narrow:
            text = f"{short(text, 14)} · {lead.end}"
        canvas.figure.text(
            (box.x1 + 12) / width,
            up / height,
            short(text, 13 if canvas.size.narrow else 26 if lead.end else 20),
            color=LIGHT[colour_of(lead.row)],
            fontsize=TEXT,
            weight="bold" if strong else "normal",
            va="center",
        )
        axes.annotate(
            "",
            (x, y),
            (box.x1 + 12, up),
            xycoords="figure points",
            textcoords="figure points",
            arrowprops={
                "arrowstyle": "-",
                "color": LIGHT[colour_of(lead.row)],
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 2,
            },
            annotation_clip=False,
        )


def room(canvas: Canvas, narrow: float = 62, wide: float = 168) -> float:
    """What the names of lines take at the right, in CSS pixels."""
    return narrow if canvas.size.narrow else wide
