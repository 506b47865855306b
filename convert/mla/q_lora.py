"""Queries through a latent of their own: for readers that know no other form, for biases, and to save weights.

`W x + b = B (A x + a)`: exact with A the identity, and D + 1 rows where A's last row is 0 and a's last entry 1, so that
the bias is B's last column. A smaller rank is lossy.

Shapes: S query rows, D hidden size, q rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.errors import UserError

Moment = Callable[[int], Tensor]
"""The second moment of a layer's inputs, [D, D], or [D + 1, D + 1] with the constant 1 behind them."""


@dataclass(frozen=True)
class QueryFactors:
    """A [q, D], a [q] (None without a bias) and B [S, q], fp64."""

    down: Tensor
    constant: Tensor | None
    up: Tensor


def identity(weight: Tensor, bias: Tensor | None) -> QueryFactors:
    """The exact form of `weight` [S, D] and `bias` [S]."""
    weight, size = weight.double(), weight.shape[1]
    down = torch.eye(size, dtype=torch.float64)
    if bias is None:
        return QueryFactors(down, None, weight)
    constant = torch.zeros(size + 1, dtype=torch.float64)
    constant[-1] = 1.0
    return QueryFactors(
        torch.cat([down, down.new_zeros(1, size)]), constant, torch.cat([weight, bias.double()[:, None]], dim=1)
    )


def low_rank(weight: Tensor, bias: Tensor | None, rank: int, moment: Tensor | None = None) -> QueryFactors:
    """The best form of that rank for queries: it loses least of `E |W x + b|^2`.

    The latent is no larger than its input, so that what bounds the one bounds the other.

    Args:
        weight: [S, D].
        bias: [S].
        moment: of the inputs, see `Moment`; white ones if None.
    """
    full = weight.double() if bias is None else torch.cat([weight.double(), bias.double()[:, None]], dim=1)
    size = full.shape[1]
    seen = full if moment is None else full @ _fitting(moment, size)
    up = torch.linalg.eigh(seen @ full.T).eigenvectors[:, -rank:].flip(1)  # [S, q], largest first
    down = up.T @ full  # [q, D] or [q, D + 1]
    norm = torch.linalg.matrix_norm(down, ord=2).clamp(min=torch.finfo(torch.float64).tiny)
    down, up = down / norm, up * norm
    if bias is None:
        return QueryFactors(down, None, up)
    return QueryFactors(down[:, :-1], down[:, -1], up)


def _fitting(moment: Tensor, size: int) -> Tensor:
    """A moment without the constant's row and column where there is no bias."""
    if moment.shape[0] < size:
        raise UserError(
            f"the inputs' moment is {list(moment.shape)}, but queries with a bias need {size} rows: add the constant 1"
        )
    return moment[:size, :size].double()


class QuerySplit:
    """The factors of every layer's queries, computed once for the tensors that are made of them.

    Args:
        rank: None for the identity form.
        moment: for a rank.
    """

    def __init__(self, rank: int | None, moment: Moment | None = None):
        self.rank, self.moment = rank, moment
        self._last: tuple[int, QueryFactors] | None = None

    def __call__(self, layer: int, weight: Tensor, bias: Tensor | None) -> QueryFactors:
        last = self._last  # read once: writing has two threads
        if last is None or last[0] != layer:
            moment = self.moment(layer) if self.moment else None
            factors = identity(weight, bias) if self.rank is None else low_rank(weight, bias, self.rank, moment)
            self._last = last = (layer, factors)
        return last[1]
