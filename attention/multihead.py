"""Attention with a key/value cache of heads: multi-head (arXiv 1706.03762), multi-query (1911.02150) and grouped-query
(2305.13245), which differ in the number of key/value heads alone.

Shapes: B sequences, T new tokens, S tokens in all (cached ones first), D hidden size, H query heads, G key/value heads,
d coordinates of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..common.errors import UserError, divisors
from .cache import LayerCache
from .rope import Rope, rotate
from .sdpa import attention, check_groups


class MultiHeadAttention(nn.Module):
    """MHA (G = H), GQA, or MQA (G = 1). The weights of the separate form carry Llama's names."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        fused: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        rope: Rope | None = None,
        dropout: float = 0.0,
    ) -> None:
        """
        Args:
            hidden_size, num_heads: D and H.
            num_kv_heads: G, a divisor of H; H by default.
            head_dim: d; D/H by default.
            fused: one projection `qkv_proj`, whose rows are those of q, k and v in this order, instead of three.
            qkv_bias, out_bias: whether these projections have biases.
            rope: how queries and keys turn with position; `None` leaves them as they are.
            dropout: the share of attention weights dropped in training.

        Raises:
            UserError: the sizes do not fit.
        """
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_groups(num_heads, self.num_kv_heads)
        if head_dim is None:
            if hidden_size % num_heads:
                choices = ", ".join(map(str, divisors(hidden_size)))
                raise UserError(
                    f"hidden size {hidden_size} does not split into {num_heads} heads; give head_dim, or try {choices}"
                )
            head_dim = hidden_size // num_heads
        self.head_dim = head_dim
        self.rope = rope
        self.dropout = dropout
        # Keys and values have G heads of d each, whatever D/G may be.
        self.sizes = (num_heads * head_dim, self.num_kv_heads * head_dim, self.num_kv_heads * head_dim)
        if fused:
            self.qkv_proj = nn.Linear(hidden_size, sum(self.sizes), bias=qkv_bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, size, bias=qkv_bias) for size in self.sizes)
        self.fused = fused
        self.o_proj = nn.Linear(self.sizes[0], hidden_size, bias=out_bias)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = True,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
        explicit: bool = False,
    ) -> Tensor:
        """Attend from the tokens `x` [B, T, D] to themselves and to those cached, giving [B, T, D].

        Args:
            mask: broadcastable to [B, H, T, S]; see `sdpa.attention`.
            causal: whether tokens see no later ones.
            positions: of the new tokens, [T] or [B, T]; by default they go on where the cache ends.
            cache: what earlier calls left, to which this one adds.
            explicit: see `sdpa.attention`.

        Raises:
            UserError: mask or cache do not fit.
        """
        q, k, v = self.qkv_proj(x).split(self.sizes, -1) if self.fused else self._project(x)
        q = q.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # [B, H, T, d]
        k, v = (t.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2) for t in (k, v))  # [B, G, T, d]
        if self.rope is not None:
            positions = next_positions(x, cache) if positions is None else positions
            q, k = rotate(q, positions, self.rope), rotate(k, positions, self.rope)
        if cache is not None:
            k, v = cache.append(k, v)  # [B, G, S, d]
        dropout = self.dropout if self.training else 0.0
        heads = attention(q, k, v, mask=mask, causal=causal, dropout=dropout, explicit=explicit)  # [B, H, T, d]
        return self.o_proj(heads.transpose(1, 2).flatten(2))  # [B, T, H*d] -> [B, T, D]

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def next_positions(x: Tensor, cache: LayerCache | None) -> Tensor:
    """Positions [T] of the tokens `x` [B, T, D] that follow those cached."""
    start = 0 if cache is None else cache.length
    return torch.arange(start, start + x.shape[1], device=x.device)
