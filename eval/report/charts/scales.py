"""Axes: their scales, and what is written on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from ..palette import LIGHT
from .canvas import TEXT

LOG_FROM = 4.0  # from this ratio of largest to smallest on, an axis is logarithmic


def scale(
    axis: Any,
    values: Sequence[float],
    say: Callable[[float], str],
    *,
    base: int = 10,
    pad: float,
    log: bool | None = None,
    ticks: int = 8,
) -> None:
    """Scale an axis to values: logarithmic where they differ by much, with ticks that are round numbers.

    Args:
        pad: of the whole range, left free at both ends.
        ticks: at most, of a scale to base 2.
    """
    low, high = min(values), max(values)
    if log is None:
        log = low > 0 and high / low > LOG_FROM
    name = axis.axis_name
    if log and low > 0:
        getattr(axis.axes, f"set_{name}scale")("log", base=base)
        span = max(high / low, 1.3) ** pad
        bounds = (low / span, high * span) if pad else (low, high if high > low else 2 * low)
        locator = (
            LogLocator(base=2, numticks=ticks)
            if base == 2
            else LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,), numticks=10)
        )
    else:
        span = ((high - low) or abs(high) or 1) * pad
        bounds = (low - span, high + span) if pad else (low, high if high > low else low + 1)
        locator = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    getattr(axis.axes, f"set_{name}lim")(*bounds)
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: say(value)))
    axis.set_minor_formatter(NullFormatter())


def log_mark(axis: Any) -> str:
    return " (log)" if axis.get_scale() == "log" else ""


def note(axes: Any, height: float, text: str, side: str, colour: str) -> None:
    """A few words at the right end of a level."""
    place = axes.get_yaxis_transform()
    axes.text(1, height, text, transform=place, color=LIGHT[colour], fontsize=TEXT, ha="right", va=side)
