"""Short names for models that the user named by paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

_JOINTS = tuple("-_.")


def short_names(models: Sequence[str]) -> list[str]:
    """The shortest ends of paths that tell models apart: `a/x/m` and `b/m` become `x/m` and `b/m`.

    Results that are called after their source, the first, lose what they share with it: `m`, `m-gqa` and `m-mla` become
    `m`, `gqa` and `mla`.

    Raises:
        ValueError: two are equal.
    """
    parts = [PurePath(model).parts or (model,) for model in models]
    if len(set(parts)) < len(parts):
        raise ValueError("two models have one name")
    source, *results = [_shortest(own, [other for other in parts if other is not own]) for own in parts]
    called_after = all(name.startswith(source) and name[len(source) :][:1] in _JOINTS for name in results)
    tails = [name[len(source) + 1 :] for name in results] if called_after else []
    return [source, *(tails if tails and all(tails) and source not in tails else results)]


def _shortest(own: tuple[str, ...], others: Sequence[tuple[str, ...]]) -> str:
    for length in range(1, len(own) + 1):
        if all(other[-length:] != own[-length:] for other in others):
            return str(PurePath(*own[-length:]))
    return str(PurePath(*own))  # a whole path that another one ends with
