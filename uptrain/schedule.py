"""How fast a run learns at each step: stages, each with its own warm-up, peak and decay.

Everything is a function of the step's number, so a run is taken up again from any step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..common.errors import UserError, did_you_mean

WARMUP = 20  # steps

# How much of the way from the peak to the final rate is still ahead when a share of the steps after the warm-up,
# 0 to 1, is done; `decay` is the share in which WSD (arXiv 2404.06395) goes down.
SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "constant": lambda done, decay: 1.0,
    "cosine": lambda done, decay: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done, decay: 1 - done,
    "wsd": lambda done, decay: min(1.0, (1 - done) / decay),
}


@dataclass(frozen=True)
class Schedule:
    """What the learning rate does in one stage.

    Attributes:
        kind: a key of `SCHEDULES`.
        warmup: steps over which the rate rises linearly from near zero: AdamW's second moments are noise before that.
            None for 20, or a tenth of the steps if that is less.
        decay_share: the last share of the steps, in which `wsd` decays.
        final_share: of the peak, what is left at the end.

    Raises:
        UserError: the kind is unknown, or a number out of range.
    """

    kind: str = "cosine"
    warmup: int | None = None
    decay_share: float = 0.2
    final_share: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise UserError(f"unknown schedule {self.kind!r}{did_you_mean(self.kind, SCHEDULES)}")
        if self.warmup is not None and self.warmup < 0:
            raise UserError(f"warmup_steps is {self.warmup}; it must be at least 0")
        if not 0 < self.decay_share <= 1:
            raise UserError(f"decay_share is {self.decay_share}; it must be more than 0 and at most 1")
        if not 0 <= self.final_share <= 1:
            raise UserError(f"final_share is {self.final_share}; it must be between 0 and 1")

    def factor(self, step: int, steps: int) -> float:
        """Share of the peak that step `step`, counted from 0, of `steps` learns with."""
        warmup = min(WARMUP, steps // 10) if self.warmup is None else self.warmup
        if step < warmup:
            return (step + 1) / warmup
        left = SCHEDULES[self.kind]((step - warmup) / max(1, steps - warmup), self.decay_share)
        return self.final_share + (1 - self.final_share) * left


@dataclass(frozen=True)
class Stage:
    """Steps that learn from one thing.

    Attributes:
        name: what they learn from, see `objective.Trainee`: `layers` or `loss`.
        steps: how many.
        learning_rate: the peak.
    """

    name: str
    steps: int
    learning_rate: float


@dataclass(frozen=True)
class Course:
    """The stages of a run, one after the other, all on one schedule."""

    stages: tuple[Stage, ...]
    schedule: Schedule

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def at(self, step: int) -> tuple[str, float]:
        """The stage of a step, counted from 0, and its learning rate."""
        for stage in self.stages:
            if step < stage.steps:
                return stage.name, stage.learning_rate * self.schedule.factor(step, stage.steps)
            step -= stage.steps
        raise IndexError(f"the course has {self.steps} steps")


def course(
    steps: int, schedule: Schedule, *, learning_rate: float, layer_share: float = 0.0, layer_learning_rate: float = 0.0
) -> Course:
    """A course of `steps` steps, the first share of which matches the layers of a teacher (methods.md, section 8)."""
    first = round(steps * layer_share)
    stages = (Stage("layers", first, layer_learning_rate), Stage("loss", steps - first, learning_rate))
    return Course(tuple(stage for stage in stages if stage.steps), schedule)
