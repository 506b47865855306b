"""How an uptraining is spread so that it fits: the first way in a table that does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...convert import plan as forms
from ...uptrain.recipe import Recipe
from .machine import MACHINE_DEVICES, MOST_DEVICES, Machine
from .models import Planned
from .stages import StagePlan, Work, shortage
from .training import TrainingPlan, plan_training


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        accelerate: a config that comes with kvfold.
        gradient_checkpointing: compute activations twice.
        least, most: devices for which it is meant.
    """

    accelerate: str
    gradient_checkpointing: bool
    least: int = 1
    most: int = MOST_DEVICES


# The fastest first: what every device holds whole is not sent about, and what is kept is not computed again.
WAYS = (
    Way("single", False, most=1),
    Way("single", True, most=1),
    Way("ddp", False, 2, MACHINE_DEVICES),
    Way("ddp", True, 2, MACHINE_DEVICES),
    Way("fsdp2", False, 2, MACHINE_DEVICES),
    Way("fsdp2", True, 2, MACHINE_DEVICES),
    Way("multi_node", False, MACHINE_DEVICES + 1),
    Way("multi_node", True, MACHINE_DEVICES + 1),
)


def find_way(
    recipe: Recipe,
    said: Mapping[str, Any],
    after: Planned,
    teacher: Planned | None,
    work: Work,
    result_bytes: int,
) -> tuple[TrainingPlan, StagePlan, list[str]]:
    """The plan of an uptraining as the recipe says, or, where it leaves open how to spread it, as it fits.

    Args:
        recipe: of the training.
        said: its section, whose keys were asked for.
        after, teacher: what is trained, and what it learns from.
        work: the pipeline that it belongs to.
        result_bytes: of the healed checkpoint.

    Returns:
        The plan, its row, and what to do if it does not fit.
    """
    machine = work.machine

    def planned(recipe: Recipe, machine: Machine, how: tuple[str, ...]) -> tuple[TrainingPlan, StagePlan]:
        made = plan_training(recipe, after, teacher, machine)
        return made, _row(made, replace(work, machine=machine), result_bytes, how)

    open_to = [recipe] if machine.on_cpu else list(_variants(recipe, said, machine.devices or recipe.processes or 1))
    tried = [planned(one, machine, _how(one, said)) for one in open_to]
    made, row = next((one for one in tried if one[1].fits), tried[-1])
    if row.fits:
        return made, row, []
    lacks = f"uptrain on {made.processes} device{'s' * (made.processes > 1)} takes {shortage(row, machine)}"
    if row.device_bytes <= machine.memory_bytes:
        return (
            made,
            row,
            [f"{lacks}; each process begins with the whole model there, so fewer devices a machine need less"],
        )
    if machine.on_cpu or "accelerate" in said:
        return made, row, [lacks]
    return made, row, [f"{lacks}; {_enough(recipe, said, machine, planned)}"]


def _variants(recipe: Recipe, said: Mapping[str, Any], devices: int) -> Iterator[Recipe]:
    """The recipe in every way that it leaves open."""
    ways = [way for way in WAYS if way.least <= devices <= way.most]
    if "accelerate" in said:
        ways = [Way(recipe.accelerate or "", kept) for kept in (False, True)]
    for way in ways:
        if "gradient_checkpointing" not in said or way.gradient_checkpointing == recipe.gradient_checkpointing:
            yield replace(recipe, accelerate=way.accelerate or None, gradient_checkpointing=way.gradient_checkpointing)


def _how(recipe: Recipe, said: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that were chosen."""
    chosen = {"accelerate": recipe.accelerate, "gradient_checkpointing": recipe.gradient_checkpointing}
    return tuple(
        f"{key}={str(value).lower() if value is True else value}"
        for key, value in chosen.items()
        if value and key not in said
    )


def _row(made: TrainingPlan, work: Work, result_bytes: int, how: tuple[str, ...]) -> StagePlan:
    """The row of an uptraining; of its host memory, what every process takes before anything is divided."""
    here = min(made.processes, MACHINE_DEVICES)
    held = forms.Held(
        made.device_bytes,
        forms.TRANSFORMERS + made.host_bytes // here,
        result_bytes + made.checkpoint_bytes + made.token_bytes,
    )
    return work.row("uptrain", held, processes=made.processes, seconds=made.seconds, how=how)


def _enough(recipe: Recipe, said: Mapping[str, Any], machine: Machine, planned: Any) -> str:
    """The fewest devices, doubled from those that there are, that some way fits."""
    devices = 2 * (machine.devices or recipe.processes or 1)
    while devices <= MOST_DEVICES:
        wider = replace(machine, devices=devices)
        spread = replace(recipe, batch_size=-(-recipe.batch_size // devices) * devices)
        if any(planned(one, wider, ())[1].fits for one in _variants(spread, said, devices)):
            return f"{devices} devices would do"
        devices *= 2
    whole = planned(recipe, machine, ())[0].teacher_bytes
    if whole > machine.memory_bytes:
        return f"no number of devices does, as each holds the whole teacher, {whole / 1e9:.1f} GB; try uptrain.teacher="
    return "no number of devices does; lower uptrain.window, or set uptrain.lora_rank"
