"""Labels of points and lines, placed so that they do not lie on one another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.transforms import Affine2D, Bbox

_DIRECTIONS = [math.radians(angle) for angle in (0, 180, 45, -45, 135, -135, 90, -90, 20, -20, 160, -160)]
_DISTANCES = (11, 15, 20, 27, 36, 48, 62)
_LEADER = 16  # from this distance on, a line leads from the label to its point


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions at least `gap` apart, near those wanted, within bounds where they fit."""
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    groups: list[tuple[list[int], float]] = []  # members, and where the first of them stands
    for place in order:
        members, start = [place], wanted[place]
        while groups and groups[-1][1] + gap * len(groups[-1][0]) > start:
            before, _ = groups.pop()
            members = before + members
            centre = sum(wanted[one] - gap * number for number, one in enumerate(members)) / len(members)
            start = centre
        start = min(max(start, low), high - gap * (len(members) - 1))
        groups.append((members, start))
    placed = [0.0] * len(wanted)
    before = low - gap
    for members, start in groups:
        for number, one in enumerate(members):
            placed[one] = before = max(start + gap * number, before + gap)
    over = max(placed, default=high) - high
    return [position - over if over > 0 else position for position in placed]


def place_labels(axes: Any, labels: Sequence[tuple[str, float, float, dict[str, Any]]], *, size: float) -> None:
    """Write labels beside points (text, x, y in data, keywords of the text), where nothing stands yet.

    The first find the best places. The figure must be at 72 dots an inch, so that a pixel is a point.
    """
    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    points = axes.transData.transform([(x, y) for _, x, y, _ in labels])
    taken = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in points]
    inside = axes.get_window_extent(renderer)
    for number, ((text, *_, style), (x, y)) in enumerate(zip(labels, points, strict=True)):
        drawn = axes.text(0, 0, text, transform=points_of(figure), fontsize=size, va="center", ha="center", **style)
        box = drawn.get_window_extent(renderer)
        spots = (
            (x + math.cos(angle) * (far + box.width / 2), y + math.sin(angle) * (far + box.height / 3), far)
            for far in _DISTANCES
            for angle in _DIRECTIONS
        )
        others = [box for place, box in enumerate(taken) if place != number]
        across, up, far = min(spots, key=lambda spot: _cost(spot, box, others, inside))
        drawn.set_position((across, up))
        taken.append(_at(box, across, up))
        if far >= _LEADER:
            nearest = (min(max(x, across - box.width / 2), across + box.width / 2), up)
            axes.annotate(
                "",
                (x, y),
                nearest,
                xycoords="figure points",
                textcoords="figure points",
                arrowprops={"arrowstyle": "-", "color": style["color"], "linewidth": 0.7, "shrinkA": 3, "shrinkB": 5},
                zorder=4,
            )


def points_of(figure: Any) -> Any:
    """The transform from points (1/72 inch) of a figure, which stay where they are at every resolution."""
    return Affine2D().scale(1 / 72) + figure.dpi_scale_trans


def _at(box: Bbox, x: float, y: float) -> Bbox:
    return Bbox.from_bounds(x - box.width / 2 - 1, y - box.height / 2, box.width + 2, box.height)


def _cost(spot: tuple[float, float, float], box: Bbox, taken: Sequence[Bbox], inside: Bbox) -> float:
    x, y, far = spot
    here = _at(box, x, y)
    covered = sum(_shared(here, other) for other in taken)
    outside = here.width * here.height - _shared(here, inside)
    return far + 5 * covered + 50 * outside


def _shared(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width * height if width > 0 and height > 0 else 0.0
