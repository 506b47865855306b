"""A figure to draw on, at a size of so many CSS pixels, and what becomes of it."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..palette import LIGHT

PNG_DPI = 160
TEXT = 12
_POINT = 72  # points an inch: at that many dots an inch one point is one CSS pixel


@dataclass(frozen=True)
class Size:
    """Of one drawing, in CSS pixels.

    Attributes:
        narrow: whether numbers take the place of names.
        head, key: room at the top for a title, and at the right for a list of all names; the page has its own.
    """

    width: float
    height: float
    narrow: bool = False
    head: float = 0
    key: float = 0


@dataclass
class Canvas:
    """A figure while it is drawn, and what to say of its parts when they are pointed at, by their id."""

    figure: Figure
    size: Size
    hints: dict[str, str] = field(default_factory=dict)

    def axes(self, left: float, right: float, top: float = 34, bottom: float = 46) -> Any:
        """Axes with margins in CSS pixels; the y axis is named above it, where it takes no room."""
        width, height = self.size.width, self.size.height
        right, top = right + self.size.key, top + self.size.head
        axes = self.figure.add_axes(
            (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
        )
        axes.set_facecolor(LIGHT["surface"])
        axes.grid(color=LIGHT["grid"], linewidth=1)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(LIGHT["line"])
        axes.tick_params(length=0, pad=6, labelsize=TEXT, labelcolor=LIGHT["muted"])
        return axes

    def name_axes(self, axes: Any, x: str, y: str) -> None:
        place = axes.get_position()
        style = {"fontsize": TEXT, "color": LIGHT["muted"]}
        top = 1 - (12 + self.size.head) / self.size.height
        self.figure.text(8 / self.size.width, top, y, va="center", weight="bold", **style)
        self.figure.text((place.x0 + place.x1) / 2, 12 / self.size.height, x, ha="center", va="center", **style)


def open_canvas(size: Size) -> Canvas:
    figure = Figure(figsize=(size.width / _POINT, size.height / _POINT), dpi=_POINT)
    FigureCanvasAgg(figure)
    return Canvas(figure, size)


def to_png(canvas: Canvas) -> bytes:
    file = io.BytesIO()
    canvas.figure.savefig(file, format="png", dpi=PNG_DPI, facecolor=LIGHT["surface"], metadata={"Software": None})
    return file.getvalue()


def to_svg(canvas: Canvas) -> str:
    """A file without backgrounds: the page has its own."""
    for part in (canvas.figure, *canvas.figure.axes):
        part.patch.set_visible(False)
    file = io.BytesIO()
    canvas.figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue().decode()
