"""Foreign names and figures made fit for every place that a report is shown in: a page, JSON and a terminal."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_REPLACED = "\ufffd"
# Controls (with ESC and line ends), halves of surrogate pairs, and separators of lines and paragraphs.
_UNFIT = {"Cc", "Cs", "Zl", "Zp"}
_TURNING = {chr(code) for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def plain(text: str) -> str:
    """A text in one line, without what steers a terminal, turns the direction of writing or cannot be encoded."""
    return "".join(
        _REPLACED if unicodedata.category(letter) in _UNFIT or letter in _TURNING else letter for letter in text
    )


def plain_names(names: Sequence[str]) -> list[str]:
    """`plain` names that are as unlike as they were."""
    found: list[str] = []
    for name in map(plain, names):
        other, number = name, 2
        while other in found:
            other, number = f"{name} ({number})", number + 1
        found.append(other)
    return found


def cleaned(value: T) -> T:
    """Plain data and dataclasses with all texts `plain`, and None for numbers that are not finite."""
    found: Any = value
    if isinstance(value, str):
        found = plain(value)
    elif isinstance(value, float):
        found = value if math.isfinite(value) else None
    elif isinstance(value, list | tuple):
        found = type(value)(map(cleaned, value))
    elif is_dataclass(value) and not isinstance(value, type):
        found = type(value)(**{field.name: cleaned(getattr(value, field.name)) for field in fields(value)})
    return found
