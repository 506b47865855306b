"""Applying a merge to tensors as they are stored: fused or apart, transposed, biases and gains included.

A merge says what becomes of the heads of one group; here stands where heads lie. Symbols: G KV heads form N groups
of g; H query heads, H/G of them to a KV head, follow theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from .mixing import Mixing

KV_TERMS = frozenset("KVG")
QUERY_TERMS = frozenset("QOH")

Groups = tuple[tuple[int, ...], ...]
"""The KV heads behind each KV head of the result."""


class Merge(Protocol):
    """What becomes of one layer's heads.

    Attributes:
        groups: see `Groups`.
        terms: the terms (see `families`) that it computes; of the others, at most the order changes.
    """

    groups: Groups
    terms: frozenset[str]

    def fold(self, heads: torch.Tensor, term: str, group: int, name: str) -> torch.Tensor:
        """Heads `[g, d, ...]` of K, V or G of a group -> `[1, d, ...]`, of Q, O or H -> as many as they were.

        Args:
            heads: in fp32 or fp64.
            name: of the tensor that they are made for.
        """
        ...


@dataclass(frozen=True)
class Mixed:
    """The merge of a method that mixes channels: one `Mixing` a group."""

    groups: Groups
    mixings: Sequence[Mixing]
    terms = frozenset("QKVO")

    def fold(self, heads: torch.Tensor, term: str, group: int, name: str) -> torch.Tensor:
        import torch

        mixing = self.mixings[group]
        maps = {"K": mixing.key_in, "V": mixing.value_in, "Q": mixing.key_out, "O": mixing.value_out}[term].to(heads)
        if term in KV_TERMS:
            return torch.einsum("gij,gj...->i...", maps, heads)[None]  # [1, d, ...]
        each = heads.unflatten(0, (len(maps), -1))  # [g, H/G, d, ...]
        return torch.einsum("gij,ghi...->ghj...", maps, each).flatten(0, 1)


def contiguous(heads: int, groups: int) -> Groups:
    """Groups of neighbours; `groups` divides `heads`."""
    size = heads // groups
    return tuple(tuple(range(start, start + size)) for start in range(0, heads, size))


def is_contiguous(groups: Groups) -> bool:
    """Whether every head stays where it was."""
    return [head for group in groups for head in group] == list(range(sum(map(len, groups))))


def members(groups: Groups, term: str, sizes: Mapping[str, int]) -> list[list[int]]:
    """The heads of each group on an axis of that term."""
    share = sizes["H"] // sizes["G"] if term in QUERY_TERMS else 1
    return [[head * share + i for head in group for i in range(share)] for group in groups]


def touches(shape: Iterable[Sequence[str]], merge: Merge, sizes: Mapping[str, int]) -> bool:
    """Whether a tensor with these axes changes under a merge."""
    if len(merge.groups) == sizes["G"] and is_contiguous(merge.groups):
        return False
    terms = merge.terms if is_contiguous(merge.groups) else KV_TERMS | QUERY_TERMS
    return any(term in terms for axis in shape for term in axis)


def merge_stored(
    tensors: Sequence[torch.Tensor],
    *,
    name: str,
    shape: Sequence[Sequence[str]],
    sizes: Mapping[str, int],
    merge: Merge,
    group: int | None = None,
    transpose: bool = False,
) -> torch.Tensor:
    """Merge the heads in a stored weight, bias or gain, whichever of its axes holds them.

    Args:
        tensors: one tensor, or the tensors of one group's KV heads where a family stores each head apart.
        name: of the result.
        shape: the tensor's axes in the symbols of `families`.
        sizes: the size of each symbol.
        merge: the layer's.
        group: which group several tensors belong to.
        transpose: whether the target stores the matrix the other way around.

    Returns:
        The tensor with its K, V or G axis shortened, in the input's dtype.
    """
    import torch

    if len(tensors) > 1:
        assert group is not None
        return merge.fold(_widened(torch.stack(list(tensors))), "G", group, name)[0]
    (tensor,) = tensors
    for dim, axis in enumerate(shape):
        if touches([axis], merge, sizes):
            parts = tensor.split([sizes[term] for term in axis], dim=dim)
            merged = [
                _merge_axis(part, dim, term, sizes, merge, name) if touches([term], merge, sizes) else part
                for term, part in zip(axis, parts, strict=True)
            ]
            tensor = torch.cat(merged, dim=dim)
    return tensor.mT if transpose else tensor


def _merge_axis(
    tensor: torch.Tensor, dim: int, term: str, sizes: Mapping[str, int], merge: Merge, name: str
) -> torch.Tensor:
    count = sizes["H" if term in QUERY_TERMS else "G"]
    heads = tensor.movedim(dim, 0).unflatten(0, (count, -1))  # [n, d, ...]; d = 1 on an axis of heads
    kept = count if term in QUERY_TERMS else len(merge.groups)
    result = heads.new_empty(kept, *heads.shape[1:])
    share = kept // len(merge.groups)
    for group, indices in enumerate(members(merge.groups, term, sizes)):
        # One group at a time: small buffers are used again, large ones come back from the system.
        part = heads[indices[0] : indices[-1] + 1] if indices[-1] - indices[0] < len(indices) else heads[indices]
        result[group * share : (group + 1) * share] = merge.fold(_widened(part), term, group, name)
    return result.flatten(0, 1).movedim(0, dim)  # [..., n * d, ...]


def _widened(heads: torch.Tensor) -> torch.Tensor:
    import torch

    return heads.to(torch.float32 if heads.dtype.itemsize == 2 else torch.float64)
