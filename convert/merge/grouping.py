"""Which KV heads share a group.

Neighbours by default, for then nothing moves. Heads may also be put together by how little they lose as a pair; the
queries then move with them, which is a matter of the order in which a checkpoint stores its heads.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..rotary import Rotary
from .apply import Groups
from .methods import Mix
from .mixing import GroupMoments, group_moments, loss
from .roots import check_finite

# A swap must gain more than rounding could make of nothing, or two of them might undo each other for ever.
_LEAST_GAIN = 1e-12


def similar(pair_loss: Tensor, groups: int) -> Groups:
    """Equal groups in which the losses of all pairs add up to little.

    1. Start from the neighbours, and from groups grown greedily: each begins with the head that loses most with all
       that are left, and takes, head by head, the one that loses least with those it has.
    2. Swap the two heads of different groups that gain most by it, until no swap gains.
    3. Keep the better of the two ends. It is never worse than the neighbours.

    Args:
        pair_loss: what heads i and j lose as a pair, symmetric [G, G]; its diagonal is not read.
        groups: how many; divides G.

    Returns:
        Each group in ascending order, and groups in the order of their first heads.
    """
    check_finite(pair_loss)
    pair_loss = pair_loss.double().cpu().clone().fill_diagonal_(0.0)
    size = len(pair_loss) // groups
    neighbours = torch.arange(len(pair_loss)) // size  # the group of each head
    ends = [_swap(pair_loss, start, groups) for start in (neighbours, _grow(pair_loss, groups))]
    best = min(ends, key=lambda member: float(pair_loss[member[:, None] == member].sum()))
    return tuple(sorted(tuple((best == group).nonzero().flatten().tolist()) for group in range(groups)))


def pair_losses(mix: Mix, layer: GroupMoments, rotary: Rotary) -> Tensor:
    """What every two heads of a layer lose when a method folds them into one: symmetric [G, G], zeros on the diagonal.

    Args:
        layer: the moments of all heads; see `mixing.layer_moments`.
    """
    heads = len(layer.key) // rotary.head_dim
    losses = torch.zeros(heads, heads, dtype=torch.float64)
    for i, j in itertools.combinations(range(heads), 2):
        pair = group_moments(layer, (i, j), rotary.head_dim)
        losses[i, j] = losses[j, i] = loss(mix(pair, 2, rotary), pair)
    return losses


def _grow(pair_loss: Tensor, groups: int) -> Tensor:
    """Step 1's second start: the group of each head, [G]."""
    member = torch.full((len(pair_loss),), -1)
    for group in range(groups):
        chosen = _with(pair_loss, member < 0).masked_fill(member >= 0, -math.inf).argmax()
        for _ in range(len(pair_loss) // groups):
            member[chosen] = group
            chosen = _with(pair_loss, member == group).masked_fill(member >= 0, math.inf).argmin()
    return member


def _with(pair_loss: Tensor, others: Tensor) -> Tensor:
    """What each head loses with the others, which are given as a mask; all [G]."""
    return pair_loss @ others.double()


def _swap(pair_loss: Tensor, member: Tensor, groups: int) -> Tensor:
    """Step 2, from and to the group of each head, [G]."""
    member = member.clone()
    while True:
        joining = pair_loss @ one_hot(member, groups).double()  # [G, N]: what a head loses with each group
        staying = joining.gather(1, member[:, None])  # [G, 1]
        moving = joining[:, member] - pair_loss  # [G, G]: what head i loses in the group of j, without j
        gains = staying + staying.mT - moving - moving.mT
        gains[member[:, None] == member] = 0.0
        i, j = divmod(int(gains.argmax()), len(gains))
        if gains[i, j] <= _LEAST_GAIN * pair_loss.sum():
            return member
        member[[i, j]] = member[[j, i]]
