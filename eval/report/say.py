"""Numbers as people read them: rounded, with units. The page keeps each in full beside what it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NOTHING = "–"


def say_tick(value: float) -> str:
    """A round number, as the ticks of an axis are."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def say_number(value: float) -> str:
    """Whole numbers in full, others to four digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if value and not 1e-4 <= abs(value) < 1e10:
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}" if value else "0"


def say_bytes(value: float, three: Callable[[float], str] | None = None) -> str:
    """In binary units: `4.00 KiB`, or `512 B`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{(three or _three)(value / 1024**power)} {unit}"
    return f"{value:,.0f} B"


def say_bytes_tick(value: float) -> str:
    return say_bytes(value, say_tick)


def say_count(value: float) -> str:
    """In decimal units: `2.36 M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{_three(value / size)} {unit}"
    return f"{value:,.0f}"


def _three(value: float) -> str:
    """Three digits, and whole numbers in full."""
    return f"{value:#.3g}" if value < 100 else f"{value:,.0f}"


def say_share(value: float) -> str:
    return f"{100 * value:.1f} %"


def say_ratio(value: float) -> str:
    return f"{say_number(float(value))}×"


# By the last part of a figure's name, or by the end of that.
_HOW: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("perplexity_ratio", say_ratio),
    ("max_ratio", say_ratio),
    ("kv_ratio", say_share),
    ("kv_elements_ratio", say_share),
    ("top1_agreement", say_share),
    ("bytes", say_bytes),
    ("bytes_per_token", say_bytes),
    ("bytes_per_second", lambda value: f"{say_count(value)}B/s"),
    ("flops_per_second", lambda value: f"{say_count(value)}FLOP/s"),
    ("flops_per_step", lambda value: f"{say_count(value)}FLOP"),
    ("parameters", say_count),
    ("floor_share", say_share),
    ("x_first", say_ratio),
)


def say(name: str, value: Any) -> str:
    """What a page shows of a value.

    Args:
        name: dotted, of its place in the report: `results.2.perplexity`, `cache_growth.results.1.kv_bytes.3`.
    """
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    named = next((part for part in reversed(name.split(".")) if not part.isdigit()), "")
    return next((how for end, how in _HOW if named.endswith(end)), say_number)(value)
