"""Mixtures of heads: the maps that fold the KV heads of a group into one, and what they lose.

Shapes: G heads of a layer, g heads of a group, each of d coordinates; a group's coordinates stacked head by head
are g*d. RoPE turns F pairs of them and leaves n free (2F + n = d). D hidden size.

A mixture takes the keys k_1..k_g of a group to one key `kappa = sum_j key_in[j] k_j`, of which every head reads
back `k_j ~ key_out[j] kappa`; the read-back moves into the queries, `q' = key_out[j]^T q`, which is allowed when
`key_in` and `key_out` commute with RoPE. Values carry no position: `vbar = sum_j value_in[j] v_j`,
`v_j ~ value_out[j] vbar`, and the read-back moves into the output projection, `W_o'[:, h] = W_o[:, h] value_out[j]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rotary import Rotary
from .roots import check_finite

# Calibration counts for directions that it never showed at this share of what each coordinate has on its own: less
# than anything that matters, more than the rounding of sums in fp32, which may leave a moment with negative sizes. Of
# unseen inputs the weights decide then.
RIDGE = 1e-6
# A dead coordinate has nothing of its own; it counts for this share of the mean.
DEAD = 1e-2


@dataclass(frozen=True)
class GroupMoments:
    """Second moments of one group's stacked heads, fp64.

    Attributes:
        key, value: E[k k^T] and E[v v^T] of the projections' outputs (before RoPE, biases included), [g*d, g*d].
        key_fisher, value_fisher: E[g g^T] of the gradients of the token-summed cross entropy with respect to
            them, [g*d, g*d]; the identity where no gradients were taken.
    """

    key: Tensor
    value: Tensor
    key_fisher: Tensor
    value_fisher: Tensor


@dataclass(frozen=True)
class Mixing:
    """The maps of one group, each [g, d, d] in fp64; see the module's docstring."""

    key_in: Tensor
    key_out: Tensor
    value_in: Tensor
    value_out: Tensor


def layer_moments(
    keys: Tensor,
    values: Tensor,
    inputs: Tensor | None = None,
    key_fisher: Tensor | None = None,
    value_fisher: Tensor | None = None,
) -> GroupMoments:
    """The moments of all heads of a layer, as if they were one group; what calibration saw gets a ridge (`RIDGE`).

    Args:
        keys, values: the heads' rows of the projections, their biases (or zeros) in the last column, [G, d, D+1].
        inputs: the second moment of [x; 1], [D+1, D+1]; the identity where nothing was calibrated.
        key_fisher, value_fisher: [G*d, G*d]; the identity where no gradients were taken.

    Raises:
        UserError: a moment is not finite.
    """
    inputs = None if inputs is None else inputs + ridge(inputs)
    moments = []
    for rows in (keys.flatten(0, 1), values.flatten(0, 1)):  # [G*d, D+1]
        moment = (rows if inputs is None else rows @ inputs) @ rows.mT
        check_finite(moment)
        moments.append(moment)
    whole = torch.eye(len(moments[0])).to(moments[0])
    return GroupMoments(*moments, *(whole if f is None else f + ridge(f) for f in (key_fisher, value_fisher)))


def ridge(moment: Tensor) -> Tensor:
    """What every coordinate of a moment [n, n] gets on top, as a diagonal matrix; see `RIDGE`."""
    diagonal = moment.diagonal()
    return torch.diag(RIDGE * diagonal.maximum(DEAD * diagonal.mean()))


def group_moments(layer: GroupMoments, heads: Sequence[int], head_dim: int) -> GroupMoments:
    """The moments of some heads of a layer, stacked in the order given."""
    device = layer.key.device
    rows = torch.tensor(heads, device=device)[:, None] * head_dim + torch.arange(head_dim, device=device)  # [g, d]
    rows = rows.flatten()
    moments = (layer.key, layer.value, layer.key_fisher, layer.value_fisher)
    return GroupMoments(*(moment[rows[:, None], rows] for moment in moments))


def loss(mixing: Mixing, moments: GroupMoments) -> float:
    """What a group loses: `tr(F R C R^T)` of its keys and of its values, R = I - out in over the stacked coordinates.

    Twice the second-order estimate of the rise in cross entropy, in nats per token, errors and gradients taken as
    independent; where the Fisher moments are the identity, the mean square of what is not read back.
    """
    parts = (
        (mixing.key_in, mixing.key_out, moments.key, moments.key_fisher),
        (mixing.value_in, mixing.value_out, moments.value, moments.value_fisher),
    )
    return sum(residual(*part) for part in parts)


