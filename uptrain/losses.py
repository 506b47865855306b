"""Losses of one chunk of logits, whose gradients are made where their log-probabilities were.

What torch does with a chunk is bound by memory: each tensor [N, V] that is made beside the others costs about as much
as what is computed in it. So these overwrite, and each can go backward once.

Legend: N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.scoring import UNSCORED, log_probabilities


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of `targets` [N] under `logits` [N, V], summed over those that are not -100; in nats, in fp32 or
    fp64."""
    return _CrossEntropy.apply(logits, targets)


def divergence_sum(theirs: Tensor, own: Tensor, scored: Tensor) -> Tensor:
    """Forward KL(theirs || own) of log-probabilities [N, V], summed over `scored` [N]; in nats.

    The gradient is that of `own` alone, and `theirs` is overwritten.
    """
    return _Divergence.apply(theirs, own, scored)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        own = log_probabilities(logits)
        ctx.save_for_backward(own, targets)
        ctx.dtype = logits.dtype
        return F.nll_loss(own, targets, ignore_index=UNSCORED, reduction="sum")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        own, targets = ctx.saved_tensors
        scored = targets != UNSCORED
        grad = own.exp_().mul_((scale * scored)[:, None])
        grad.scatter_add_(1, targets.where(scored, 0)[:, None], -(scale * scored).to(grad.dtype)[:, None])
        return grad.to(ctx.dtype), None


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theirs: Tensor, own: Tensor, scored: Tensor) -> Tensor:
        weights = theirs.exp()
        apart = theirs.sub_(own).mul_(weights).sum(-1)  # [N]
        ctx.save_for_backward(weights, scored)
        return torch.where(scored, apart, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, Tensor, None]:
        weights, scored = ctx.saved_tensors
        return None, weights.mul_((-scale * scored)[:, None]), None
