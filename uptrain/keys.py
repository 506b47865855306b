"""The keys of a recipe, as its docstring and its fields say them: `kvfold uptrain --keys`."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, dataclass, fields
from typing import Any

from .recipe import CHOICES, Recipe


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: as it stands in the YAML.
        default: as it would stand there; empty where there is none to write.
        choices: what it may be, if that is a list.
        meaning: one sentence or two.
    """

    name: str
    default: str
    choices: tuple[str, ...]
    meaning: str


def recipe_keys() -> list[Key]:
    """All keys, in the recipe's order."""
    text = inspect.getdoc(Recipe) or ""
    arguments = re.split(r"^(?:Args|Raises):\n", text, flags=re.MULTILINE)[1]
    meanings = dict(re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", arguments, flags=re.MULTILINE))
    return [
        Key(
            field.name,
            "" if field.default is MISSING else _written(field.default),
            CHOICES.get(field.name, ()),
            re.sub(r"\bNone (for|to)\b", r"empty \1", " ".join(meanings[field.name].replace("``", "").split())),
        )
        for field in fields(Recipe)
    ]


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value in (None, "") else str(value)
