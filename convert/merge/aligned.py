"""Heads turned towards each other, then averaged.

Jin et al. 2025, "Align Attention Heads Before Merging Them: An Effective Way for Converting MHA to GQA"
(arXiv 2412.20677). The algorithm, for one group of g heads with moments C (Fisher moments are not used):

1. Keys, at each frequency: one rotation of the plane for each head, which is a complex number T_j of length 1. Values,
   and the key coordinates that do not turn: an orthogonal map T_j for each head. They maximise the mean square of
   sum_j T_j^H x_j, which is sum_jk tr(T_j^H C_jk T_k), by generalised Procrustes analysis: head after head is turned to
   the sum of the others, until it grows no more. Starting from the top eigenvectors of C, and with the largest head
   first, the result does not depend on the order of the heads.
2. The new head is the mean of the turned heads, times the scale that restores their root mean square: averaging
   shrinks what does not agree. The read-back T_j stays a rotation.
3. All rotations of a group may be turned together; the one is taken that brings their sum nearest to the identity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..rotary import Rotary
from .mixing import GroupMoments, Mixing, complex_blocks, free_block, key_maps, polar, restoring_scale, unit

ROUNDS = 200
# Of what the heads weigh together; the turns themselves are then right to about its square root.
TOLERANCE = 1e-9


def aligned(moments: GroupMoments, heads: int, rotary: Rotary) -> Mixing:
    """Fold `heads` stacked heads into one; see the module's docstring."""
    factors = (
        factor[..., 0, 0] for factor in _align(complex_blocks(moments.key, heads, rotary), heads, unit)
    )  # [F, g]
    free = _align(free_block(moments.key, heads, rotary), heads, polar)
    key_in, key_out = (key_maps(*maps, rotary) for maps in zip(factors, free, strict=True))
    return Mixing(key_in, key_out, *_align(moments.value, heads, polar))


def _align(moment: Tensor, heads: int, nearest: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The maps of each head into the new one and back, [..., g, n, n].

    Args:
        moment: [..., g*n, g*n]; complex channels are heads of n = 1.
        nearest: gives the rotation nearest to a map [..., n, n].
    """
    n = moment.shape[-1] // heads
    sizes = moment.diagonal(dim1=-2, dim2=-1).real.unflatten(-1, (heads, n)).sum(-1)  # [..., g]
    others = moment.clone()  # a head has nothing to gain from itself
    for head in range(heads):
        others.unflatten(-1, (heads, n)).unflatten(-3, (heads, n))[..., head, :, head, :] = 0  # of [..., g, n, g, n]
    top = torch.linalg.eigh(moment)[1][..., moment.shape[-1] - n :]  # [..., g*n, n]
    # Times the moment, so that directions without any size, which have no eigenvectors of their own, turn nothing.
    turns = nearest((moment @ top).unflatten(-2, (heads, n)))  # [..., g, n, n]
    agreement = torch.zeros_like(sizes[..., 0])
    for _ in range(ROUNDS):
        for head in sizes.reshape(-1, heads).sum(0).argsort(descending=True).tolist():
            pull = others[..., head * n : (head + 1) * n, :] @ turns.flatten(-3, -2)  # [..., n, n]
            turns[..., head, :, :] = nearest(pull)
        stacked = turns.flatten(-3, -2)  # [..., g*n, n]
        before, agreement = agreement, (stacked.conj() * (others @ stacked)).sum((-2, -1)).real
        if (agreement - before <= TOLERANCE * sizes.sum(-1)).all():
            break
    turns = turns @ nearest(turns.sum(-3, keepdim=True)).mH
    replaced = sizes.sum(-1) / heads
    size = (sizes.sum(-1) + agreement) / heads**2  # of the mean of the turned heads
    scale = restoring_scale(replaced, size)[..., None, None, None]
    return turns.mH * scale / heads, turns
