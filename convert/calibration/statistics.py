"""The statistics of calibration: three second moments a layer, collected from a stream of tokens, kept in a file.

Methods read from them how large each direction of the keys and values is, and how much the loss minds an error in
it. Symbols: D hidden size, K = G*d the KV heads' coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerStatistics:
    """What one layer does on text; means over tokens.

    Attributes:
        inputs: E[[x; 1] [x; 1]^T] of the attention's inputs, [D + 1, D + 1].
        key_fisher, value_fisher: E[g g^T] of the gradients of the token-summed cross entropy with respect to the
            outputs of the key and value projections (before RoPE), [K, K]: the empirical Fisher information. None
            where only forward passes were made.
    """

    inputs: Tensor
    key_fisher: Tensor | None
    value_fisher: Tensor | None


class Moment:
    """A running sum of x x^T: products in the data's precision (at least fp32), sums in fp64.

    Nothing here knows batches or tokens, so neither their split nor their order changes the result, but for rounding.
    """

    def __init__(self, size: int, device: torch.device | str):
        self.sum = torch.zeros(size, size, dtype=torch.float64, device=device)

    def add(self, rows: Tensor) -> None:
        """Take up rows [..., size]."""
        rows = rows.detach().flatten(0, -2)
        wide = rows if rows.dtype == torch.float64 else rows.float()
        self.sum += wide.T @ wide


class MomentOfInputs(Moment):
    """The same for [x; 1], without making that: the mean of x and the number of tokens fill the last row."""

    def __init__(self, size: int, device: torch.device | str):
        super().__init__(size, device)
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, rows: Tensor) -> None:
        super().add(rows)
        self.total += rows.detach().flatten(0, -2).sum(0, dtype=torch.float64)
        self.tokens += rows[..., 0].numel()

    def whole(self) -> Tensor:
        """The sum of [x; 1] [x; 1]^T, [D + 1, D + 1]."""
        top = torch.cat([self.sum, self.total[:, None]], dim=1)
        one = torch.full_like(self.total[:1], self.tokens)
        return torch.cat([top, torch.cat([self.total, one])[None]])
