"""One pass of text through a model that yields its statistics, for models that fit in memory and those that do not.

1. Forward through all layers but the last ones, a segment of layers at a time, keeping what enters each segment.
2. Last segment: forward with its graph, token-summed cross entropy, backward to what entered the segment.
3. Every earlier segment, from the end: forward again from what entered it, backward from the gradient at its output.
Weights are frozen, so a backward pass costs about what a forward pass does. With one segment (the whole model) this
is one plain forward and backward pass; with one layer a segment, one layer's weights are in memory, and every
segment but the last is run forward twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ...common.errors import UserError
from ...common.progress import Progress
from ...common.scoring import logit_chunks, token_nll
from ..checkpoint import is_finite
from ..projections import Projection
from .hidden import LIMIT, HiddenStates
from .layers import LayeredModel
from .statistics import LayerStatistics, Moment, MomentOfInputs, wide
from .still import NAME as STILL
from .still import StillKeys, still_keys

Emit = Callable[[int, LayerStatistics], None]


class _Taps:
    """The sums of one layer, fed by hooks on its projections.

    They are there before the first window, as a process may have none.
    """

    def __init__(
        self, number: int, layer: nn.Module, places: dict[str, Projection], device: str, fisher: bool, still: bool
    ):
        self.number, self.layer, self.fisher, self.still = number, layer, fisher, still
        self.places = {term: places[term] for term in ("K", "V")}
        self.query, key = places["Q"], places["K"]
        self.keys: StillKeys | None = None
        width = layer.get_parameter(f"{key.module}.weight").shape[1 - key.dim]
        # Inputs are summed once for each projection that weighs them, or once if none does.
        self.inputs = {term: MomentOfInputs(width, device) for term in (self.places if fisher else "K")}
        sizes = {term: place.stop - place.start for term, place in self.places.items() if fisher}
        # The two gradients of the keys are stacked, so that their product is there too.
        self.gradients = {
            term: Moment(2 * size if still and term == "K" else size, device) for term, size in sizes.items()
        }

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.still:
                attention = self.layer.get_submodule(self.query.module.rpartition(".")[0])
                self.keys = stack.enter_context(still_keys(attention))
                self._listen(stack, self.query.module, self._see_query)
            for module in {place.module: None for place in self.places.values()}:
                self._listen(stack, module, self._hook)
            yield

    def _listen(self, stack: ExitStack, module: str, hook: Callable[..., Tensor | None]) -> None:
        stack.callback(self.layer.get_submodule(module).register_forward_hook(hook).remove)

    def _see_query(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert self.keys is not None
        self.keys.query = output[..., self.query.start : self.query.stop]

    def _hook(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        here = [term for term, place in self.places.items() if self.layer.get_submodule(place.module) is module]
        if not self.fisher:
            if "K" in here:
                self.inputs["K"].add(args[0])
            return output
        leaf, inputs = output, args[0].detach()
        if not output.requires_grad:  # nothing before it does, as weights are frozen
            leaf = output.requires_grad_()
            output = leaf.clone()  # some models go on in place, which a leaf forbids
        heads = {term: leaf[..., self.places[term].start : self.places[term].stop].detach() for term in here}
        sizes = {term: wide(part).square().sum(-1) for term, part in heads.items()}  # now: what follows may be in place
        leaf.register_hook(lambda gradient: self._gradient(inputs, sizes, gradient))
        return output

    def _gradient(self, inputs: Tensor, sizes: dict[str, Tensor], gradient: Tensor) -> None:
        for term, size in sizes.items():
            place = self.places[term]
            part = wide(gradient[..., place.start : place.stop])
            self.inputs[term].add(inputs, part.square().sum(-1))
            if term == "K" and self.keys is not None:
                assert self.keys.gradient is not None
                part = torch.cat([part, wide(self.keys.gradient)], dim=-1)
            self.gradients[term].add(part, size)

    def result(self, reduce: Callable[[Tensor], Tensor]) -> LayerStatistics:
        inputs = torch.stack([moment.mean(reduce) for moment in self.inputs.values()]).mean(0)
        if not inputs.any():  # the loss minds nothing here, so nothing tells directions apart
            inputs = torch.eye(len(inputs)).to(inputs)
        gradients = {term: moment.mean(reduce) for term, moment in self.gradients.items()}
        key, value = gradients.get("K"), gradients.get("V")
        if key is None or not self.still:
            return LayerStatistics(inputs, key, value)
        (key, cross), (_, still) = (rows.chunk(2, dim=1) for rows in key.chunk(2))  # [2K, 2K] -> four of [K, K]
        return LayerStatistics(inputs, key, value, still, cross)


def collect(
    model: LayeredModel,
    batches: Sequence[Tensor],
    places: dict[str, Projection],
    *,
    emit: Emit,
    fisher: bool = True,
    still: bool = True,
    segment: int | None = None,
    reduce: Callable[[Tensor], Tensor] = lambda total: total,
    progress: Progress = lambda done, total: None,
) -> None:
    """Run the batches through the model and emit every layer's statistics, the last layers' first.

    Args:
        batches: token ids, each [B, T].
        places: the query, key and value projections, see `projections.projections`.
        emit: takes a layer's number and its statistics, on the model's device.
        fisher: whether gradients are wanted.
        still: whether those at keys without position are wanted too, see `still`.
        segment: layers held at a time; all of them if None.
        reduce: sums a tensor over all processes that run a part of the batches.
        progress: called with the layers of all batches done, and of all passes.

    Raises:
        UserError: a layer gives NaN or Inf.
    """
    still = still and fisher
    if still:
        model.attend(STILL)
    count = len(model.layers)
    size = segment or count
    segments = [range(start, min(start + size, count)) for start in range(0, count, size)]
    # What enters every segment but the first, which the embedding gives cheaply.
    shapes, limit = [tuple(ids.shape) for ids in batches], LIMIT // len(segments)
    entering = [HiddenStates(shapes, model.config.hidden_size, model.dtype, limit) for _ in segments[1:]]

    def enter(index: int, batch: int) -> Tensor:
        return model.embed(batches[batch]) if index == 0 else entering[index - 1][batch].to(model.device)

    def forward(numbers: range, state: Tensor) -> Tensor:
        for number in numbers:
            state = model.call(number, state)
            if not is_finite(state.detach()):  # now: whole passes may take hours
                raise UserError(f"layer {number} gives NaN or Inf; calibrate in a wider dtype, or mend the source")
        return state

    # Forward through all segments, but the last one's only with its graph, and again through the others.
    total, done = len(batches) * (count if len(segments) == 1 or not fisher else 2 * count - len(segments[-1])), 0

    def run(index: int, step: Callable[[int], None], listen: bool) -> None:
        nonlocal done
        numbers = segments[index]
        with ExitStack() as stack:
            layers = stack.enter_context(model.loaded(numbers))
            taps = [
                _Taps(number, layer, places, model.device, fisher, still)
                for number, layer in zip(numbers, layers, strict=True)
                if listen
            ]
            for tap in taps:
                stack.enter_context(tap.listening())
            for batch in range(len(batches)):
                step(batch)
                done += len(numbers)
                progress(done, total)
        for tap in taps:
            emit(tap.number, tap.result(reduce))

    def forward_only(index: int, batch: int) -> None:
        with torch.no_grad():
            state = forward(segments[index], enter(index, batch))
        if index < len(entering):
            entering[index][batch] = state

    def first_backward(batch: int) -> None:
        start = enter(len(segments) - 1, batch).detach().requires_grad_(len(segments) > 1)
        _backward_loss(model, forward(segments[-1], start), batches[batch].to(model.device))
        keep_gradient(len(segments) - 1, batch, start)

    def backward(index: int, batch: int) -> None:
        start = enter(index, batch).detach().requires_grad_(index > 0)
        output = forward(segments[index], start)
        output.backward(entering[index][batch].to(output))
        keep_gradient(index, batch, start)

    def keep_gradient(index: int, batch: int, start: Tensor) -> None:
        if index > 0:  # in the place of the hidden state, which is not needed again
            assert start.grad is not None
            entering[index - 1][batch] = start.grad

    for index in range(len(segments) - fisher):
        run(index, lambda batch, index=index: forward_only(index, batch), listen=not fisher)
    if fisher:
        run(len(segments) - 1, first_backward, listen=True)
        for index in reversed(range(len(segments) - 1)):
            run(index, lambda batch, index=index: backward(index, batch), listen=True)


def _backward_loss(model: LayeredModel, output: Tensor, ids: Tensor) -> None:
    """Backward from the token-summed cross entropy of ids [B, T], without the logits of a whole batch at once.

    `output` is the last layer's, [B, T, D].
    """
    final = model.finish(output)
    leaf = final.detach()[:, :-1].requires_grad_()  # position t predicts token t + 1
    for part, logits in logit_chunks(model.model, leaf):
        token_nll(logits, ids[:, 1:][:, part]).sum().backward()
    gradient = torch.zeros_like(final)
    if leaf.grad is not None:  # a window of one token predicts nothing
        gradient[:, :-1] = leaf.grad
    final.backward(gradient)
