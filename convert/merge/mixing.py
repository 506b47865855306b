"""Mixtures of heads: the maps that fold the KV heads of a group into one, and what they lose.

Shapes: g heads of a group, each of d coordinates; a group's coordinates stacked head by head are g*d.

A mixture takes the keys k_1..k_g of a group to one key `kappa = sum_j key_in[j] k_j`, of which every head reads
back `k_j ~ key_out[j] kappa`; the read-back moves into the queries, `q' = key_out[j]^T q`, which is allowed when
`key_in` and `key_out` commute with RoPE. Values carry no position: `vbar = sum_j value_in[j] v_j`,
`v_j ~ value_out[j] vbar`, and the read-back moves into the output projection, `W_o'[:, h] = W_o[:, h] value_out[j]`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
