"""Masked scaled dot-product attention: torch's kernels for speed, and the explicit form that they are checked against.

Shapes: B sequences, H query heads, G key/value heads (query head h reads KV head h // (H/G)), Tq queries, Tk keys,
d coordinates of a query or key head, v of a value head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.errors import UserError, divisors


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    explicit: bool = False,
) -> Tensor:
    """`softmax(scale query key^T + mask) value`, as [B, H, Tq, v].

    Args:
        query: [B, H, Tq, d].
        key: [B, G, Tk, d]; G divides H.
        value: [B, G, Tk, v].
        mask: broadcastable to [B, H, Tq, Tk]; boolean (True may look) or floating (added to the scaled scores, in
            the query's dtype). A query that may look nowhere gets zeros, and sends no gradient.
        causal: a query sees no later key. The last query stands at the last key, so that the queries of a continued
            sequence see all that came before them. Both it and `mask` hold.
        scale: 1/sqrt(d) by default.
        dropout: the share of attention weights dropped after the softmax; the caller gives 0 outside training.
        explicit: form the scores and their softmax step by step, in fp32 at least, instead of by torch's kernels.

    Raises:
        UserError: heads or mask do not fit.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    check_groups(heads, kv_heads)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # torch counts `is_causal` from the first key, which is the same only for as many queries as keys.
    square = causal and mask is None and query.shape[2] == key.shape[2]
    if square and not explicit:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=heads != kv_heads
        )
    mask, blind = prepare_mask(mask, causal, (*query.shape[:3], key.shape[2]), query)
    if explicit:
        # The heads of a group as further queries of their KV head, which nobody has to repeat then.
        grouped = query.reshape(query.shape[0], kv_heads, -1, query.shape[-1])  # [B, G, H/G*Tq, d]
        scores = (grouped * scale) @ key.mT  # [B, G, H/G*Tq, Tk]
        weights = F.dropout(softmax(scores.view(*query.shape[:3], -1), mask), dropout)  # [B, H, Tq, Tk]
        output = weights.to(value.dtype).view_as(scores) @ value  # [B, G, H/G*Tq, v]
        output = output.view(*query.shape[:3], -1)  # [B, H, Tq, v]
    else:
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=heads != kv_heads
        )
    return output if blind is None else output.masked_fill(blind, 0)


def same_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """On a CPU, heads of one width, the narrower ones filled up with zeros; elsewhere what was given.

    Scores do not change with it, nor the first v coordinates of what comes out. torch's fast kernel for a CPU wants
    keys and values of one width; without it, all scores of a layer, [B, H, Tq, Tk], are held at once.

    Args:
        query, key: [B, H, Tq, d] and [B, H, Tk, d], whose scale the caller says, as it is not 1/sqrt(width).
        value: [B, H, Tk, v].
    """
    width = max(query.shape[-1], value.shape[-1])
    if query.device.type != "cpu" or query.shape[-1] == value.shape[-1]:
        return query, key, value
    query, key, value = (F.pad(heads, (0, width - heads.shape[-1])) for heads in (query, key, value))
    return query, key, value


def softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax over the last axis of `scores` [B, H, Tq, Tk], in fp32 at least, under a mask of `prepare_mask`."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def prepare_mask(
    mask: Tensor | None, causal: bool, shape: tuple[int, int, int, int], like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """One mask of all that holds, without rows that would come out as 0/0, and which rows those were.

    Args:
        mask, causal: as in `attention`.
        shape: (B, H, Tq, Tk).
        like: a tensor whose dtype an added mask takes and on whose device a causal mask is made.

    Returns:
        The mask, or `None` where everybody sees everything. A row that may look nowhere may look everywhere in it;
        what comes of that row is to be set to zero, which also stops its gradient.
        Which rows these are, broadcastable to [B, H, Tq, 1], or `None` where there are none.

    Raises:
        UserError: the mask is neither boolean nor floating, or of another shape.
    """
    rows, columns = shape[2:]
    if mask is not None:
        _check_mask(mask, shape)
        mask = mask if mask.dtype == torch.bool else mask.to(like.dtype)
    if causal and rows > 1:
        visible = torch.ones(rows, columns, dtype=torch.bool, device=like.device).tril(columns - rows)  # [Tq, Tk]
        if mask is None:
            mask = visible
        else:
            mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    blind = (mask == -math.inf).all(-1, keepdim=True)
    return mask.masked_fill(blind, 0), blind


def _check_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UserError(
            f"a mask of {mask.dtype} may mean two things; give torch.bool (True may look), or a floating dtype to add"
        )
    fits = mask.ndim <= 4 and all(
        have in (1, want) for have, want in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise UserError(
            f"a mask of shape {list(mask.shape)} does not broadcast to {list(shape)}, which is "
            "[sequences, heads, queries, keys]; give it singleton axes"
        )


def check_groups(heads: int, kv_heads: int) -> None:
    """Refuse key/value heads that the query heads do not share evenly.

    Raises:
        UserError: so it is.
    """
    if kv_heads < 1 or heads % kv_heads:
        choices = ", ".join(map(str, divisors(heads)))
        raise UserError(f"{heads} query heads cannot share {kv_heads} key/value heads; try {choices}")
