"""Block-wise refinement: each layer's attention learns to put the result back on the source's track.

Hidden states of the same text run through the source and through the result, layer by layer:

1. The target of a layer is the source's state after its attention. So the layer repairs what it lost by the merge,
   and what the layers before it left.
2. Per token, the error is e = |y - target|^2 / |target|^2, and what is minimised is the mean of e / (1 + e): the first
   token of a text carries massive activations in many models, and would own a plain square. A token that has gone far
   from the source's track already (more than `FAR` of its square norm) is not called back: its target is its own
   state, moved as the source's attention moves the source's.
3. Adam with a linear decay on the attention's parameters, `passes` times over the windows.
4. Both streams go on through the whole layer.

The memory is one layer of each model and three buffers of hidden states, which go to the disk when they are large.
Legend: B windows, T positions, D hidden size.
"""

from __future__ import annotations

import tempfile
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

from ..common.atomic import check_room
from ..common.errors import CheckFailed
from ..common.progress import Stages
from .calibration.calibrate import Runner
from .calibration.hidden import LIMIT, HiddenStates
from .calibration.knobs import RefineKnobs
from .calibration.layers import LayeredModel
from .calibration.reader import full_names, model_reader
from .checkpoint import is_finite, torch_dtype
from .config import from_raw
from .families import FAMILIES
from .projections import projections
from .stream import Output, compute

FAR = 0.05
WARMUP = 5  # steps; Adam's second moments are noise before that
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Refined:
    """What refinement did.

    Attributes:
        refine_windows, refine_passes: of the calibration text, and over it.
        layer_errors_before, layer_errors_after: for every layer |y - s| / |s|, averaged over tokens; y and s are the
            states after the attention in the result and in the source. Before is with all earlier layers refined.
    """

    refine_windows: int
    refine_passes: int
    layer_errors_before: list[float]
    layer_errors_after: list[float]


class _Tapped(Exception):  # a way out, not an error
    def __init__(self, state: Tensor):
        self.state = state


def state_after_attention(model: LayeredModel, number: int, hidden: Tensor, tap: str) -> Tensor:
    """The residual stream [B, T, D] after a layer's attention, without running what follows.

    Args:
        tap: the submodule that reads it; where the layer has none of that name, attention and MLP run side by side,
            and it is the layer's output.
    """
    layer = model.layers[number]
    module = getattr(layer, tap, None) if tap else None
    if module is None:
        return model.call(number, hidden)

    def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        raise _Tapped(args[0])

    handle = module.register_forward_pre_hook(stop)
    try:
        model.call(number, hidden)
    except _Tapped as tapped:
        return tapped.state
    finally:
        handle.remove()
    raise AssertionError(f"{tap} was not called")


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
        self.family = FAMILIES[source.family.becomes or source.family.name]
        self.runner, self.knobs, self.folder = runner, knobs, folder
        self.outputs = {output.name: output for output in outputs}
        self.kept: dict[str, str] = {}  # refined tensors, and the files that hold them
        target = from_raw(config)
        promised = self.family.promises(target, source.checkpoint.tensors)
        self.names = full_names({name: promise for name, promise in promised.items() if name in self.outputs})
        # Training wants fp32, whatever the source is run in; one layer at a time, it costs little.
        self.dtype = torch.promote_types(runner.dtype, torch.float32)
        read = model_reader(self.family, self.names, self._read, runner.sizes["E"] if self.family.in_memory else 0)
        self.teacher = runner.model(self.dtype)
        self.student = LayeredModel(target, self.family.layers, read, dtype=self.dtype, device=runner.device)
        self.attention = projections(self.family, runner.sizes)["O"].module.rpartition(".")[0] + "."
        windows = runner.windows(knobs.windows)
        self.windows = len(windows)
        self.batches = runner.share(windows).batches(knobs.batch_size)
        # Every process takes as many steps as the one with most batches, or some would wait for ever.
        self.steps_a_pass = max(len(part.batches(knobs.batch_size)) for part in runner.shares(windows))
        shapes = [tuple(ids.shape) for ids in self.batches]
        size = runner.sizes["D"]
        self.taught, self.learnt, self.targets = (HiddenStates(shapes, size, self.dtype, LIMIT // 3) for _ in range(3))

    def _read(self, name: str) -> Tensor:
        return compute(self.outputs[name], self.runner.source.checkpoint)

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
            names = [name for name, _ in layer.named_parameters() if name.startswith(self.attention)]
            self._train(number, [layer.get_parameter(name) for name in names], advance)
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
        state = state_after_attention(self.teacher, number, source, self.family.after_attention)
        far = token_errors(result, source) > FAR
        self.targets[index] = torch.where(far[..., None], result + (state - source), state)
        self.taught[index] = self.teacher.call(number, source)

    def _state(self, number: int, index: int) -> tuple[Tensor, Tensor]:
        """The result's state after the layer's attention, and its target: [B, T, D] each."""
        entering, target = (self._on_device(stream[index]) for stream in (self.learnt, self.targets))
        return state_after_attention(self.student, number, entering, self.family.after_attention), target

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
                optimizer.zero_grad()
                error = token_errors(*self._state(number, index))
                (error / (1 + error)).mean().backward()
                for parameter in parameters:
                    parameter.grad = self.runner.workers.sum(parameter.grad) / self.runner.workers.size
                optimizer.step()
                advance()
        for parameter in parameters:
            parameter.requires_grad_(False)

    def _order(self, order: int) -> list[int]:
        """The batches of one pass; some come twice where another process has more of them."""
        generator = torch.Generator().manual_seed(order)
        count = len(self.batches)
        return [int(i) % count for i in torch.randperm(self.steps_a_pass, generator=generator)]

    def _keep(self, number: int, layer: nn.Module, names: list[str]) -> None:
        """Store a layer's refined tensors as the result will have them, and go on with what they are there."""
        kept = {}
        for name in names:
            output = self.outputs[self.names[f"{self.family.layers}{number}.{name}"]]
            parameter = layer.get_parameter(name)
            rounded = parameter.detach().to(torch_dtype(output.dtype))
            if not is_finite(rounded):
                raise CheckFailed(f"refining layer {number} diverged ({output.name}); refine on more windows")
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
        UserError: a text cannot be used.
        CheckFailed: it diverged.
        EnvironmentFailure: no room on the disk for hidden states or refined tensors.
    """
    with tempfile.TemporaryDirectory(prefix="kvfold-refined-") as folder:
        check_room(Path(folder), sum(output.nbytes for output in outputs if output.make))
        refiner = _Refiner(runner, outputs, config, knobs, Path(folder))
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
        yield refiner.replaced(), Refined(refiner.windows, knobs.passes, before, after)
