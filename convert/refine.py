"""Block-wise refinement: each layer's attention learns to put the result back on the source's track.

Hidden states of the same text run through the source and through the result, layer by layer:

1. The target of a layer is the source's state after its attention, or after its MLP (`RefineKnobs.through_mlp`). So the
   layer repairs what it lost by the conversion, and what the layers before it left.
2. Per token, the error is e = |y - target|^2 / |target|^2, and what is minimised is the mean of e / (1 + e): the first
   token of a text carries massive activations in many models, and would own a plain square. A token that has gone far
   from the source's track already (more than `FAR` of its square norm) is not called back: its target is its own
   state, moved as the source's layer moves the source's.
3. Adam with a linear decay on the attention's parameters, `passes` times over the windows. A layer that is not nearer
   to its targets afterwards stays as it was.
4. Both streams go on through the whole layer.

The memory is one layer of each model and three buffers of hidden states, which go to the disk when they are large.
Legend: B windows, T positions, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..common.atomic import check_room, scratch_folder
from ..common.errors import UserError
from ..common.progress import Stages
from .calibration.calibrate import Runner, published
from .calibration.hidden import LIMIT, HiddenStates
from .calibration.knobs import RefineKnobs
from .calibration.layers import LayeredModel
from .calibration.result import result_model
from .checkpoint import is_finite, torch_dtype
from .latent_families import KNOWN
from .projections import projections
from .stream import Output

FAR = 0.05
WARMUP = 5  # steps; Adam's second moments are noise before that
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Refined:
    """What refinement did.

    Attributes:
        refine_windows, refine_passes: of the calibration text, and over it.
        refine_text, refine_kinds: hash of their token ids, and how many windows came of each kind of text.
        layer_errors_before, layer_errors_after: for every layer |y - s| / |s|, averaged over tokens; y and s are the
            states in the result and in the source after the attention, or after the MLP where that is the target.
            Before is with all earlier layers refined.
    """

    refine_windows: int
    refine_passes: int
    refine_text: str
    refine_kinds: dict[str, int]
    layer_errors_before: list[float]
    layer_errors_after: list[float]


class _Enough(Exception):  # a way out of a layer, not an error
    pass


def run_layer(
    model: LayeredModel, number: int, hidden: Tensor, tap: str, *, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """Run a loaded layer on [B, T, D]; returns the state after its attention, and its output.

    Args:
        tap: the submodule that reads the state after attention; where the layer has none of that name, attention and
            MLP run side by side, and the state is the layer's output.
        whole: whether the output is wanted; if not, what follows the attention is not run, and the state stands for it.
    """
    module = getattr(model.layers[number], tap, None)
    if module is None:
        output = model.call(number, hidden)
        return output, output
    states: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        states.append(args[0])
        if not whole:
            raise _Enough

    handle = module.register_forward_pre_hook(see)
    try:
        output = model.call(number, hidden)
    except _Enough:
        output = states[0]
    finally:
        handle.remove()
    return states[0], output


def token_errors(state: Tensor, target: Tensor) -> Tensor:
    """|state - target|^2 / |target|^2 for every token: [..., D] -> [...]."""
    return (state - target).square().sum(-1) / target.square().sum(-1).clamp_min(torch.finfo(target.dtype).tiny)


class _Refiner:
    """The two models, their streams of hidden states, and what is learnt.

    Args:
        runner: of the source.
        outputs: the tensors of the merged checkpoint.
        config: its config.json.
        folder: for the refined tensors.
    """

    def __init__(self, runner: Runner, outputs: list[Output], config: dict[str, Any], knobs: RefineKnobs, folder: Path):
        source = runner.source
        self.family = KNOWN[config["model_type"]]
        self.runner, self.knobs, self.folder = runner, knobs, folder
        self.outputs = {output.name: output for output in outputs}
        self.kept: dict[str, str] = {}  # refined tensors, and the files that hold them
        # Training wants fp32, whatever the source is run in; one layer at a time, it costs little.
        self.dtype = torch.promote_types(runner.dtype, torch.float32)
        self.teacher = runner.model(self.dtype)
        self.student, self.names = result_model(runner, outputs, config, self.dtype)
        self.attention = projections(source.family, runner.sizes)["O"].module.rpartition(".")[0] + "."
        self.windows = runner.windows(knobs.windows)
        self.batches = runner.share(self.windows).batches(knobs.batch_size)
        counts = [len(share.batches(knobs.batch_size)) for share in runner.shares(self.windows)]
        # Every process takes as many steps as the one with most batches, or some would wait for ever.
        self.steps_a_pass, self.learners = max(counts), sum(count > 0 for count in counts)
        shapes = [tuple(ids.shape) for ids in self.batches]
        size = runner.sizes["D"]
        self.taught, self.learnt, self.targets = (HiddenStates(shapes, size, self.dtype, LIMIT // 3) for _ in range(3))

    def embed(self) -> None:
        """Fill both streams with what the first layers read."""
        with torch.no_grad():
            for index, ids in enumerate(self.batches):
                self.taught[index] = self.teacher.embed(ids)
                self.learnt[index] = self.student.embed(ids)

    def refine(self, number: int, advance: Callable[[], None]) -> tuple[float, float]:
        """Refine one layer and take both streams through it; returns its mean error before and after."""
        with self.teacher.loaded([number]), self.student.loaded([number]) as (layer,):
            with torch.no_grad():
                for index in range(len(self.batches)):
                    self._teach(number, index)
            before = self._error(number)
            if not math.isfinite(before):
                raise UserError(f"layer {number} gives NaN or Inf; look for huge weights in the source")
            names = [name for name, _ in layer.named_parameters() if name.startswith(self.attention)]
            parameters = [layer.get_parameter(name) for name in names]
            start = [parameter.clone() for parameter in parameters]
            self._train(number, parameters, advance)
            if not self._error(number) < before:  # few windows may teach less than the first steps unsettle
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)
            self._keep(number, layer, names)
            after = self._error(number)
            with torch.no_grad():
                for index in range(len(self.batches)):
                    self.learnt[index] = self.student.call(number, self._on_device(self.learnt[index]))
        return before, after

    def _on_device(self, state: Tensor) -> Tensor:
        return state.to(self.runner.device)

    def _teach(self, number: int, index: int) -> None:
        """Set the targets of one batch, and take the source's stream through the layer."""
        source, result = (self._on_device(stream[index]) for stream in (self.taught, self.learnt))
        state, output = run_layer(self.teacher, number, source, self.family.after_attention, whole=True)
        aim = output if self.knobs.through_mlp else state
        far = token_errors(result, source) > FAR
        self.targets[index] = torch.where(far[..., None], result + (aim - source), aim)
        self.taught[index] = output

    def _state(self, number: int, index: int) -> tuple[Tensor, Tensor]:
        """The result's state that is compared, and its target: [B, T, D] each."""
        entering, target = (self._on_device(stream[index]) for stream in (self.learnt, self.targets))
        if self.knobs.through_mlp:
            return self.student.call(number, entering), target
        return run_layer(self.student, number, entering, self.family.after_attention)[0], target

    def _error(self, number: int) -> float:
        """The mean over tokens of |state - target| / |target|."""
        total = torch.zeros(2, dtype=torch.float64, device=self.runner.device)
        with torch.no_grad():
            for index in range(len(self.batches)):
                errors = token_errors(*self._state(number, index)).sqrt()
                total += torch.stack([errors.sum(), torch.ones_like(errors).sum()])
        total = self.runner.workers.sum(total)
        return float(total[0] / total[1])

    def _train(self, number: int, parameters: list[Tensor], advance: Callable[[], None]) -> None:
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(parameters, lr=self.knobs.learning_rate, betas=BETAS)
        steps, step = self.knobs.passes * self.steps_a_pass, 0
        for order in range(self.knobs.passes):
            for index in self._order(order):
                for group in optimizer.param_groups:
                    group["lr"] = self.knobs.learning_rate * min(1, (step + 1) / WARMUP) * (1 - step / steps)
                step += 1
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
                if index is not None:
                    error = token_errors(*self._state(number, index))
                    (error / (1 + error)).mean().backward()
                for parameter in parameters:
                    parameter.grad = self.runner.workers.sum(parameter.grad) / self.learners
                optimizer.step()
                advance()
        for parameter in parameters:
            parameter.requires_grad_(False)

    def _order(self, order: int) -> list[int | None]:
        """The batches of one pass; some come twice where another process has more, and None where this one has none."""
        generator = torch.Generator().manual_seed(order)
        steps = torch.randperm(self.steps_a_pass, generator=generator).tolist()
        return [step % len(self.batches) if self.batches else None for step in steps]

    def _keep(self, number: int, layer: nn.Module, names: list[str]) -> None:
        """Store a layer's refined tensors as the result will have them, and go on with what they are there."""
        kept = {}
        for name in names:
            output = self.outputs[self.names[f"{self.family.layers}{number}.{name}"]]
            parameter = layer.get_parameter(name)
            rounded = parameter.detach().to(torch_dtype(output.dtype))
            if not is_finite(rounded):
                raise UserError(f"refined tensor {output.name} overflows {output.dtype}; choose another --dtype")
            parameter.copy_(rounded)
            kept[output.name] = rounded.cpu().contiguous()
            self.kept[output.name] = f"{number}.safetensors"
        save_file(kept, self.folder / f"{number}.safetensors")

    def replaced(self) -> list[Output]:
        """The outputs, refined ones read from where they are kept."""
        return [
            replace(output, make=partial(_read_kept, self.folder / self.kept[name], name))
            if name in self.kept
            else output
            for name, output in self.outputs.items()
        ]


