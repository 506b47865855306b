"""The steps from plain weights to stock ones (and the pieces that the way back shares): pure functions.

They take matrices as they are stored, compute in fp64 and return fp64, so that a weight is rounded once, at the end. A
bias is a matrix of one column, as it meets the same rows.

Legend: H heads; r rank, n, d_r, v sizes of a head before padding, r', n', d_r', v' after it; D hidden size, X any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..latent_form import Form, after_norm, neutral_gain

_PIECE = 1 << 22  # elements in fp64 at a time, where a matrix may be as large as the vocabulary


def pad(x: Tensor, size: int, dim: int) -> Tensor:
    """`x` with zeros behind it, until `dim` has `size` entries."""
    shape = list(x.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim) if shape[dim] else x


def interleave(x: Tensor) -> Tensor:
    """Rotary rows [..., 2F, X] in halves, pair j being j and j + F, as neighbours: 2j and 2j + 1."""
    re, im = x.chunk(2, dim=-2)
    return torch.stack([re, im], dim=-2).flatten(-3, -2)  # [..., F, 2, X] -> [..., 2F, X]


def multiply(x: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """`factor * x`, of any shape, rounded from fp64 to `dtype` piece by piece."""
    if factor == 1.0:
        return x
    result = torch.empty(x.shape, dtype=dtype)
    pieces = zip(x.reshape(-1).split(_PIECE), result.view(-1).split(_PIECE), strict=True)
    for piece, target in pieces:
        target.copy_(piece.double() * factor)
    return result


def queries(x: Tensor, form: Form) -> Tensor:
    """Query rows [H * (n + d_r), X] as [H * (n' + d_r'), X]: neighbouring rotary pairs, padding, softmax scale."""
    heads = x.double().unflatten(0, (form.heads, -1))  # [H, n + d_r, X]
    nope, rope = heads.split([form.plain.nope, form.plain.rope], dim=1)
    # Real channels first, as the padded series begins with their frequencies.
    nope, rope = pad(nope, form.stock.nope, 1), pad(interleave(rope), form.stock.rope, 1)
    return torch.cat([nope, rope], dim=1).flatten(0, 1) * form.logit_factor


def latent_rows(x: Tensor, form: Form, layer: int) -> Tensor:
    """Latent and shared key rows [r + d_r, X] as [r' + d_r', X]: latents shrunk before their norm, the key's rotary
    pairs as neighbours."""
    latent, rope = x.double().split([form.plain.rank, form.plain.rope], dim=0)
    latent = latent * form.latent_scales[layer]
    return torch.cat([pad(latent, form.stock.rank, 0), pad(interleave(rope), form.stock.rope, 0)])


def latent_gain(form: Form, layer: int) -> Tensor:
    """The weight of the latent's norm, [r']. A padded rank needs no correction: where eps dominates, the mean over more
    elements is as good as the one over fewer."""
    return _gain(form.stock.rank, form.latent_scales[layer], form.eps)


def expansion(x: Tensor, form: Form, layer: int) -> Tensor:
    """Keys and values of a latent, [H * (n + v), r], as [H * (n' + v'), r']; behind the norm."""
    heads = x.double().unflatten(0, (form.heads, -1))  # [H, n + v, r]
    nope, value = heads.split([form.plain.nope, form.plain.value], dim=1)
    rows = torch.cat([pad(nope, form.stock.nope, 1), pad(value, form.stock.value, 1)], dim=1).flatten(0, 1)
    return pad(rows, form.stock.rank, 1) * after_norm(form.latent_scales[layer], form.eps)


def output(x: Tensor, form: Form) -> Tensor:
    """The output projection [D, H * v] as [D, H * v'], writing to a scaled residual stream."""
    heads = x.double().unflatten(1, (form.heads, -1))  # [D, H, v]
    return pad(heads, form.stock.value, 2).flatten(1, 2) * form.residual_factor


def query_rows(a: Tensor, form: Form, layer: int) -> Tensor:
    """Rows [q, X] that make the query's latent, shrunk before their norm."""
    return a.double() * form.query_scales[layer]


def query_gain(form: Form, layer: int) -> Tensor:
    """The weight of the query's norm, [q]."""
    assert form.query_rank is not None
    return _gain(form.query_rank, form.query_scales[layer], form.eps)


def query_expansion(b: Tensor, form: Form, layer: int) -> Tensor:
    """Queries of their latent, [H * (n + d_r), q], as [H * (n' + d_r'), q]; behind the norm."""
    return queries(b, form) * after_norm(form.query_scales[layer], form.eps)


def _gain(size: int, scale: float, eps: float) -> Tensor:
    return torch.full((size,), neutral_gain(scale, eps), dtype=torch.float64)
