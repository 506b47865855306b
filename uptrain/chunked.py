"""Sums over the tokens of a batch whose logits are never all there, forward or backward.

The plain loss keeps logits [B, T, V] until its backward pass; at V = 128k they outweigh the rest of the model. Here
the loss of a chunk of positions, and its gradient with respect to what the head took in, are computed together, and
the chunk's logits are gone before the next chunk's come. The backward pass has only to multiply: nothing is computed
twice. (The idea is that of Liger Kernel's fused linear cross entropy, arXiv 2410.10989, with the model's own head
and any loss in place of one kernel.)

Legend: B sequences, T positions, D hidden size, V vocabulary, n positions of one chunk, k scalars; E outputs of a
linear map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..common.scoring import head_logits, position_chunks

# (logits [B, n, V], their positions) -> k scalars [k], each a sum over the tokens of the chunk.
LossOf = Callable[[Tensor, slice], Tensor]


def chunked_sum(model: Any, hidden: Tensor, loss_of: LossOf, chunk: int | None = None) -> Tensor:
    """Sums [k] of what `loss_of` says of every chunk's logits; only the first carries a gradient.

    1. Take a chunk of `hidden`, run the head, call `loss_of`.
    2. Unless gradients are off, differentiate the first scalar with respect to the chunk and the head's trainable
       parameters, and add up. Sums, not means, are differentiated: in fp16 a mean's gradients would vanish.
    3. Backward, multiply by the gradient that arrives. Each parameter gets its gradient once, with what other uses of
       it add (a tied embedding), so hooks of DDP fire once.

    Parameters in bf16 or fp16 collect their gradient in fp32 and get it rounded once, as one large product would be.

    Args:
        model: a causal language model; see `common.scoring.head_logits`.
        hidden: what the head takes, [B, T, D].
        loss_of: differentiable with respect to its logits only; it sees every position once, in order.
        chunk: positions at a time; by default as many as keep to `common.scoring.chunk_elements` logits.
    """
    parameters = head_parameters(model) if torch.is_grad_enabled() else []
    if parameters or (torch.is_grad_enabled() and hidden.requires_grad):
        first, rest = _ChunkedSum.apply(model, loss_of, chunk, hidden, *parameters)
        return torch.cat([first, rest])
    with torch.no_grad():
        return sum(
            loss_of(head_logits(model, hidden[:, positions]), positions)
            for positions in position_chunks(model, hidden, chunk)
        )


def head_parameters(model: Any) -> list[nn.Parameter]:
    """The trainable parameters that the head may use: all that a module outside the base model holds.

    An embedding that the head is tied to is among them, as the head holds it too.
    """
    found: dict[int, nn.Parameter] = {}
    for module in _outside(model, model.base_model):
        for name in module._parameters:
            # Read as an attribute, which is where DeepSpeed ZeRO-3 notices that forward needs the whole tensor.
            parameter = getattr(module, name)
            if parameter is not None and parameter.requires_grad:
                found[id(parameter)] = parameter
    return list(found.values())


def _outside(module: nn.Module, base: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child is not base:
            yield from _outside(child, base)


@contextmanager
def _as_outside(device: str) -> Iterator[None]:
    """The autocast that is on outside, but for its cache of cast weights. In older releases of torch a weight that was
    cast where gradients are off (a teacher's tied head, an evaluation) would be found there, and be a constant."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, model: Any, loss_of: LossOf, chunk: int | None, hidden: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        totals: Tensor | float = 0.0
        grad_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        grads = _Sums(parameters)
        for positions in position_chunks(model, hidden, chunk):
            part = hidden[:, positions].detach().requires_grad_(hidden.requires_grad)
            with _as_outside(device), _LinearInto(grads):
                first, *rest = loss_of(head_logits(model, part), positions)
            inputs = [part, *parameters] if hidden.requires_grad else parameters
            with torch.autocast(device, enabled=False):  # a backward pass is no place for it
                found = list(torch.autograd.grad(first, inputs, allow_unused=True))
            if grad_hidden is not None:
                grad_hidden[:, positions] = found.pop(0)
            for parameter, grad in zip(parameters, found, strict=True):
                grads.add(parameter, grad)
            totals = totals + torch.stack([first, *rest])
            del first, rest, found  # or they would be there beside the next chunk's
        assert isinstance(totals, Tensor)
        ctx.save_for_backward(grad_hidden, *(grads.of(parameter) for parameter in parameters))
        ctx.dtypes = [x.dtype for x in (hidden, *parameters)]
        first, rest = totals[:1].clone(), totals[1:].clone()
        ctx.mark_non_differentiable(rest)
        return first, rest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # `scale` [1] is fp32 or wider, and so is the product: what is in bf16 is not scaled by a rounded number.
        scaled = [
            None if grad is None else grad.mul_(scale).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, None, None, *scaled


class _Sums:
    """Gradients of parameters, added up in at least fp32."""

    def __init__(self, parameters: Sequence[Tensor]):
        self._parameters = {id(parameter) for parameter in parameters}
        self._sums: dict[int, Tensor] = {}

    def __contains__(self, parameter: Any) -> bool:
        return id(parameter) in self._parameters

    def of(self, parameter: Tensor) -> Tensor | None:
        return self._sums.get(id(parameter))

    def add(self, parameter: Tensor, grad: Tensor | None) -> None:
        if grad is None:
            return
        if id(parameter) in self._sums:
            self._sums[id(parameter)].add_(grad)
        else:
            self._sums[id(parameter)] = grad.float() if grad.itemsize < 4 else grad

    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """Add `left` [E, N] @ `right` [N, D], which is never there by itself if the sum is of its dtype."""
        total = self.of(parameter)
        if total is not None and total.dtype == left.dtype:
            total.addmm_(left, right)
        else:
            self.add(parameter, left @ right)


class _LinearInto(TorchFunctionMode):
    """Inside, the gradient of a weight in `F.linear` goes straight into the sums: to make it anew for every chunk, as
    large as the head, and add it then would be a good part of what a chunk costs."""

    def __init__(self, sums: _Sums):
        super().__init__()
        self.sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear or kwargs or args[1] not in self.sums:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        product = _Linear.apply(x, weight, self.sums)
        return product if not bias or bias[0] is None else product + bias[0]


class _Linear(torch.autograd.Function):
    """x [..., D] @ weight [E, D] transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sums: _Sums) -> Tensor:
        ctx.parameter, ctx.sums = weight, sums
        product = F.linear(x, weight)
        # Autocast may have multiplied in another dtype.
        ctx.save_for_backward(x.to(product.dtype), weight.to(product.dtype))
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.sums.add_product(ctx.parameter, grad.flatten(0, -2).T, x.flatten(0, -2))
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None
