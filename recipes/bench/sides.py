"""The same training steps on two sides, kvfold's loop and transformers' Trainer, each in a process of its own.

A side starts, builds its model, and waits. Whoever started it lets it take one block of steps after the other, so that
sides which are up together take turns and the machine's moods hit them alike. The clock of a block runs from the end
of the step before it to the end of its last step, and waits for the device at both; whatever a step costs, reading
its batch included, is inside.

Both sides train the same parameters of one random model on the same windows in the same order, with AdamW, clipping
and a constant rate; that their mean losses agree shows that they do the same work. Trainer logs, saves and judges
nothing, and keeps its own default optimizer, which is fused AdamW. Frozen linear weights are held as the side's user
would have them: under bf16 kvfold's in bf16, Trainer's in fp32.

Legend: B windows of a batch, S tokens a window, V vocabulary, L layers, H heads.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from ...attention.plain import LatentAttention
from ...common.errors import CheckFailed
from ...common.scoring import UNSCORED
from ...uptrain.computing import lower_frozen
from ...uptrain.data.store import Tensors
from ...uptrain.loop import LoopKnobs, Training
from ...uptrain.objective import Trainee
from ...uptrain.order import Order
from ...uptrain.schedule import Schedule, course
from ...uptrain.selection import select
from ...uptrain.teacher import Teacher

LEARNING_RATE = 8e-5
BETAS = (0.9, 0.95)
CLIP = 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """What one process is to do.

    Attributes:
        side: a key of `SIDES`.
        model: its config, with a `model_type`.
        train: as in a recipe.
        precision: a key of `DTYPES`; trained weights are fp32 in both.
        device: cpu or cuda.
        batch, window: B and S.
        block: steps between two readings of the clock.
        blocks: how many; the first warms up.
        teacher: config of a model to learn from.
    """

    side: str
    model: dict[str, Any]
    train: str
    precision: str
    device: str
    batch: int
    window: int
    block: int
    blocks: int
    teacher: dict[str, Any] | None = None

    @property
    def steps(self) -> int:
        return self.block * self.blocks

    @property
    def block_tokens(self) -> int:
        return self.block * self.batch * self.window


@dataclass(frozen=True)
class Ending:
    """What one process says when it is done.

    Attributes:
        device: what it computed on.
        loss: mean over all steps, in nats a token.
        peak: bytes that it held at most: of the accelerator's memory, or else resident.
        weights: bytes of the model's parameters.
        parameters, trained: how many.
        flops: that one token costs, see `token_flops`.
    """

    device: str
    loss: float
    peak: int
    weights: int
    parameters: int
    trained: int
    flops: int


class Side:
    """One job in its process, from where it may take its first step; a context that ends it.

    Raises:
        CheckFailed: by any method, if the process ends before its time; the last that it said is in the message.
    """

    def __init__(self, job: Job):
        self.job = job
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        # Trainer would spread over all devices that it sees.
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": device},
            text=True,
        )
        self._hear()

    def block(self) -> float:
        """Let it take a block of steps; returns the seconds."""
        self._go()
        return self._hear()

    def end(self) -> Ending:
        """Hear what it has to say after its last block."""
        self._go()
        return Ending(**self._hear())

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _go(self) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_hear` says why

    def _hear(self) -> Any:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        self._said.seek(0)
        *_, last = self._said.read().splitlines() or [f"status {self._process.returncode}"]
        raise CheckFailed(f"the side {self.job.side} ended early: {last}")


class Pace:
    """What a side calls after every step: reads the clock at the end of a block, and waits to be let on.

    Args:
        job: whose steps these are.
        say: is told that the side is ready, and then the seconds of each block.
        wait: returns when the next block may begin.
    """

    def __init__(self, job: Job, say: Callable[[Any], object], wait: Callable[[], object]):
        self.job, self.say, self.wait, self.steps = job, say, wait, 0
        self.started = 0.0

    def begin(self) -> None:
        """All is built; wait to take the first step."""
        self.say("ready")
        self._next()

    def step(self) -> None:
        """A step is done."""
        self.steps += 1
        if self.steps % self.job.block == 0:
            self._finish_queue()
            self.say(time.perf_counter() - self.started)
            self._next()

    def _next(self) -> None:
        self.wait()
        self._finish_queue()
        self.started = time.perf_counter()

    def _finish_queue(self) -> None:
        if self.job.device == "cuda":
            torch.cuda.synchronize()


def make_model(config: dict[str, Any], device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model of random weights."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, use_cache=False), dtype=dtype)


def make_windows(job: Job) -> Tensor:
    """Random tokens [W, S], one window for each that is read."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(job.model["vocab_size"], (job.steps * job.batch, job.window), generator=generator)


