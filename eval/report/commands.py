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
_SCORING = ("text", "window", "max_windows", "batch_size", "dtype", "device", "revision")
_SIZING = ("context", "device", "revision")
_TIMING = ("context", "steps", "dtype", "device", "revision")
_REPORTING = (*_SCORING, "max_ratio", "speed", "context", "run", "title")


def command_lines(
    models: Sequence[str],
    out: str,
    settings: Mapping[str, Any],
    *,
    cached: int,
    timed: Mapping[str, Any] | None,
) -> list[str]:
    """The command of a report, and those of its parts.

    Args:
        models: the source first.
        settings: what `measure.report` was given.
        cached: tokens that caches were sized at.
        timed: `context`, `steps` and `dtype` of the timing, if there was one.
    """
    # The folder exists once this is read.
    lines = [
        command_line(["report"], models, ["-o", out, *_flags(settings, _REPORTING), "--overwrite"]),
        command_line(["eval", "compare"], models, scoring_flags(settings)),
    ]
    for number, model in enumerate(models):
        sizing = {**settings, "context": [cached]} | ({"revision": None} if number else {})
        lines.append(command_line(["eval", "cache"], [model], _flags(sizing, _SIZING)))
    if timed:
        lines.append(command_line(["eval", "speed"], models, _flags({**settings, **timed}, _TIMING)))
    return lines


def command_line(words: Sequence[str], models: Sequence[str], flags: Sequence[str]) -> str:
    """A line for a shell; models whose names look like options stand where they cannot be."""
    if any(model.startswith("-") for model in models):
        return shlex.join(["kvfold", *words, *flags, "--", *models])
    return shlex.join(["kvfold", *words, *models, *flags])


def scoring_flags(settings: Mapping[str, Any]) -> list[str]:
    """What a command needs to score the same text in the same way."""
    return _flags(settings, _SCORING)


def _flags(settings: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    flags: list[str] = []
    for name in names:
        value, word = settings[name], f"--{name.replace('_', '-')}"
        if value is False:
            flags.append(f"--no-{name}")
        elif name not in _USUAL or value != _USUAL[name]:
            values = value if isinstance(value, list | tuple) else [value]
            flags += [part for value in values for part in (word, str(value))]
    return flags
