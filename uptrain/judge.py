"""The loss on text that is never trained on, the windows shared among all processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import nn

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