def residual(into: Tensor, out: Tensor, moment: Tensor, fisher: Tensor) -> float:
    """tr(F R C R^T), R = I - out in, for maps [g, d, d] and moments [g*d, g*d]."""
    into = torch.cat(list(into), dim=1)  # g x [d, d] -> [d, g*d]
    out = out.flatten(0, 1)  # [g*d, d]
    # The inner product of F R and R C: nothing large is subtracted from the square of something small.
    return float(((fisher - fisher @ out @ into) * (moment - out @ (into @ moment))).sum())


def complex_blocks(moment: Tensor, heads: int, rotary: Rotary) -> Tensor:
    """E[z z^H] of each frequency's channels over the heads, complex [F, g, g], of a real moment [g*d, g*d]."""
    blocks = moment.unflatten(0, (heads, -1)).unflatten(2, (heads, -1))  # [g, d, g, d]
    re, im = list(rotary.re), list(rotary.im)
    real = blocks[:, re, :, re] + blocks[:, im, :, im]  # [F, g, g]
    return torch.complex(real, blocks[:, im, :, re] - blocks[:, re, :, im])


def free_block(moment: Tensor, heads: int, rotary: Rotary) -> Tensor:
    """The part [g*n, g*n] of a moment [g*d, g*d] that the coordinates without position have."""
    blocks = moment.unflatten(0, (heads, -1)).unflatten(2, (heads, -1))  # [g, d, g, d]
    free = list(rotary.free)
    return blocks[:, free][..., free].flatten(2).flatten(0, 1)  # [g, n, g, n] -> [g*n, g*n]


def uncoupled(moment: Tensor, heads: int, rotary: Rotary) -> Tensor:
    """A moment [g*d, g*d] without what couples frequencies, a channel and its conjugate, or turning and free
    coordinates: the mean over all turns of all channels. It has the same `complex_blocks` and `free_block`."""
    d = rotary.head_dim
    re, im, free = list(rotary.re), list(rotary.im), torch.tensor(rotary.free, dtype=torch.long, device=moment.device)
    blocks = complex_blocks(moment, heads, rotary) / 2  # [F, g, g]
    kept = torch.zeros_like(moment).view(heads, d, heads, d)
    kept[:, re, :, re] = kept[:, im, :, im] = blocks.real
    kept[:, im, :, re] = blocks.imag
    kept[:, re, :, im] = -blocks.imag
    n = len(free)
    kept[:, free[:, None], :, free] = free_block(moment, heads, rotary).view(heads, n, heads, n).permute(1, 3, 0, 2)
    return kept.view_as(moment)


def key_maps(factors: Tensor, free: Tensor, rotary: Rotary) -> Tensor:
    """Real maps [g, d, d]: channel f of head j times the complex `factors[f, j]`, and `free[j]` on the rest.

    Args:
        factors: complex, [F, g].
        free: [g, n, n].

    The transpose of such a map multiplies by the conjugate, which is what queries need.
    """
    d, heads = rotary.head_dim, factors.shape[1]
    maps = free.new_zeros(heads, d, d)
    re, im, rest = (
        torch.tensor(axis, dtype=torch.long, device=free.device) for axis in (rotary.re, rotary.im, rotary.free)
    )
    maps[:, re, re] = maps[:, im, im] = factors.real.mT
    maps[:, im, re] = factors.imag.mT
    maps[:, re, im] = -factors.imag.mT
    maps[:, rest[:, None], rest] = free
    return maps


def whole_heads(weights: Tensor, head_dim: int) -> Mixing:
    """The mixture of a method on whole heads: the new head is their sum by `weights` [g], and read back as it is."""
    identity = torch.eye(head_dim).to(weights)
    into = weights[:, None, None] * identity  # [g, d, d]
    out = identity.expand_as(into)
    return Mixing(into, out, into, out)


def polar(matrix: Tensor) -> Tensor:
    """The orthogonal matrix [..., n, n] nearest to a square one."""
    left, _, right = torch.linalg.svd(matrix)
    return left @ right


def unit(numbers: Tensor) -> Tensor:
    """Complex numbers at length 1; a zero, which has no phase, becomes 1."""
    length = numbers.abs()
    return torch.where(length > 0, numbers / length, 1.0)


def restoring_scale(wanted: Tensor, size: Tensor) -> Tensor:
    """What to multiply a signal of mean square `size` by to give it the one wanted; 1 where either is nothing."""
    return torch.where((wanted > 0) & (size > 0), wanted / size, 1.0).sqrt()
