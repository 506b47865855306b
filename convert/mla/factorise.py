"""One layer's keys and values as a rotary key that all heads share, and a latent without position.

A logit `q . R k`, R turning by the distance, becomes `q' . R kappa + q . U c`: kappa the shared rotary key, c the
latent.
Let g be the gradient at a key, and s the one that the key would have if it did not turn (see `calibration.still`).
Then the loss minds `g . (k - T kappa) - s . U c`, which is small when U c is not the rest of the key itself, but what
the loss can tell of it once it stands still. With F_g, F_s, X the moments of g, of s, and of both, E[g s^T]:

1. What can be told. The best stand-in for a rest k_r is `M k_r`, `M = F_s^{-1} X^T`, taken head by head: no worse than
   over all heads, and told by fewer tokens. What no still key makes good then weighs the moment of `g - M^T s`. That
   is nothing for a frequency that hardly turns, and most of F_g for one that turns fast.
2. Rotary channels. RoPE turns all heads alike, so any complex mixture of a frequency's channels over the heads may be
   kept, and a channel may fold several frequencies, turning by the angle of the first. With S and P the complex blocks
   of the keys' moment and of what step 1 found over heads and frequencies z of a channel, and u the top eigenvector of
   P^{1/2} S P^{1/2}: kappa = u^H P^{1/2} z, z ~ P^{-1/2} u kappa.
3. Latent. Of `Z = [M W_rest; W_v]` the best approximation of rank r, where errors count by F_s and F_v: with U the top
   left singular vectors of `F^{1/2} Z C^{1/2}`, F = diag(F_s, F_v), the latent is `U^T F^{1/2} Z x`, and `F^{-1/2} U`
   reads it back.
4. Constants, where the result has biases. A constant in a key that does not turn adds the same to all logits of a query
   and drops out of the softmax; one in the values comes through attention as it is, and can be left to the bias after
   it. So the latent holds the spread of keys and values, not their means.
5. Gauge: an invertible map between latent and read-backs changes nothing but the numbers that are cached and trained.
   Read-backs get orthonormal columns, so that the latent is as large as what it stands for; a rotary channel gets the
   root mean square of the channels that it stands for, and the phase that makes the sum of its read-backs real.

Shapes: G KV heads of d coordinates, K = G*d; D hidden size (D + 1 with the bias's column), F kept channels, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..merge.mixing import restoring_scale, unit
from ..merge.roots import check_finite, psd_root
from ..rotary import Rotary
from .rotation import Channels


@dataclass(frozen=True)
class Moments:
    """What a layer's inputs are, and what the loss minds; fp64.

    Attributes:
        inputs: E[[x; 1] [x; 1]^T], [D + 1, D + 1].
        key, still, value: E[g g^T] at the keys, at keys that do not turn, and at the values, [K, K].
        cross: E[g s^T] of the first two, [K, K]; None where no gradients were taken. Then a key stands in for itself,
            and what loses its rotation counts in full.
    """

    inputs: Tensor
    key: Tensor
    still: Tensor
    cross: Tensor | None
    value: Tensor


@dataclass(frozen=True)
class Factors:
    """The maps of one layer, fp64.

    Attributes:
        rotary_in: what makes the rotary key, pair j at j and j + F, [2F, D + 1].
        rotary_out: how each head's key is read back from it, [G, d, 2F]; the transpose moves into the queries.
        latent_in: what makes the latent, [r, D + 1].
        key_out, value_out: how each head's still key, and its value, are read back, [G, d, r].
        value_shift: the constant to be added to each head's value, [G, d].
        loss: what the loss minds of all that is lost, by the moments.
    """

    rotary_in: Tensor
    rotary_out: Tensor
    latent_in: Tensor
    key_out: Tensor
    value_out: Tensor
    value_shift: Tensor
    loss: float


def factorise(
    keys: Tensor, values: Tensor, moments: Moments, rotary: Rotary, channels: Channels, rank: int, *, biased: bool
) -> Factors:
    """Factor a layer; see the module's docstring.

    Args:
        keys, values: the heads' rows of the projections, biases in the last column, [G, d, D + 1].
        rotary: which coordinates turn together.
        channels: to keep.
        rank: of the latent.
        biased: whether the result has biases, step 4.

    Raises:
        UserError: a weight or a moment is not finite.
    """
    heads, d, _ = keys.shape
    seen = moments.inputs
    if biased:
        seen = seen.clone()
        mean = seen[-1:] / seen[-1, -1]  # of [x; 1]
        seen -= seen[-1, -1] * mean.mT @ mean
    weight = psd_root(moments.still)
    stand_in, beyond = _told(moments, heads, rotary)

    rows = keys.flatten(0, 1)  # [K, D + 1]
    rotary_in, rotary_out = _rotary_channels(rows, moments.inputs, beyond, heads, rotary, channels)
    rest = rows - rotary_out @ rotary_in
    lost = float(((beyond @ rest) * (rest @ moments.inputs)).sum())

    both = torch.cat([stand_in @ rest, values.flatten(0, 1)])  # [2K, D + 1]
    value = psd_root(moments.value)
    root, inverse = (torch.block_diag(*pair) for pair in ((weight.root, value.root), (weight.inverse, value.inverse)))
    felt = root @ both
    check_finite(felt)
    # Singular values of a square root, as eigenvalues of the product would drown the smallest in rounding.
    squares, axes = torch.linalg.eigh(seen)
    vectors, sizes, _ = torch.linalg.svd(felt @ (axes * squares.clamp_min(0).sqrt()), full_matrices=False)
    top = vectors[:, :rank]  # [2K, r]
    out, change = torch.linalg.qr(inverse @ top)
    latent_in = change @ top.mT @ felt  # [r, D + 1]
    shift = torch.zeros_like(values[..., 0])
    if biased:
        latent_in[:, -1] -= latent_in @ mean[0]
        shift = (values @ mean[0]).view(heads, d)  # [G, d, D + 1] [D + 1]
    key_out, value_out = out.unflatten(0, (2, heads, d))
    lost += float(sizes[rank:].square().sum())
    return Factors(rotary_in, rotary_out.unflatten(0, (heads, d)), latent_in, key_out, value_out, shift, lost)


def _told(moments: Moments, heads: int, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Step 1: M, [K, K], one block a head, and the moment of `g - M^T s`, [K, K]."""
    size, cross = len(moments.key), moments.cross
    if cross is None:
        return torch.eye(size).to(moments.key), moments.key
    each = [(moments.still[part, part], cross[part, part]) for part in _parts(size, heads)]
    inverse = psd_root(torch.stack([still for still, _ in each])).inverse  # [G, d, d]
    blocks = inverse @ inverse @ torch.stack([crossed for _, crossed in each]).mT
    # What does not turn stands in for itself, whatever a floor or rounding made of its moments.
    free = list(rotary.free)
    blocks[..., free] = torch.eye(size // heads).to(blocks)[:, free]
    stand_in = torch.block_diag(*blocks)
    crossed = cross @ stand_in
    return stand_in, moments.key - crossed - crossed.mT + stand_in.mT @ moments.still @ stand_in


def _parts(size: int, heads: int) -> list[slice]:
    return [slice(start, start + size // heads) for start in range(0, size, size // heads)]


def _rotary_channels(
    rows: Tensor, inputs: Tensor, weight: Tensor, heads: int, rotary: Rotary, channels: Channels
) -> tuple[Tensor, Tensor]:
    """Step 2: what makes the rotary key, [2F, D + 1], and reads it back, [K, 2F]. Here constants turn, and count."""
    count, d = len(channels), rotary.head_dim
    moment = rows @ inputs @ rows.mT  # [K, K]
    check_finite(moment)
    into, out = rows.new_zeros(2 * count, len(rows)), rows.new_zeros(len(rows), 2 * count)
    starts = torch.arange(heads, device=rows.device)[:, None] * d
    for j, folded in enumerate(channels):
        if not rotary.re:  # a layer without positions has zeros there
            break
        re, im = (
            (starts + torch.tensor([axis[f] for f in folded], device=rows.device)).flatten()
            for axis in (rotary.re, rotary.im)
        )  # [G * m], head by head
        root, key = psd_root(_complex(weight, re, im)), _complex(moment, re, im)
        top = torch.linalg.eigh(root.root @ key @ root.root)[1][:, -1:]  # [G * m, 1]
        entering, leaving = (root.root @ top).conj()[:, 0], (root.inverse @ top)[:, 0]
        channel = (entering @ key @ entering.conj()).real
        gauge = unit(leaving.sum()) * restoring_scale(key.diagonal().real.mean(), channel)
        entering, leaving = entering * gauge, leaving / gauge
        # A complex factor x + iy takes (re, im) to (x re - y im, y re + x im).
        into[j, re] = into[j + count, im] = entering.real
        into[j + count, re], into[j, im] = entering.imag, -entering.imag
        out[re, j] = out[im, j + count] = leaving.real
        out[im, j], out[re, j + count] = leaving.imag, -leaving.imag
    return into @ rows, out


def _complex(moment: Tensor, re: Tensor, im: Tensor) -> Tensor:
    """E[z z^H] of the complex coordinates (re, im), [n, n], of a real moment."""
    blocks = [moment[a[:, None], b] for a, b in ((re, re), (im, im), (im, re), (re, im))]
    return torch.complex(blocks[0] + blocks[1], blocks[2] - blocks[3])
