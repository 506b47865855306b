"""The command lines that made a result, written again from the records in its kvfold.json."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ..common.text import builtin_kinds
from ..eval.report.commands import command_line
from ..eval.report.plain import plain
from ..uptrain.recipe import Recipe
from .words import public_name

_UPTRAIN, _PLAIN, _LATENT = "uptrain", "convert plain", "convert mla"
_AS_IT_IS = "as it is"
TRAINED = "trained"  # what uptrain.finish exports, which would bring torch
_SPELT = {"readers": "for"}  # options whose flags have other names
_COMMAS = {"readers"}  # lists that are written with commas
_PAIRS = {"large_eps": ("--large-eps", "--small-eps")}
# Of records older than what was asked for, what is certain: an option, and how to find it.
_RECORDED = {
    "convert gqa": {"kv_heads": None, "method": "svd", "grouping": "contiguous", "seed": 0},
    _LATENT: {"kv_rank": None, "rope_dim": None, "rope_select": None, "form": "deepseek_v3", "q_rank": None},
    _PLAIN: {},
}
_WRITTEN = {"dtype": None, "max_shard_size": None}
_TRAINED_ELSEWHERE = ("model", "revision", "tokens", "alpha", "pretrain_tokens")


@dataclass(frozen=True)
class Step:
    """One record of the history of a result.

    Attributes:
        recipe: what was done.
        asked: what the user asked for beside the defaults; None where that was not recorded.
        source: name of what it was done to, without folders.
        revision: its commit, if it came from the Hub.
        kvfold: the version that did it.
    """

    recipe: Mapping[str, Any]
    asked: Mapping[str, Any] | None
    source: str
    revision: str | None
    kvfold: str

    @property
    def command(self) -> str:
        return plain(str(self.recipe.get("command", "")))


@dataclass(frozen=True)
class Line:
    """A command line; where its record is too old to tell every option, it is not `exact`."""

    text: str
    exact: bool


def command_lines(steps: Sequence[Step], name: str, base: str | None) -> list[Line]:
    """The command lines of a history, oldest first.

    Args:
        steps: oldest first.
        name: of the result.
        base: id of the source on the Hub, if it has one; its commit is then said as well.
    """
    steps = _as_typed(steps)
    lines = []
    for number, step in enumerate(steps):
        out = public_name(steps[number + 1].source if number + 1 < len(steps) else name)
        first = number == 0
        source = base if first and base else public_name(step.source)
        revision = step.revision if first and base else None
        if step.command == _UPTRAIN:
            lines.append(_uptrain(step, source, out, revision, base))
        elif step.command in _RECORDED:
            lines += [*_calibrate(step, source, revision), _convert(step, source, out, revision)]
    return lines


def _as_typed(steps: Sequence[Step]) -> list[Step]:
    """Steps as a user typed them: uptraining of a stock export turns it plain before, and exports it anew after."""
    found = list(steps)
    for number in range(len(found) - 2, 0, -1):
        if number + 1 >= len(found):  # was taken together with what came after it
            continue
        before, healed, after = found[number - 1 : number + 2]
        inside = (
            (before.command, healed.command, after.command) == (_PLAIN, _UPTRAIN, _LATENT)
            and after.source == TRAINED
            and after.recipe.get("rope_select") == _AS_IT_IS
            and healed.recipe.get("model") == before.source
        )
        if inside:
            found[number - 1 : number + 2] = [Step(healed.recipe, healed.asked, before.source, None, healed.kvfold)]
    return found


def _calibrate(step: Step, source: str, revision: str | None) -> list[Line]:
    """The command that made the file of statistics, if a conversion was given one: its record says of how much text."""
    name, made = (step.asked or {}).get("stats"), step.recipe.get("calibration")
    if not isinstance(name, str) or not isinstance(made, Mapping):
        return []
    kinds = made.get("kinds")
    own = [str(kind) for kind in kinds if not builtin_kinds(str(kind))] if isinstance(kinds, Mapping) else []
    flags = ["-o", public_name(name)]
    if isinstance(windows := made.get("windows"), int):
        flags += ["--calib-windows", str(windows)]
    flags += [part for kind in own for part in ("--calib", public_name(kind))]
    if own and isinstance(kinds, Mapping) and len(own) == len(kinds):
        flags.append("--no-calib-builtin")
    if revision:
        flags += ["--revision", plain(revision)]
    return [Line(command_line(["calibrate"], [source], flags), True)]


def _convert(step: Step, source: str, out: str, revision: str | None) -> Line:
    asked = step.asked
    if asked is None:
        usual = {**_RECORDED[step.command], **_WRITTEN}
        asked = {key: step.recipe[key] for key in usual if step.recipe.get(key, usual[key]) != usual[key]}
        if asked.get("rope_select") == _AS_IT_IS:
            asked = {}
        refine = step.recipe.get("refine")
        if isinstance(refine, Mapping) and isinstance(refine.get("windows"), int):
            asked["refine"] = refine["windows"]
    flags = _flags(asked)
    if revision:
        flags += ["--revision", plain(revision)]
    return Line(command_line(step.command.split(), [source, out], flags), step.asked is not None)


def _flags(asked: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in asked.items():
        word = f"--{_SPELT.get(name, name).replace('_', '-')}"
        if name in _PAIRS:
            flags += [_PAIRS[name][0 if value else 1]]
        elif value is True:
            flags.append(word)
        elif value is False:
            flags.append(f"--no-{name.replace('_', '-')}")
        elif isinstance(value, list) and name in _COMMAS:
            flags += [word, ",".join(map(_said, value))]
        else:
            flags += [part for one in (value if isinstance(value, list) else [value]) for part in (word, _said(one))]
    return flags


def _said(value: Any) -> str:
    return public_name(value) if isinstance(value, str) else plain(str(value))


def _uptrain(step: Step, source: str, out: str, revision: str | None, base: str | None) -> Line:
    """The keys that are not as they are by default; the budget is said in steps, which is what it came to."""
    recipe = step.recipe
    usual = {field.name: field.default for field in fields(Recipe) if field.default is not MISSING}
    values = {**recipe, "held_out": recipe.get("held_out_share", usual["held_out"])}
    pairs = {"model": source, "out": out} | ({"revision": revision} if revision else {})
    for key, default in usual.items():
        default = list(default) if isinstance(default, tuple) else default
        value = values.get(key, default)
        if key in _TRAINED_ELSEWHERE or value == default or isinstance(value, Mapping):
            continue
        known = {base} if base else set()
        if isinstance(value, list):
            pairs[key] = f"[{', '.join(_item(public_name(str(one), known)) for one in value)}]"
        elif isinstance(value, bool):
            pairs[key] = str(value).lower()
        else:
            name = value if not isinstance(value, str) else _teacher(key, value, known)
            pairs[key] = plain(str(name))
    text = shlex.join(["kvfold", "uptrain", *(f"{key}={value}" for key, value in pairs.items())])
    return Line(text, "held_out_share" in recipe)


def _teacher(key: str, value: str, known: set[str]) -> str:
    """A teacher's name was recorded without its folders, if it had any: what has a slash is an id of the Hub."""
    return value if key == "teacher" and not value.startswith(("/", "~", ".")) else public_name(value, known)


def _item(text: str) -> str:
    """An item of a list in YAML, in quotes where it would read as something else."""
    return f"'{text}'" if any(letter in text for letter in ",[]{}#'\" ") else text
