"""The training loop: one optimizer step after the other, on one process or many, driven by accelerate.

Symbols: W windows, S tokens a window, B windows a step over all processes.

The loop keeps no hidden state. Which windows a step reads, how fast it learns and every random draw (dropout) are
functions of the knobs, the step's number and the process's, so that a run taken up again from the weights and the
optimizer of any step goes on bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..common.errors import CheckFailed, UserError
from .order import Order
from .schedule import Course

if TYPE_CHECKING:
    from .data.store import Batch
    from .teacher import Teacher, TeacherView


@dataclass(frozen=True)
class LoopKnobs:
    """What a training run is made of, apart from the model and the windows.

    Args:
        course: the steps to take, and how fast each learns.
        batch_size: windows a step, over all processes together, so that the number of processes does not change what
            is learnt.
        micro_batch_size: windows that a process holds at a time; a matter of memory, not of the result.
        weight_decay: decoupled, on matrices only: norms and biases have no size to keep small.
        betas: AdamW's two averaging factors.
        clip: largest norm of the gradient of all parameters together; 0 never clips.
        seed: of every random draw of the model.

    Raises:
        UserError: a number is out of range.
    """

    course: Course
    batch_size: int = 8
    micro_batch_size: int = 8
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"batch_size": 1, "micro_batch_size": 1, "clip": 0, "weight_decay": 0}.items():
            if not getattr(self, name) >= least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.course.steps < 1:
            raise UserError(f"steps is {self.course.steps}; it must be at least 1")


@dataclass(frozen=True)
class StepReport:
    """One step that was taken.

    Attributes:
        step: steps done, this one included.
        stage: what it learnt from, see `schedule.Stage`.
        loss: what was minimised, per target token, over all processes.
        cross_entropy: nats a token; NaN in a stage that does not run the head.
        divergence: KL from the teacher in nats a token, or the layers' error; NaN without a teacher.
        learning_rate: of this step.
        grad_norm: before clipping; NaN where DeepSpeed does not tell.
        tokens: that were read, targets or not, over all processes.
        seconds: that the step took on the main process.
    """

    step: int
    stage: str
    loss: float
    cross_entropy: float
    divergence: float
    learning_rate: float
    grad_norm: float
    tokens: int
    seconds: float


class Data(Protocol):
    """Windows to train on, by number; see `data.store`."""

    windows: int
    window: int

    def batch(self, indices: Sequence[int]) -> Batch: ...

    def scored(self, indices: Sequence[int]) -> int: ...


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of all that one process draws in one step."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:6], "big")


def make_optimizer(model: nn.Module, knobs: LoopKnobs) -> torch.optim.AdamW:
    """AdamW on the parameters of `model` that are trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": knobs.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=knobs.betas, fused=True)


