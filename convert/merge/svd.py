"""The mixture that loses least among all that commute with RoPE.

The algorithm, for one group of g heads with moments C and Fisher moments F:

1. Keys, at each frequency f: S and P are the complex g x g blocks of C_k and F_k; u is the top eigenvector of
   P^{1/2} S P^{1/2}. The new channel is kappa_f = u^H P^{1/2} k_f, and k_f ~ P^{-1/2} u kappa_f.
2. Values, and likewise the n key coordinates that do not turn: U are the top d eigenvectors of F^{1/2} C F^{1/2}; the
   new head is U^T F^{1/2} v, and v ~ F^{-1/2} U of it.
3. Step 1 is the best where no frequency's errors meet another's gradients; where they do, `coupling` goes on from it.
4. Gauge: an invertible map between the two factors changes nothing but the numbers that are stored and trained, so it
   is chosen to keep these near those of the source. A key channel gets the root mean square of the channels that it
   replaces, and the phase that makes the sum of its read-backs real and positive. A value head is read back by
   orthonormal columns, times the one scale that gives it the mean square of the heads that it replaces, and turned so
   that the sum of its read-backs is symmetric and positive. So equal heads become themselves. Values are not whitened:
   rows that make a faint direction as loud as the others drown these in the rounding of bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rotary import Rotary
from .coupling import ROUNDS, couple
from .mixing import GroupMoments, Mixing, complex_blocks, free_block, key_maps, polar, restoring_scale, unit
from .roots import psd_root


def svd(moments: GroupMoments, heads: int, rotary: Rotary, rounds: int = ROUNDS) -> Mixing:
    """Fold `heads` stacked heads into one; see the module's docstring.

    Args:
        rounds: of step 3 at most. 0 leaves it out: good enough to tell which heads are similar, and much faster.
    """
    channel, weight = (complex_blocks(moment, heads, rotary) for moment in (moments.key, moments.key_fisher))
    free = _coordinates(*(free_block(moment, heads, rotary) for moment in (moments.key, moments.key_fisher)), heads)
    into, out = _channels(channel, weight)
    into, out = couple(into, out, free, moments.key, moments.key_fisher, rotary, rounds)

    size = ((into[:, None] @ channel).squeeze(-2) * into.conj()).sum(-1).real  # [F]
    replaced = channel.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    gauge = (unit(out.sum(-1)) * restoring_scale(replaced, size))[:, None]
    into, out = into * gauge, out / gauge
    key_in, key_out = (key_maps(*maps, rotary) for maps in zip((into, out), free, strict=True))
    return Mixing(key_in, key_out, *_coordinates(moments.value, moments.value_fisher, heads))


def _channels(moment: Tensor, fisher: Tensor) -> tuple[Tensor, Tensor]:
    """Step 1 for complex moments [F, g, g]: the factors by which heads enter a channel and are read back, [F, g]."""
    weight = psd_root(fisher)
    top = torch.linalg.eigh(weight.root @ moment @ weight.root)[1][..., -1:]  # [F, g, 1]
    return (top.mH @ weight.root).squeeze(-2), (weight.inverse @ top).squeeze(-1)


def _coordinates(moment: Tensor, fisher: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Step 2 for moments [g*n, g*n]: the maps of each head into the new one and back, [g, n, n]."""
    n = len(moment) // heads
    weight = psd_root(fisher)
    top = torch.linalg.eigh(weight.root @ moment @ weight.root)[1][:, len(moment) - n :]  # [g*n, n]
    out, change = torch.linalg.qr(weight.inverse @ top)  # [g*n, n]
    into = change @ top.mT @ weight.root  # [n, g*n]
    turn = polar(out.unflatten(0, (heads, n)).sum(0))
    scale = restoring_scale(moment.trace() / heads, ((into @ moment) * into).sum())
    into, out = scale * turn @ into, out @ turn.mT / scale
    return into.unflatten(1, (heads, n)).movedim(1, 0), out.unflatten(0, (heads, n))
