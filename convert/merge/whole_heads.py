"""How the KV heads of a group become one.

Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints"
(arXiv 2305.13245), section 2.1: `mean` is their method; `first` and `random` are their baselines, kept for
ablation. All three act on whole heads, so they commute with RoPE of any kind and with every QK-norm.

Shapes: G KV heads form N groups of g = G/N neighbours, because query head h reads KV head h // (H/G).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..common.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import torch

HEAD_AXES = frozenset("KVG")
_64_BITS = 2**64 - 1


@dataclass(frozen=True)
class Knobs:
    """What a method may need to know beside the heads.

    Attributes:
        seed: of the random numbers; each tensor draws its own from it.
        initializer_range: standard deviation of fresh projection weights (the config's own).
    """

    seed: int = 0
    initializer_range: float = 0.02


Fold = Callable[["torch.Tensor", str], "torch.Tensor"]
"""Maps heads `[N, g, ...]` to `[N, ...]`, given which heads they are: `K`, `V`, or `G` for gains."""


def mean(heads: torch.Tensor, term: str, *, name: str, knobs: Knobs) -> torch.Tensor:
    """The average of each group's heads."""
    return heads.mean(dim=1)


def first(heads: torch.Tensor, term: str, *, name: str, knobs: Knobs) -> torch.Tensor:
    """The first head of each group; the others are lost."""
    return heads[:, 0]


def random(heads: torch.Tensor, term: str, *, name: str, knobs: Knobs) -> torch.Tensor:
    """Fresh heads: projections from N(0, initializer_range), biases 0; a norm's gain stays the mean."""
    import torch
    import xxhash

    if "norm" in name:
        return mean(heads, term, name=name, knobs=knobs)
    fresh = torch.zeros_like(heads[:, 0])
    if not name.endswith(".bias"):
        # Seeded by name and term: independent of sharding and order, and apart for fused keys and values.
        digest = xxhash.xxh64_intdigest(f"{name}/{term}".encode(), seed=knobs.seed & _64_BITS)
        generator = torch.Generator().manual_seed(digest >> 1)
        fresh.normal_(0, knobs.initializer_range, generator=generator)
    return fresh


METHODS: dict[str, Callable[..., torch.Tensor]] = {"mean": mean, "first": first, "random": random}


def find_method(name: str) -> Callable[..., torch.Tensor]:
    """The method of that name; with `name` and `knobs` bound, it is a `Fold`.

    Raises:
        UserError: there is none.
    """
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}{did_you_mean(name, METHODS)}")
    return METHODS[name]


def holds_kv_heads(shape: tuple[tuple[str, ...], ...]) -> bool:
    """Whether a tensor with these axis terms (see `families`) has KV heads along one of them."""
    return any(HEAD_AXES.intersection(axis) for axis in shape)


def merge_stored(
    tensors: Sequence[torch.Tensor],
    *,
    shape: tuple[tuple[str, ...], ...],
    sizes: Mapping[str, int],
    groups: int,
    fold: Fold,
    transpose: bool = False,
) -> torch.Tensor:
    """Merge the KV heads in a stored weight, bias or gain, whichever of its axes holds them.

    Args:
        tensors: one tensor, or the tensors of one group's heads where a family stores each head apart.
        shape: the tensor's axes in the symbols of `families`.
        sizes: the size of each symbol; `sizes["G"]` heads become `groups`.
        fold: the method; called for keys, values or gains apart, with heads in fp32 or fp64.
        transpose: whether the target stores the matrix the other way around.

    Returns:
        The tensor with its K, V or G axis shortened, in the input's dtype.
    """
    import torch

    if len(tensors) > 1:
        return _merge_axis(torch.stack(list(tensors)), 0, len(tensors), 1, partial(fold, term="G"))[0]  # g x [d] -> [d]
    (tensor,) = tensors
    for dim, axis in enumerate(shape):
        if groups != sizes["G"] and HEAD_AXES.intersection(axis):
            parts = tensor.split([sizes[term] for term in axis], dim=dim)
            merged = [
                _merge_axis(part, dim, sizes["G"], groups, partial(fold, term=term)) if term in HEAD_AXES else part
                for term, part in zip(axis, parts, strict=True)
            ]
            tensor = torch.cat(merged, dim=dim)
    return tensor.mT if transpose else tensor


def _merge_axis(
    tensor: torch.Tensor, dim: int, heads: int, groups: int, fold: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    import torch

    wide = torch.float32 if tensor.dtype.itemsize == 2 else torch.float64
    rows = tensor.movedim(dim, 0)  # [G * d, ...]; d = 1 on an axis of heads
    grouped = rows.reshape(groups, heads // groups, len(rows) // heads, *rows.shape[1:])  # [N, g, d, ...]
    merged = rows.new_empty(groups, *grouped.shape[2:])  # [N, d, ...]
    for group in range(groups):  # one at a time: small buffers are used again, large ones come back from the system
        merged[group] = fold(grouped[group : group + 1].to(wide))[0]
    return merged.flatten(0, 1).movedim(0, dim)  # [..., N * d, ...]