def by_kvfold(job: Job, model: Any, pace: Pace) -> float:
    """Mean loss of kvfold's loop."""
    lower_frozen(model, DTYPES[job.precision])
    knobs = LoopKnobs(
        course(job.steps, Schedule("constant", warmup=0), learning_rate=LEARNING_RATE),
        batch_size=job.batch,
        micro_batch_size=job.batch,
        weight_decay=0.0,
        betas=BETAS,
        clip=CLIP,
    )
    windows = make_windows(job)
    accelerator = Accelerator(cpu=job.device == "cpu", mixed_precision={"fp32": "no"}.get(job.precision, job.precision))
    teacher = Teacher(make_model(job.teacher, job.device, DTYPES[job.precision], seed=1)) if job.teacher else None
    order = Order([len(windows)])
    training = Training(Trainee(model), Tensors(windows), order, knobs, accelerator, teacher)
    total = 0.0
    pace.begin()
    for report in training.steps():
        total += report.loss
        pace.step()
    return total / job.steps


class _Paced(TrainerCallback):
    def __init__(self, pace: Pace):
        self.pace = pace

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.pace.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.pace.step()


def by_trainer(job: Job, model: Any, pace: Pace) -> float:
    """Mean loss of transformers' Trainer."""
    windows = make_windows(job)
    rows = windows[Order([len(windows)]).draw(0, len(windows))]
    labels = rows.clone()
    labels[:, 0] = UNSCORED
    with tempfile.TemporaryDirectory(prefix="kvfold-bench-") as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=job.steps,
            per_device_train_batch_size=job.batch,
            train_sampling_strategy="sequential",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            max_grad_norm=CLIP,
            bf16=job.precision == "bf16",
            use_cpu=job.device == "cpu",
            dataloader_pin_memory=job.device == "cuda",
            logging_strategy="no",
            logging_nan_inf_filter=False,  # or every step waits for its loss
            save_strategy="no",
            eval_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = [{"input_ids": ids, "labels": targets} for ids, targets in zip(rows, labels, strict=True)]
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[_Paced(pace)])
        return trainer.train().training_loss


def by_forward(job: Job, model: Any, pace: Pace) -> float:
    """No training: transformers' own forward pass of the model through each batch, in the run's precision."""
    model = model.to(DTYPES[job.precision]).eval()
    pace.begin()
    for ids in make_windows(job).split(job.batch):
        with torch.no_grad():
            model(ids.to(job.device))
        pace.step()
    return float("nan")


SIDES: dict[str, Callable[[Job, Any, Pace], float]] = {
    "kvfold": by_kvfold,
    "Trainer": by_trainer,
    "forward": by_forward,
}


def token_flops(model: Any, window: int) -> int:
    """Floating-point operations that one token of a training step needs, recomputation left out.

    A weight of a linear module costs 2 forward, 2 for the gradient of what came in, and 2 more for its own gradient if
    it is trained: 6 N where everything is trained, which is the usual count (Kaplan et al., arXiv 2001.08361), and
    4 N of frozen weights. The input embedding costs nothing; a head that is tied to it counts as a head. Attention
    costs 6 H (d_q + d_v) / 2 * S a layer, of causal windows: d_q is the width of a head's queries and keys, d_v of its
    values, and half of the S tokens are seen on average. (PaLM, arXiv 2204.02311, appendix B, counts all S.)
    """
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    linear = sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights)
    config = model.config
    widths = 2 * config.head_dim
    if any(isinstance(module, LatentAttention) for module in model.modules()):
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return linear + 3 * config.num_hidden_layers * config.num_attention_heads * widths * window


def peak_bytes(device: str) -> int:
    """Bytes that this process held at most; of resident memory the peak since it began, see VmHWM in proc(5)."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def main(args: Sequence[str] | None = None) -> None:
    (text,) = sys.argv[1:] if args is None else args
    job = Job(**json.loads(text))
    # Libraries print; what is said here stays apart.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)

        def say(answer: Any) -> None:
            print(json.dumps(answer), file=answers)

        def wait() -> None:
            if not sys.stdin.readline():
                raise SystemExit("whoever started this side has gone")

        model = make_model(job.model, job.device)
        select(model, job.train)
        flops = token_flops(model, job.window)
        loss = SIDES[job.side](job, model, Pace(job, say, wait))
        parameters = list(model.parameters())
        say(
            asdict(
                Ending(
                    device=torch.cuda.get_device_name() if job.device == "cuda" else "cpu",
                    loss=loss,
                    peak=peak_bytes(job.device),
                    weights=sum(each.nbytes for each in parameters),
                    parameters=sum(each.numel() for each in parameters),
                    trained=sum(each.numel() for each in parameters if each.requires_grad),
                    flops=flops,
                )
            )
        )


if __name__ == "__main__":
    main()
