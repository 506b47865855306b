"""How results were made and healed: what kvfold.json says, and the figures in the folders of their runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.errors import UserError
from ...common.raw_config import read_json
from ...convert.directory import RECORD, records
from ...uptrain.history import NAME, read_history
from .record import HeldOut, Uptraining

_LONGEST = 80  # letters of a setting that are said

POINTS = 120  # of a training curve at most; neighbouring steps are averaged
_UPTRAIN = "uptrain"
_UNSAID = {"command", "seed"}
_SAID = {_UPTRAIN: {"model", "teacher", "train", "lora_rank", "window", "steps", "batch_size", "learning_rate"}}


def recipes(model: str) -> list[dict[str, Any]]:
    """The recipes that made a model, oldest first; none of what kvfold did not make.

    Raises:
        UserError: its kvfold.json is broken.
    """
    path = Path(model) / RECORD
    if not path.is_file():
        return []
    told = [record.get("recipe") for record in records(read_json(path, "record of a conversion"))]
    return [recipe for recipe in told[::-1] if isinstance(recipe, dict)]


def describe(recipe: Mapping[str, Any]) -> str:
    """A recipe in one line: `convert gqa: kv_heads 2, method svd, refine windows 32`."""
    command = str(recipe.get("command", "made"))[:_LONGEST]
    settings = _flat(recipe)
    names = _SAID.get(command, {name for name, _ in settings} - _UNSAID)
    said = [
        f"{name} {str(value)[:_LONGEST]}"
        for name, value in settings
        if name in names and isinstance(value, str | int | float) and not isinstance(value, bool) and value
    ]
    return f"{command}: {', '.join(said)}" if said else command


def _flat(recipe: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The settings that people choose; of refinement, those that it has in a table of its own."""
    refine = recipe.get("refine")
    inner = refine.items() if isinstance(refine, Mapping) else ()
    return [*recipe.items(), *((f"refine {name}", value) for name, value in inner if name in ("windows", "passes"))]


def uptraining(
    models: Mapping[str, str], made: Mapping[str, Sequence[Mapping[str, Any]]], runs: Sequence[str | Path]
) -> tuple[list[Uptraining], list[str]]:
    """The curves of the results that were healed, and warnings of those without.

    A run is known by the held-out losses that it ended with, which kvfold.json repeats: a folder that was used for
    something else since is not mistaken for it.

    Args:
        models: names and paths of results.
        made: their recipes by name.
        runs: folders of runs to look in, besides `OUT.run`.

    Raises:
        UserError: one of `runs` has no metrics, or belongs to no result.
    """
    histories = {str(run): _history(Path(run), asked=True) for run in runs}
    curves, warnings, used = [], [], set()
    for name, model in models.items():
        ends = [recipe.get("held_out") for recipe in made[name] if recipe.get("command") == _UPTRAIN]
        if not ends:
            continue
        usual = f"{Path(model)}.run"
        places = histories | ({} if usual in histories else {usual: _history(Path(usual), asked=False)})
        found = next((run for run, lines in places.items() if lines and _end(lines) == ends[-1]), None)
        if found is None:
            warnings.append(
                f"{name} was healed, but no run in {usual} ends as it did, so it has no curve; "
                "name its folder with --run"
            )
            continue
        used.add(found)
        curves.append(_curve(name, found, places[found]))
    if strangers := sorted(histories.keys() - used):
        raise UserError(f"the run in {strangers[0]} made none of the results; leave --run {strangers[0]} out")
    return curves, warnings


def _history(run: Path, *, asked: bool) -> list[dict[str, Any]]:
    try:
        lines = read_history(run) if (run / NAME).is_file() else []  # a pipe would never be read to its end
    except OSError as error:
        if asked:
            raise UserError(f"cannot read {run / NAME} ({error.strerror}); give the folder of a run") from None
        return []
    if asked and not lines:
        raise UserError(f"{run} holds no {NAME} of an uptraining; give the folder of a run")
    return lines


def _end(lines: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    return next((line["held_out"] for line in reversed(lines) if "held_out" in line), None)


def _curve(name: str, run: str, lines: Sequence[Mapping[str, Any]]) -> Uptraining:
    steps = [line for line in lines if "cross_entropy" in line]
    width = math.ceil(len(steps) / POINTS) or 1
    parts = [steps[start : start + width] for start in range(0, len(steps), width)]
    looks = [line for line in lines if "held_out" in line]
    texts = {text: None for look in looks for text in look["held_out"]}
    return Uptraining(
        model=name,
        run=run,
        steps_averaged=width,
        tokens=[part[-1]["tokens"] for part in parts],
        training_loss=[math.fsum(line["cross_entropy"] for line in part) / len(part) for part in parts],
        held_out=[
            HeldOut(
                text=text,
                tokens=[look["tokens"] for look in looks],
                loss=[look["held_out"].get(text) for look in looks],
                reference=looks[0].get("reference", {}).get(text),
            )
            for text in texts
        ],
    )
