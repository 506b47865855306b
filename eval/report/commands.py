"""The command lines that give a report's figures again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What need not be said.
_USUAL = {
    "window": None,
    "max_windows": None,
    "batch_size": 1,
    "dtype": "auto",
    "device": "auto",
    "revision": None,
    "max_ratio": 1.1,
    "speed": True,
    "title": None,
}
_WORDS = {"contexts": "--context", "runs": "--run"}
_SCORING = ("text", "window", "max_windows", "batch_size", "dtype", "device", "revision")
_RUNNING = ("dtype", "device")
_REPORTING = (*_SCORING, "max_ratio", "speed", "contexts", "runs", "title")


def command_lines(
    models: Sequence[str], out: str, settings: Mapping[str, Any], *, cached: int, timed: Sequence[int], steps: int
) -> list[str]:
    """The command of a report, and those of its parts.

    Args:
        models: the source first.
        settings: what `measure.report` was given.
        cached: tokens that caches were sized at.
        timed: tokens cached where speed was measured, if it was.
        steps: of a block that was timed.
    """
    lines = [
        ["kvfold", "report", *models, "-o", out, *_flags(settings, _REPORTING)],
        ["kvfold", "eval", "compare", *models, *_flags(settings, _SCORING)],
    ]
    for number, model in enumerate(models):
        where = _flags(settings, ("device",) if number else ("device", "revision"))
        lines.append(["kvfold", "eval", "cache", model, "--context", str(cached), *where])
    if timed:
        contexts = _several("--context", timed)
        lines.append(
            ["kvfold", "eval", "speed", *models, *contexts, "--steps", str(steps), *_flags(settings, _RUNNING)]
        )
    return [shlex.join(line) for line in lines]


def _flags(settings: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    flags: list[str] = []
    for name in names:
        value, word = settings[name], _WORDS.get(name, f"--{name.replace('_', '-')}")
        if value is False:
            flags.append(f"--no-{name}")
        elif name not in _USUAL or value != _USUAL[name]:
            flags += _several(word, value if isinstance(value, list | tuple) else [value])
    return flags


def _several(word: str, values: Iterable[Any]) -> list[str]:
    return [part for value in values for part in (word, str(value))]
