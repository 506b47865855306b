"""Methods that act on whole heads, so that they commute with RoPE of any kind and with every QK-norm.

Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints"
(arXiv 2305.13245), section 2.1: `mean` is their method; `first` and `random` are their baselines, kept for
ablation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .apply import KV_TERMS, Groups

if TYPE_CHECKING:
    import torch

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


Fold = Callable[["torch.Tensor", str, int, str, Knobs], "torch.Tensor"]
"""Maps a group's heads `[g, d, ...]` to `[1, d, ...]`, given term, group and name (see `apply.Merge`)."""


@dataclass(frozen=True)
class WholeHeads:
    """The merge of a method on whole heads."""

    groups: Groups
    method: Fold
    knobs: Knobs
    terms = KV_TERMS

    def fold(self, heads: torch.Tensor, term: str, group: int, name: str) -> torch.Tensor:
        return self.method(heads, term, group, name, self.knobs) if term in KV_TERMS else heads


def mean(heads: torch.Tensor, term: str, group: int, name: str, knobs: Knobs) -> torch.Tensor:
    """The average of a group's heads."""
    return heads.mean(dim=0, keepdim=True)


def first(heads: torch.Tensor, term: str, group: int, name: str, knobs: Knobs) -> torch.Tensor:
    """The first head of a group; the others are lost."""
    return heads[:1]


def random(heads: torch.Tensor, term: str, group: int, name: str, knobs: Knobs) -> torch.Tensor:
    """Fresh heads: projections from N(0, initializer_range), biases 0; a norm's gain stays the mean."""
    import torch
    import xxhash

    if "norm" in name:
        return mean(heads, term, group, name, knobs)
    fresh = torch.zeros_like(heads[:1])
    if not name.endswith(".bias"):
        # Seeded by name, term and group: independent of sharding and order, and apart for fused keys and values.
        digest = xxhash.xxh64_intdigest(f"{name}/{term}/{group}".encode(), seed=knobs.seed & _64_BITS)
        generator = torch.Generator().manual_seed(digest >> 1)
        fresh.normal_(0, knobs.initializer_range, generator=generator)
    return fresh
