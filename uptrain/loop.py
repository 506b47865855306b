"""Next-token training of a causal language model on fixed windows, driven by accelerate.

Symbols: W windows, S tokens a window, B windows a step over all processes.

The loop keeps no hidden state: what a step reads (`batch_indices`) and how fast it learns (`lr_factor`) are
functions of the knobs and the step number, so a run can be reproduced, or taken up again, from any step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from ..common.errors import UserError, did_you_mean

# How much of the peak learning rate is left when a share of the steps after warm-up, 0..1, is done.
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
}


@dataclass(frozen=True)
class TrainKnobs:
    """What a training run is made of, apart from the model and the windows.

    Args:
        steps: optimizer steps to take; how often each window is seen follows from it.
        batch_size: windows a step, over all processes together, so that the number of processes does not
            change what is learnt.
        learning_rate: the peak, reached at the end of the warm-up.
        warmup: steps over which the rate rises linearly from near zero; AdamW's second moments are noise
            before that.
        decay: what the rate does after the warm-up, a key of `DECAYS`.
        weight_decay: decoupled, on matrices only: norms and biases have no size to keep small.
        betas: AdamW's two averaging factors.
        clip: largest norm of the gradient of all parameters together; 0 never clips.
        seed: sets the order of the windows and every random draw of the model (dropout).
        log_every: steps between two calls of ``log``.

    Raises:
        UserError: a number is out of range, or the decay is unknown.
    """

    steps: int
    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup: int = 100
    decay: str = "cosine"
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "batch_size": 1, "log_every": 1, "warmup": 0, "clip": 0}.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.decay not in DECAYS:
            raise UserError(f"unknown decay {self.decay!r}{did_you_mean(self.decay, DECAYS)}")


@dataclass(frozen=True)
class StepReport:
    """What ``log`` is told: steps done, mean loss since the last call in nats a token, last step's rate."""

    step: int
    loss: float
    learning_rate: float


def lr_factor(step: int, knobs: TrainKnobs) -> float:
    """Share of the peak learning rate that step ``step``, counted from 0, trains with."""
    if step < knobs.warmup:
        return (step + 1) / knobs.warmup
    return DECAYS[knobs.decay]((step - knobs.warmup) / max(1, knobs.steps - knobs.warmup))


def batch_indices(windows: int, knobs: TrainKnobs, start: int = 0) -> Iterator[list[int]]:
    """Yield the B window numbers of each step from ``start`` on.

    Every epoch is a permutation of all windows drawn from (seed, epoch). A batch may straddle two epochs, so
    that no window is left out of either.
    """
    order: list[int] = []
    epoch = -1
    for step in range(start, knobs.steps):
        batch = []
        for position in range(step * knobs.batch_size, (step + 1) * knobs.batch_size):
            if position // windows != epoch:
                epoch = position // windows
                order = random.Random(f"{knobs.seed}/{epoch}").sample(range(windows), windows)
            batch.append(order[position % windows])
        yield batch


def train(
    model: PreTrainedModel,
    windows: torch.Tensor,
    knobs: TrainKnobs,
    *,
    accelerator: Accelerator | None = None,
    log: Callable[[StepReport], None] | None = None,
) -> None:
    """Train ``model`` in place to predict the next token of ``windows``, and leave it in evaluation mode.

    1. Seed torch with ``knobs.seed``; the same model, windows, knobs, threads and machine give equal bits.
    2. Each step: take B windows in the order of `batch_indices` (each process its share), average the loss
       over their (S - 1) predictions, clip the gradient, and step AdamW at the rate of `lr_factor`.
    3. Every ``log_every`` steps, and after the last, call ``log`` on the main process.

    Args:
        model: a causal language model whose parameters are fp32; frozen parameters stay as they are.
        windows: token ids, int64, (W, S). Only the batch at hand is moved to the device.
        knobs: see `TrainKnobs`.
        accelerator: where and in which precision to compute; by default what ``accelerate launch`` set up.
        log: called with a `StepReport`.

    Raises:
        UserError: the windows are not (W, S) int64 with S >= 2, B does not divide among the processes, or
            the loss stops being a number.
    """
    if windows.ndim != 2 or windows.dtype != torch.long or len(windows) == 0 or windows.shape[1] < 2:
        raise UserError(f"windows are {windows.dtype} {tuple(windows.shape)}; give int64 (windows, tokens >= 2)")
    accelerator = accelerator or Accelerator()
    rank, processes = accelerator.process_index, accelerator.num_processes
    if knobs.batch_size % processes:
        raise UserError(f"batch_size {knobs.batch_size} does not divide among {processes} processes")

    torch.manual_seed(knobs.seed)
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": knobs.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=knobs.learning_rate, betas=knobs.betas)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    prepared.train()

    losses: list[torch.Tensor] = []
    for step, batch in enumerate(batch_indices(len(windows), knobs)):
        rate = knobs.learning_rate * lr_factor(step, knobs)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = windows[batch[rank::processes]].to(accelerator.device)  # (B / processes, S)
        loss = prepared(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        if knobs.clip:
            accelerator.clip_grad_norm_(trainable, knobs.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if (step + 1) % knobs.log_every == 0 or step + 1 == knobs.steps:
            mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
            losses.clear()
            if not math.isfinite(mean):
                raise UserError(f"the loss is {mean} at step {step + 1}; lower learning_rate ({rate:.3g} now)")
            if log and accelerator.is_main_process:
                log(StepReport(step + 1, mean, rate))
    # Autocast is wrapped around forward by `prepare`; the caller gets the model back as it was.
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False).eval()
