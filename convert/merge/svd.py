"""The mixture that loses least among all that commute with RoPE.

The algorithm, for one group of g heads with moments C and Fisher moments F:

1. Keys, at each frequency f: S and P are the complex g x g blocks of C_k and F_k; u is the top eigenvector of
   P^{1/2} S P^{1/2}. The new channel is kappa_f = u^H P^{1/2} k_f, and k_f ~ P^{-1/2} u kappa_f.
2. Values, and likewise the n key coordinates that do not turn: U are the top d eigenvectors of F^{1/2} C F^{1/2}; the
   new head is U^T F^{1/2} v, and v ~ F^{-1/2} U of it.
3. Gauge: any invertible map between the two factors changes nothing but the numbers that are stored and trained, so
   it is chosen to keep these near those of the source. A key channel gets the root mean square of the channels that
   it replaces, and the phase that makes the sum of its read-backs real and positive. A new value head is read off by
   orthonormal rows, times the one scale that gives it the mean square of the heads it replaces, and turned so that
   the sum of its read-backs is as near to symmetric and positive as it can be. So heads that are equal become
   themselves.

Step 1 is the optimum when no frequency's errors and gradients are coupled with another's; step 2 always is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rotary import Rotary
from .mixing import GroupMoments, Mixing, complex_blocks, free_block, key_maps, polar, restoring_scale, unit
from .roots import psd_root


def svd(moments: GroupMoments, heads: int, rotary: Rotary) -> Mixing:
    """Fold `heads` stacked heads into one; see the module's docstring.

    Raises:
        UserError: a moment is not finite.
    """
    channels = _channels(*(complex_blocks(moment, heads, rotary) for moment in (moments.key, moments.key_fisher)))
    free = _coordinates(*(free_block(moment, heads, rotary) for moment in (moments.key, moments.key_fisher)), heads)
    key_in, key_out = (key_maps(*maps, rotary) for maps in zip(channels, free, strict=True))
    return Mixing(key_in, key_out, *_coordinates(moments.value, moments.value_fisher, heads))


def _channels(moment: Tensor, fisher: Tensor) -> tuple[Tensor, Tensor]:
    """Step 1 for complex moments [F, g, g]: the factors by which heads enter a channel and are read back, [F, g]."""
    weight = psd_root(fisher)
    top = torch.linalg.eigh(weight.root @ moment @ weight.root)[1][..., -1:]  # [F, g, 1]
    into, out = (top.mH @ weight.root).squeeze(-2), (weight.inverse @ top).squeeze(-1)  # [F, g]
    size = ((into[:, None] @ moment).squeeze(-2) * into.conj()).sum(-1).real  # [F]
    replaced = moment.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    gauge = (unit(out.sum(-1)) * restoring_scale(replaced, size))[:, None]
    return into * gauge, out / gauge


def _coordinates(moment: Tensor, fisher: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Step 2 for moments [g*n, g*n]: the maps of each head into the new one and back, [g, n, n]."""
    n = len(moment) // heads
    weight = psd_root(fisher)
    top = torch.linalg.eigh(weight.root @ moment @ weight.root)[1][:, len(moment) - n :]  # [g*n, n]
    rows, change = torch.linalg.qr(weight.root @ top)
    into, out = rows.mT, weight.inverse @ top @ change.mT  # [n, g*n], [g*n, n]
    turn = polar(out.unflatten(0, (heads, n)).sum(0))
    scale = restoring_scale(moment.trace() / heads, ((into @ moment) * into).sum())
    into, out = scale * turn @ into, out @ turn.mT / scale
    return into.unflatten(1, (heads, n)).movedim(1, 0), out.unflatten(0, (heads, n))
