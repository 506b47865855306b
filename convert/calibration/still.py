"""What keys would feel if they did not turn: the gradient at a key without position, beside every key that has one.

A logit `q . R k` (R turns by the distance) becomes `q . R k + q . z`, where z is one more key a token and KV head, and
nothing. So no number of the model changes, but the backward pass brings the gradient at z: how much the loss would mind
if a part of the key came without its rotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "kvfold_still"


class StillKeys:
    """The keys without position of one layer, for one pass of one batch at a time.

    Attributes:
        query: what the query projection gave, [B, T, H * d]; whoever listens to it sets it.
        gradient: what came back, [B, T, G * d].
    """

    def __init__(self) -> None:
        self.query: Tensor | None = None
        self.gradient: Tensor | None = None

    def beside(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries as projected, [B, H, T, d], and the keys to go with them, zeros like `key` [B, G, T, d]."""
        assert self.query is not None
        query = self.query.unflatten(-1, (-1, key.shape[-1])).transpose(1, 2)
        still = torch.zeros_like(key).requires_grad_()
        still.register_hook(self._take)
        return query, still

    def _take(self, gradient: Tensor) -> None:
        self.gradient = gradient.transpose(1, 2).flatten(2)  # [B, G, T, d] -> [B, T, G * d]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    keys: StillKeys | None = module.__dict__.get(NAME)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if keys is not None and torch.is_grad_enabled():
        more, still = keys.beside(key)
        query, key = torch.cat([query, more], dim=-1), torch.cat([key, still], dim=-1)
        # Values of the same size let torch take a kernel that keeps no [T, T] weights for the backward pass.
        size, value = value.shape[-1], F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return output[..., :size], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def still_keys(attention: nn.Module) -> Iterator[StillKeys]:
    """Put keys without position beside those of a layer's attention, while the block lasts.

    Its model must run with the attention implementation `NAME`.
    """
    keys = attention.__dict__[NAME] = StillKeys()
    try:
        yield keys
    finally:
        del attention.__dict__[NAME]
