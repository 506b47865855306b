"""A checkpoint's tensors by the names that the model in memory has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..checkpoint import Checkpoint
from ..families import Family, Promise

if TYPE_CHECKING:
    from torch import Tensor

Read = Callable[[str], "Tensor"]


def full_names(promised: Mapping[str, Promise]) -> dict[str, str]:
    """The names with the base model's prefix, which a checkpoint may lack, and those that it has for them."""
    return {promise.weight.template.format(**promise.slots): name for name, promise in promised.items()}


def tensor_reader(checkpoint: Checkpoint, promised: Mapping[str, Promise]) -> Callable[[str], Tensor | None]:
    """A function from a tensor's full name to the tensor, or to None where the checkpoint has none of that name."""
    names = full_names(promised)
    return lambda name: checkpoint.tensor(checkpoint.tensors[names[name]]) if name in names else None


def model_reader(family: Family, stored: Mapping[str, str], read: Read, experts: int) -> Read:
    """Translate names: a checkpoint may lack the base model's prefix, and may hold each expert apart.

    Args:
        stored: what the checkpoint holds, see `full_names`.
        read: gives a tensor by its name in the checkpoint.
        experts: how many a layer has, if any.

    Returns:
        A function from a parameter's name in memory to its tensor.
    """
    import torch

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
