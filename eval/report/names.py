"""Short names for models that the user named by paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath


def short_names(models: Sequence[str]) -> list[str]:
    """The shortest ends of paths that tell models apart: `a/x/m` and `b/m` become `x/m` and `b/m`.

    Raises:
        ValueError: two are equal.
    """
    parts = [PurePath(model).parts or (model,) for model in models]
    if len(set(parts)) < len(parts):
        raise ValueError("two models have one name")
    return [_shortest(own, [other for other in parts if other is not own]) for own in parts]


def _shortest(own: tuple[str, ...], others: Sequence[tuple[str, ...]]) -> str:
    for length in range(1, len(own) + 1):
        if all(other[-length:] != own[-length:] for other in others):
            return str(PurePath(*own[-length:]))
    return str(PurePath(*own))  # a whole path that another one ends with
