"""The loss on text that is never trained on, the windows shared among all processes; and what it must not be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import nn

from ..common.errors import CheckFailed
from .data.store import Part
from .loop import reducible


def held_out_losses(
    model: nn.Module, parts: Sequence[Part], accelerator: Accelerator, *, windows: int, micro_batch_size: int
) -> dict[str, float]:
    """Nats a target token on each part, by its name; the model's mode is put back afterwards.

    Args:
        model: an `objective.Trainee`, as accelerate wrapped it or not.
        windows: at most so many of each part.
        micro_batch_size: windows that a process holds at a time; does not change the result.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return {part.name: _loss(model, part, accelerator, windows, micro_batch_size) for part in parts}
    finally:
        model.train(training)


def _loss(model: nn.Module, part: Part, accelerator: Accelerator, windows: int, micro_batch_size: int) -> float:
    judged = range(min(windows, part.windows))
    mine = judged[accelerator.process_index :: accelerator.num_processes]
    total = torch.zeros(3, dtype=torch.float64, device=reducible(accelerator))
    # Sharded models go forward together: a process whose share is used up runs a window that does not count.
    most = -(-len(judged) // accelerator.num_processes)
    for first in range(0, most, micro_batch_size):
        share = mine[first : first + micro_batch_size]
        batch = part.batch(share or judged[:1]).to(accelerator.device)
        labels = batch.labels if share else torch.full_like(batch.labels, -100)
        with accelerator.autocast():
            sums = model(batch.ids, labels, batch.positions, None, "eval")
        total += sums.to(total)
    return float(accelerator.reduce(total, "sum")[1]) / max(1, part.scored(judged))


def check_reference(losses: Mapping[str, float], name: str) -> None:
    """Refuse to compare with, or to learn from, a model that computes no loss.

    Raises:
        CheckFailed: so it is.
    """
    if broken := [text for text, loss in losses.items() if not math.isfinite(loss)]:
        raise CheckFailed(f"the loss of {name} on {broken[0]} is no number; take another model to compare with")


def check_start(losses: Mapping[str, float], reference: Mapping[str, float], guess: float, model: str) -> None:
    """Refuse to heal what is broken: a model that predicts text no better than a guess.

    Args:
        losses: of the model, by text.
        reference: of the model that it is compared with, if there is one.
        guess: loss of what knows nothing, ln V.
        model: what the user calls it.

    Raises:
        CheckFailed: so it does.
    """
    name = _worst(losses)
    if losses[name] < guess:
        return
    why = f"{model} is broken; kvfold verify SOURCE {model} names the first bad layer"
    if not (before := reference.get(name, 0.0)) < guess:
        why = f"the reference has {before:.2f}, so it is not the conversion: are model, tokenizer and text a match?"
    raise CheckFailed(
        f"before training the loss on {name} is {losses[name]:.2f} nats a token, a guess has {guess:.2f}: {why}"
    )


def check_going(losses: Mapping[str, float], below: float, step: int) -> None:
    """Refuse to save, or to write, what training has broken.

    Args:
        below: what every loss must be below; infinity for any number.

    Raises:
        CheckFailed: one is not.
    """
    name = _worst(losses)
    if not losses[name] < below:
        guess = f", a guess has {below:.2f}" if math.isfinite(below) else ""
        raise CheckFailed(
            f"training has broken the model: after step {step} the loss on {name} is {losses[name]:.2f} nats a "
            f"token{guess}; nothing was written: lower the learning rate, in another run_dir"
        )


def _worst(losses: Mapping[str, float]) -> str:
    """The text with the largest loss; what is no number is the largest."""
    return max(losses, key=lambda text: losses[text] if math.isfinite(losses[text]) else math.inf)
