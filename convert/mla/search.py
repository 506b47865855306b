"""Which rotary size, frequencies and fold lose least under a budget: measured, on windows not calibrated on.

The windows are joined into long ones. A frequency that is given up turns no key by much within one window, and may turn
it full circle over the model's context: a choice that is the best at 512 tokens can be worthless at 2,000.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...common.kvcache import fit_context
from ...common.loading import load_tokenizer
from ...common.progress import Progress, Stages
from ...common.scoring import logit_chunks, token_nll
from ...common.tokens import leading_ids
from ..calibration.calibrate import Runner
from ..calibration.result import result_model
from ..stream import Output
from .budget import Choice


class Planned(Protocol):
    """The plain form of a choice: its tensors, and its config.json."""

    @property
    def outputs(self) -> list[Output]: ...

    @property
    def config(self) -> dict[str, Any]: ...


LENGTH = 2048  # tokens of a joined window, unless the model's context is shorter

Plan = Callable[[Choice], Planned]


@dataclass(frozen=True)
class Measured:
    """A choice, and its loss in nats a token."""

    choice: Choice
    loss: float


def search(
    runner: Runner, candidates: Sequence[Choice], plan: Plan, windows: int, progress: Stages
) -> tuple[list[Measured], int]:
    """Measure every choice, the best first; returns them, and the windows that were left to measure on.

    Where none is left, it measures on those that were calibrated on, and says 0.

    Args:
        runner: of the source.
        plan: gives the plain form of a choice.
        windows: how many to measure on, before they are joined; they come after those that were calibrated on.
        progress: opens a progress for the stage.
    """
    count = runner.how.text.windows
    text = runner.windows(count + windows)
    left = max(0, len(text) - count)
    length = fit_context(runner.source.config.full, "window", None, LENGTH)
    lead = leading_ids(load_tokenizer(runner.source.folder))
    text = (text.after(count) if left else text).joined(length, lead)
    batches = runner.share(text).batches(runner.how.batch_size)
    measured = []
    with progress("searching") as report:
        total = len(candidates) * runner.sizes["L"]
        for number, choice in enumerate(candidates):
            made = plan(choice)
            advance = partial(_advance, report, number * runner.sizes["L"], total)
            measured.append(Measured(choice, mean_loss(runner, made.outputs, made.config, batches, advance)))
    return sorted(measured, key=lambda one: one.loss), left


def _advance(report: Progress, done: int, total: int, layer: int) -> None:
    report(done + layer + 1, total)


@torch.no_grad()
def mean_loss(
    runner: Runner,
    outputs: Sequence[Output],
    config: dict[str, Any],
    batches: Sequence[Tensor],
    advance: Callable[[int], None],
) -> float:
    """The cross entropy of a converted model in nats a token, over all processes; one layer in memory at a time."""
    model, _ = result_model(runner, outputs, config, runner.dtype)
    states = [model.embed(ids) for ids in batches]
    for number in range(runner.sizes["L"]):
        with model.loaded([number]):
            states = [model.call(number, state) for state in states]
        advance(number)
    total = torch.zeros(2, dtype=torch.float64, device=runner.device)
    for ids, state in zip(batches, states, strict=True):
        ids = ids.to(runner.device)
        for part, logits in logit_chunks(model.model, model.finish(state)[:, :-1]):
            losses = token_nll(logits, ids[:, 1:][:, part])
            total += torch.stack([losses.double().sum(), torch.tensor(losses.numel()).to(total)])
    total = runner.workers.sum(total)
    return float(total[0] / total[1])