def _read_kept(path: Path, name: str, _: list[Tensor]) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


@contextmanager
def refine_layers(
    runner: Runner, outputs: list[Output], config: dict[str, Any], knobs: RefineKnobs, progress: Stages
) -> Iterator[tuple[list[Output], Refined]]:
    """Refine a merged checkpoint; see the module's docstring.

    Args:
        runner: of the source.
        outputs: the merged checkpoint's tensors.
        config: its config.json.
        progress: opens a progress for the stage.

    Yields:
        The outputs with refined attention, valid inside the block, and what was done.

    Raises:
        UserError: a text cannot be used, or the result's dtype does not hold a refined tensor.
        EnvironmentFailure: no room on the disk for hidden states or refined tensors.
    """
    with scratch_folder("kvfold-refined-") as folder:
        refiner = _Refiner(runner, outputs, config, knobs, folder)
        check_room(folder, sum(output.nbytes for output in outputs if f".{refiner.attention}" in output.name))
        layers = runner.sizes["L"]
        total, done = layers * knobs.passes * refiner.steps_a_pass, 0
        errors = []
        with progress("refining") as report:

            def advance() -> None:
                nonlocal done
                done += 1
                report(done, total)

            refiner.embed()
            for number in range(layers):
                errors.append(refiner.refine(number, advance))
        before, after = (list(column) for column in zip(*errors, strict=True))
        read = refiner.windows
        yield refiner.replaced(), Refined(len(read), knobs.passes, read.digest, published(read.counts), before, after)
