"""Where a family's layer holds its four attention projections, however they are stored.

Terms: Q, K, V are rows of the projections into queries, keys and values, O the columns of the one out of them.
Canonical form of Q, K, V: heads `[n, d, D + 1]`, the bias (zero where there is none) in the last column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .families import Family


@dataclass(frozen=True)
class Projection:
    """One of the four.

    Attributes:
        module: the module's name within the layer.
        dim: the axis of the module's weight that holds the heads.
        start, stop: where on that axis they lie; it may be shared with the other terms.
    """

    module: str
    dim: int
    start: int
    stop: int


def projections(family: Family, sizes: Mapping[str, int]) -> dict[str, Projection]:
    """The four projections of every layer of a model, by term."""
    found: dict[str, Projection] = {}
    for weight in family.weights:
        if not weight.template.startswith(family.layers) or len(weight.shape) != 2 or "norm" in weight.template:
            continue
        for dim, axis in enumerate(weight.shape):
            start = 0
            for term in axis:
                if term in ("Q", "K", "V", "O"):
                    module = weight.template.partition("{layer}.")[2].removesuffix(".weight")
                    found[term] = Projection(module, dim, start, start + sizes[term])
                start += sizes[term]
    return found


def read_heads(
    place: Projection, prefix: str, read: Callable[[str], Tensor | None], head_dim: int, dtype: torch.dtype
) -> Tensor:
    """Heads `[n, d, D + 1]` of Q, K or V.

    Args:
        prefix: the layer's name, such as `model.layers.3.`.
        read: gives a tensor by name, or None where there is no such tensor (a bias).
    """
    weight = read(f"{prefix}{place.module}.weight")
    assert weight is not None
    rows = weight.movedim(place.dim, 0)[place.start : place.stop].to(dtype)  # [n * d, D]
    bias = read(f"{prefix}{place.module}.bias")
    column = torch.zeros_like(rows[:, 0]) if bias is None else bias[place.start : place.stop].to(rows)
    return torch.cat([rows, column[:, None]], dim=1).unflatten(0, (-1, head_dim))