class Training:
    """A model in training, at a step.

    Args:
        trainee: an `objective.Trainee`; frozen parameters stay as they are.
        data: the windows.
        order: which of them each step reads.
        knobs: see `LoopKnobs`.
        accelerator: where and in which precision to compute.
        teacher: what the trainee learns from beside the text.

    Attributes:
        model: the trainee as accelerate wrapped it.
        optimizer: likewise.
        step: how many steps are done.

    Raises:
        UserError: the batch does not divide among the processes, or nothing is to be trained.
    """

    def __init__(
        self,
        trainee: nn.Module,
        data: Data,
        order: Order,
        knobs: LoopKnobs,
        accelerator: Accelerator,
        teacher: Teacher | None = None,
    ):
        if knobs.batch_size % accelerator.num_processes:
            raise UserError(
                f"batch_size {knobs.batch_size} does not divide among {accelerator.num_processes} processes"
            )
        if not any(p.requires_grad for p in trainee.parameters()):
            raise UserError("no parameter of the model is to be trained")
        self.data, self.order, self.knobs, self.accelerator, self.teacher = data, order, knobs, accelerator, teacher
        self.model, self.optimizer = accelerator.prepare(trainee, make_optimizer(trainee, knobs))
        self.step = 0

    def steps(self) -> Iterator[StepReport]:
        """Take one step after the other, from where the training is to the end of its course.

        Raises:
            CheckFailed: the loss or the gradient is no number any more; the step was not taken.
        """
        self.model.train()
        while self.step < self.knobs.course.steps:
            yield self._take_step()

    def time_step(self, stage: str) -> float:
        """Seconds that one step of a stage takes; nothing is learnt from it."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        mine = range(self.knobs.batch_size // self.accelerator.num_processes)
        share = [number % self.data.windows for number in mine[: self.knobs.micro_batch_size]]
        self.model.train()
        for _ in range(2):  # the first one warms up
            start = time.monotonic()
            sums = self._backward(share, stage, 1.0, True)
            sums.tolist()  # a device is done when its numbers are here
            computed = time.monotonic()
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.knobs.clip or math.inf)
            self.optimizer.step()
            self.optimizer.zero_grad()
            sums.tolist()
        self.optimizer.state.clear()
        return (computed - start) * len(mine) / len(share) + time.monotonic() - computed

    def finish(self) -> nn.Module:
        """The trainee as it was given, trained, in evaluation mode."""
        # Autocast is wrapped around forward by `prepare`; the caller gets the model back as it was.
        return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False).eval()

    def _take_step(self) -> StepReport:
        start, knobs, accelerator = time.monotonic(), self.knobs, self.accelerator
        rank, processes = accelerator.process_index, accelerator.num_processes
        stage, rate = knobs.course.at(self.step)
        windows = self.order.draw(self.step * knobs.batch_size, knobs.batch_size)
        targets = max(1, self.data.scored(windows))
        torch.manual_seed(step_seed(knobs.seed, self.step, rank))
        mine = windows[rank::processes]
        total = torch.zeros(3, dtype=torch.float64, device=reducible(accelerator))
        for first in range(0, len(mine), knobs.micro_batch_size):
            last = first + knobs.micro_batch_size >= len(mine)
            # Every process's share counts by its targets, and data-parallel wrappers average over processes.
            total += self._backward(mine[first : first + knobs.micro_batch_size], stage, processes / targets, last)
        loss, cross_entropy, divergence = (accelerator.reduce(total, "sum") / targets).tolist()
        if not math.isfinite(loss):
            ranks = accelerator.gather((~total.isfinite().all()).long()[None]).nonzero().flatten().tolist()
            raise CheckFailed(self._broken("loss", f" on rank {', '.join(map(str, ranks))}", rate))
        norm = accelerator.clip_grad_norm_(self.model.parameters(), knobs.clip or math.inf)
        grad_norm = math.nan if norm is None else float(norm)
        # In fp16 such a step is left out by the scaler, which then scales less. All processes have the same gradient.
        if norm is not None and not math.isfinite(grad_norm) and accelerator.scaler is None:
            raise CheckFailed(self._broken("gradient", "", rate))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return StepReport(
            step=self.step,
            stage=stage,
            loss=loss,
            cross_entropy=cross_entropy if stage == "loss" else math.nan,
            divergence=divergence if self.teacher else math.nan,
            learning_rate=rate,
            grad_norm=grad_norm,
            tokens=knobs.batch_size * self.data.window,
            seconds=time.monotonic() - start,
        )

    def _backward(self, indices: Sequence[int], stage: str, weight: float, last: bool) -> Tensor:
        """Go forward and back through one micro-batch; its sums of objective, cross entropy and divergence [3]."""
        accelerator = self.accelerator
        batch = self.data.batch(indices).to(accelerator.device)
        view: TeacherView | None = None
        if self.teacher:
            view = self.teacher.view(batch.ids, batch.positions, layers=stage == "layers")
        # Gradients travel once a step. DeepSpeed and the wrapped optimizer go by the flag, DDP and FSDP by no_sync.
        accelerator.gradient_state._set_sync_gradients(last)
        with nullcontext() if last else accelerator.no_sync(self.model):
            sums = self.model(batch.ids, batch.labels, batch.positions, view, stage)
            accelerator.backward(sums[0] * weight)
        return sums.detach().to(reducible(accelerator), torch.float64)

    def _broken(self, what: str, where: str, rate: float) -> str:
        return (
            f"the {what} is no finite number at step {self.step + 1}{where}; it was not taken, and the last checkpoint "
            f"is whole; lower the learning rate ({rate:.3g} now) or take another precision"
        )


def reducible(accelerator: Accelerator) -> torch.device:
    """Where fp64 sums are held: MPS has none."""
    return torch.device("cpu") if accelerator.device.type == "mps" else accelerator.device
