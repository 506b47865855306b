"""Multi-head latent attention, following DeepSeek-V2 (arXiv 2405.04434) equation by equation.

Shapes: B sequences, T new tokens, S tokens in all (cached ones first), D hidden size, H heads; R numbers of the latent
and Q of the compressed query; n coordinates of a query or key head without position, d_r with it, v of a value head.

Numbers in brackets are the paper's, section 2.1. Its appendix C has the same formulas in one list.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .cache import LayerCache
from .latent import absorbed_attention, absorbing_pays
from .multihead import next_positions
from .rope import Rope, rotate
from .sdpa import attention

# Of the norms on both compressed vectors, which the paper adds in its section 3.1.2; DeepSeek's own code fixes it.
NORM_EPS = 1e-6


class MultiHeadLatentAttention(nn.Module):
    """MLA with decoupled RoPE and a latent cache of R + d_r numbers a token. The weights carry DeepSeek's names."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        v_head_dim: int,
        rope: Rope,
        q_lora_rank: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        """
        Args:
            hidden_size, num_heads: D and H.
            kv_lora_rank, qk_nope_head_dim, v_head_dim: R, n and v.
            rope: how the d_r = 2F coordinates with position turn; DeepSeek's layout is interleaved.
            q_lora_rank: Q; `None` leaves queries uncompressed, as in DeepSeek-V2-Lite.
            bias: whether the down-projections and the output have biases (`attention_bias` in DeepSeek's config).
            dropout: the share of attention weights dropped in training.
        """
        super().__init__()
        self.num_heads = num_heads
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = 2 * len(rope.frequencies)
        self.v_head_dim = v_head_dim
        self.rope = rope
        self.dropout = dropout
        self.scale = 1 / math.sqrt(qk_nope_head_dim + self.qk_rope_head_dim)
        query_size = num_heads * (qk_nope_head_dim + self.qk_rope_head_dim)
        self.q_lora_rank = q_lora_rank
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=bias)  # W^DQ
            self.q_a_layernorm = nn.RMSNorm(q_lora_rank, eps=NORM_EPS)
            self.q_b_proj = nn.Linear(q_lora_rank, query_size, bias=False)  # W^UQ and W^QR, head by head
        # W^DKV, then W^KR.
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, kv_lora_rank + self.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(kv_lora_rank, eps=NORM_EPS)
        # W^UK and W^UV, head by head.
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=bias)  # W^O

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = True,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
        absorbed: bool | None = None,
        explicit: bool = False,
    ) -> Tensor:
        """Attend from the tokens `x` [B, T, D] to themselves and to those cached, giving [B, T, D].

        Args:
            mask: broadcastable to [B, H, T, S]; see `sdpa.attention`.
            causal: whether tokens see no later ones.
            positions: of the new tokens, [T] or [B, T]; by default they go on where the cache ends.
            cache: what earlier calls left, to which this one adds.
            absorbed: attend in latent space instead of to expanded keys and values, with the same result; by default
                whichever is less work.
            explicit: see `sdpa.attention`; absorbed attention is always so.

        Raises:
            UserError: mask or cache do not fit.
        """
        q_nope, q_rope = self._queries(x)
        latent, key_rope = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent = self.kv_a_layernorm(latent)  # (9): c^KV = W^DKV h, [B, T, R]
        positions = next_positions(x, cache) if positions is None else positions
        q_rope = rotate(q_rope, positions, self.rope)  # (14), [B, H, T, d_r]
        key_rope = rotate(key_rope[:, None], positions, self.rope)[:, 0]  # (15): k^R = RoPE(W^KR h), [B, T, d_r]
        if cache is not None:
            latent, key_rope = cache.append(latent, key_rope)  # [B, S, R], [B, S, d_r]
        options = {
            "mask": mask,
            "causal": causal,
            "scale": self.scale,
            "dropout": self.dropout if self.training else 0.0,
        }
        if absorbed is None:
            sizes = self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim
            absorbed = absorbing_pays(x.shape[1], latent.shape[1], *sizes)
        if absorbed:
            up_key, up_value = self._up_projections()
            # W^UK goes into the queries and W^UV onto what they attend to: (10), (11) and (18) in another order.
            heads = absorbed_attention(q_nope, q_rope, latent, key_rope, up_key, up_value, **options)
        else:
            # (10), (11): k^C = W^UK c^KV, [B, H, S, n], and v^C = W^UV c^KV, [B, H, S, v].
            expanded = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            key_nope, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], -1)
            query = torch.cat([q_nope, q_rope], -1)  # (16), [B, H, T, n + d_r]
            key_rope = key_rope[:, None].expand(-1, self.num_heads, -1, -1)
            key = torch.cat([key_nope, key_rope], -1)  # (17), [B, H, S, n + d_r]
            heads = attention(query, key, value, explicit=explicit, **options)  # (18), [B, H, T, v]
        return self.o_proj(heads.transpose(1, 2).flatten(2))  # (19): u = W^O [o_1; ..; o_H], [B, T, D]

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both parts of the queries, [B, H, T, n] and, not yet turned, [B, H, T, d_r]."""
        if self.q_lora_rank is None:
            q = self.q_proj(x)  # [B, T, H*(n + d_r)]
        else:
            compressed = self.q_a_layernorm(self.q_a_proj(x))  # (12): c^Q = W^DQ h, [B, T, Q]
            q = self.q_b_proj(compressed)  # (13), (14): W^UQ c^Q and W^QR c^Q, [B, T, H*(n + d_r)]
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T, n + d_r]
        q_nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        return q_nope, q_rope

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """W^UK [H, n, R] and W^UV [H, v, R], as views."""
        maps = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))  # [H, n + v, R]
        up_key, up_value = maps.split([self.qk_nope_head_dim, self.v_head_dim], 1)
        return up_key, up_value
