"""A checkpoint's tensors by the names that the model in memory has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..families import Family, Promise

Read = Callable[[str], Tensor]


def model_reader(family: Family, promised: Mapping[str, Promise], read: Read, experts: int) -> Read:
    """Translate names: a checkpoint may lack the base model's prefix, and may hold each expert apart.

    Args:
        promised: what the checkpoint holds, as `checks.account` gives it.
        read: gives a tensor by its name in the checkpoint.
        experts: how many a layer has, if any.

    Returns:
        A function from a parameter's name in memory to its tensor.
    """
    stored = {promise.weight.template.format(**promise.slots): name for name, promise in promised.items()}

    def tensor(name: str) -> Tensor:
        if name in stored:
            return read(stored[name])
        number, _, end = name.removeprefix(family.layers).partition(".")
        parts = [f"{family.layers}{number}.{part}" for part in family.in_memory[end]]
        if "{expert}" not in parts[0]:
            return torch.cat([read(stored[part]) for part in parts])
        rows = ([read(stored[part.format(expert=expert)]) for part in parts] for expert in range(experts))
        return torch.stack([torch.cat(row) for row in rows])  # [E, rows, D]

    return tensor
