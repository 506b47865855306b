"""Attention in latent space: what multi-head latent attention comes to when no key or value is ever expanded.

Shapes: B sequences, H heads, T queries, S cached tokens; R numbers of a latent, d_r of the rotary key that all heads
share; n coordinates of a head's key without position, v of its value.

A key without position is `up_key[h] c` and a value `up_value[h] c` of the token's latent c. Hence
`q . (up_key[h] c) = (up_key[h]^T q) . c`, and the weighted sum of values is `up_value[h]` of the weighted sum of
latents (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). The H heads of T queries are then H*T rows of one matrix
that meets one cache of R + d_r numbers a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .sdpa import prepare_mask, softmax


def absorbed_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    up_key: Tensor,
    up_value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """What each head attends to, [B, H, T, v], equal to attention over expanded keys and values up to rounding.

    The cache is read where it lies, twice: it is neither copied nor joined. Scores of all heads, [B, H*T, S], are held
    at a time, so it is made for few queries; `absorbing_pays` says when.

    Args:
        q_nope: [B, H, T, n].
        q_rope: [B, H, T, d_r], already turned.
        latent: [B, S, R].
        key_rope: [B, S, d_r], already turned.
        up_key: [H, n, R]; any strides.
        up_value: [H, v, R]; any strides.
        scale: what the scores are multiplied by, 1/sqrt(n + d_r) in DeepSeek-V2.
        mask, causal, dropout: as in `sdpa.attention`, of [B, H, T, S]; the softmax runs in fp32 at least.

    Raises:
        UserError: the mask does not fit.
    """
    return absorbed_with_weights(
        q_nope, q_rope, latent, key_rope, up_key, up_value, scale=scale, mask=mask, causal=causal, dropout=dropout
    )[0]


def absorbed_with_weights(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    up_key: Tensor,
    up_value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`absorbed_attention`, and the weights [B, H, T, S] that it attended with."""
    batch, heads, queries, _ = q_nope.shape
    shape = (batch, heads, queries, latent.shape[1])
    mask, blind = prepare_mask(mask, causal, shape, q_nope)
    # The scale goes to the queries, of which there are few.
    q_latent = _by_head(q_nope * scale, up_key).flatten(1, 2)  # [B, H*T, R]
    q_rope = (q_rope * scale).flatten(1, 2)  # [B, H*T, d_r]
    # The cache on the left: threads then share it by tokens, and wait less for each other than over columns.
    scores = torch.baddbmm(key_rope @ q_rope.mT, latent, q_latent.mT.contiguous())  # [B, S, H*T]
    scores = scores.mT.reshape(shape)  # [B, H, T, S]
    weights = F.dropout(softmax(scores, mask), dropout).to(latent.dtype)
    attended = weights.flatten(1, 2) @ latent  # [B, H*T, R]
    output = _by_head(attended.view(batch, heads, queries, -1), up_value.mT)  # [B, H, T, v]
    return (output if blind is None else output.masked_fill(blind, 0)), weights


def absorbing_pays(queries: int, cached: int, rank: int, nope: int, value: int) -> bool:
    """Whether absorbed attention is less work than expanding the cache and attending over that, and needs no more room.

    Args:
        queries: T, of one sequence.
        cached: S, the queries' own tokens included.
        rank, nope, value: R, n and v; the rotary part costs the same either way.
    """
    absorbed = queries * rank * (nope + value) + queries * cached * 2 * rank
    expanded = cached * rank * (nope + value) + queries * cached * (nope + value)
    # Scores and weights, 2 T numbers a head and cached token, take the place of a key and a value.
    return absorbed < expanded and 2 * queries <= nope + value


def _by_head(rows: Tensor, maps: Tensor) -> Tensor:
    """`rows` [B, H, T, i] times each head's own map of `maps` [H, i, o], as [B, H, T, o].

    One product a head for the whole batch, so that the maps are neither repeated nor made contiguous.
    """
    batch, heads, queries, _ = rows.shape
    products = torch.bmm(rows.transpose(0, 1).flatten(1, 2), maps)  # [H, B*T, i] [H, i, o]
    return products.view(heads, batch, queries, maps.shape[-1]).transpose(0, 1)  # [B, H, T, o]
