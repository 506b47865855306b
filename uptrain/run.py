"""One run of uptraining, from a converted checkpoint to a healed one.

1. Meet the other processes, and open the checkpoint (a stock latent export as its plain form).
2. Turn the texts into windows of tokens, once, in the folder of the run.
3. Load student and teacher, take up the last checkpoint that is whole, or judge the model as it came in.
4. Train; look at the held-out text, and save, now and then, and when a signal asks to stop.
5. Write the healed checkpoint.

Whatever happens, the same command goes on from the last checkpoint, and ends with the same bits.
"""

from __future__ import annotations

import math
import re
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from ..common.atomic import check_room, scratch_folder, working_folder
from ..common.embedded import last_part
from ..common.errors import EnvironmentFailure, UserError
from ..common.kvcache import fit_context
from ..common.loading import load_model, load_tokenizer
from ..common.progress import Stages, silent
from ..common.shown import say
from ..common.status import SIGNALS, Stopped
from ..convert.directory import check_paths
from ..convert.source import open_source
from .computing import DTYPES, checkpoint_activations, choose_precision, lower_frozen, make_accelerator
from .data.documents import DataSpec
from .data.store import Store, build_store, forget_others
from .finish import trainable, write_result
from .history import PICTURE, History, draw
from .judge import check_going, check_reference, check_start, held_out_losses
from .loop import LoopKnobs, StepReport, Training
from .objective import Objective, Trainee, check_packing
from .order import Order
from .plan import UptrainPlan, plan
from .processes import check_fsdp, check_world, is_on, join, sharding
from .recipe import Recipe
from .schedule import Schedule, course
from .selection import Selection, attention_modules, merge_adapters, select
from .state import HASHED, SHARDED, Checkpoints, check_recipe, clear, load_weights
from .teacher import Teacher, check_pair, check_tokenizers

DEFAULT_WINDOW = 2048
_STATE_BYTES = 12  # of a checkpoint, for a trained parameter: itself and two moments in fp32
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class UptrainReport:
    """What a run did.

    Attributes:
        model, source: what was written, and what came in.
        trained, parameters: how many parameters were trained, of how many.
        steps, tokens, epochs: how far the run went; tokens read, and passes over the training text.
        processes, precision, sharding: how.
        held_out_before, held_out, reference: nats a token on text that was not trained on, by text: before the first
            step (empty if that was lost), after the last, and of the reference, if there is one.
        tokens_per_second: of the steps that this process took; 0 if it took none.
        resumed_from: the step that a checkpoint was taken up at; 0 if the run began.
        run_dir: where checkpoints and metrics are.
    """

    model: str
    source: str
    trained: int
    parameters: int
    window: int
    steps: int
    tokens: int
    epochs: float
    processes: int
    precision: str
    sharding: str
    held_out_before: dict[str, float]
    held_out: dict[str, float]
    reference: dict[str, float]
    tokens_per_second: float
    resumed_from: int
    run_dir: str


def uptrain(recipe: Recipe, *, progress: Stages = silent) -> UptrainReport:
    """Heal a converted checkpoint as a recipe says; a run that was stopped is gone on with.

    Args:
        recipe: see `recipe.Recipe`.
        progress: opens a progress for each stage.

    Raises:
        UserError: the recipe does not fit the model, the texts, the processes or what is in the folder of the run.
        CheckFailed: the model is broken before the first step, or the loss stops being a number.
        EnvironmentFailure: disk, network, memory, or processes that do not find each other.
        Stopped: a signal asked for it; a checkpoint was saved.
    """
    check_world(recipe.processes)
    check_paths(recipe.model, recipe.out, overwrite=recipe.overwrite)
    with ExitStack() as stack:
        run = Run(recipe, stack, recipe.run_folder, progress)
        run.resume()
        run.train()
        return run.write()


def foresee(recipe: Recipe, *, progress: Stages = silent) -> UptrainPlan:
    """Say what a run will take, with the time of a step that is computed here; nothing is left behind.

    Raises:
        UserError, EnvironmentFailure: what would stop the run before its first step.
    """
    check_world(recipe.processes)
    check_paths(recipe.model, recipe.out, overwrite=recipe.overwrite)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("kvfold-dry-run-"))
        return Run(recipe, stack, folder, progress).foresee()


class Run:
    """A run that is ready to take its next step.

    Args:
        recipe: what it is made of.
        stack: closes what the run opens.
        folder: where it keeps what it needs again.
        progress: opens a progress for each stage.

    Raises:
        UserError, EnvironmentFailure: see `uptrain`.
    """

    def __init__(self, recipe: Recipe, stack: ExitStack, folder: Path, progress: Stages):
        self.recipe, self.progress, self.folder = recipe, progress, folder
        workers = join(recipe.device)
        self.is_main = workers.rank == 0
        recipe.windows_per_process(workers.size)
        if self.is_main:
            stack.enter_context(working_folder(self.folder))
            (self.folder / _CHECKPOINTS).mkdir(exist_ok=True)
            clear(self.folder / _CHECKPOINTS)
            check_recipe(self.folder / _CHECKPOINTS, _said(recipe))
        workers.wait()
        self.source = stack.enter_context(
            trainable(recipe.model, recipe.revision, self.folder, workers=workers, progress=progress)
        )
        self.window = fit_context(self.source.config.full, "window", recipe.window, DEFAULT_WINDOW)
        self.steps = recipe.steps_of(self.window)
        self.store = self._tokens()
        self.precision = choose_precision(recipe.precision, workers.device)
        student, self.selection = self._student(workers.device)
        self.accelerator = make_accelerator(recipe, self.precision, self.folder)
        self._check_digests()
        teacher = self._teacher(student)
        self.identity = self._identity()
        self.parameters = sum(parameter.numel() for parameter in student.parameters())
        self.trained = sum(parameter.numel() for parameter in student.parameters() if parameter.requires_grad)
        objective = Objective(recipe.temperature, recipe.ce_share, recipe.top_k)
        trainee = Trainee(student, objective, self.selection.attention)
        names = [f"model.{name}" for name in self.selection.parameters]
        self.checkpoints = Checkpoints(self.folder / _CHECKPOINTS, self.identity, self.accelerator, names, recipe.keep)
        self.saved = self.checkpoints.latest(self.say)
        if recipe.init_from and not self.saved:
            load_weights(trainee, Path(recipe.init_from), names)
        self.training = Training(
            trainee,
            self.store,
            Order(self.store.sizes, recipe.weights, recipe.seed),
            knobs_of(recipe, self.steps),
            self.accelerator,
            teacher,
        )
        self.resumed_from, self.seconds = 0, 0.0
        # In nats a token, of what knows nothing.
        self.guess = math.log(self.source.config.full.get_text_config(decoder=True).vocab_size)

    def _tokens(self) -> Store:
        recipe = self.recipe
        spec = DataSpec(
            texts=recipe.data,
            weights=recipe.weights,
            window=self.window,
            reset_positions=recipe.reset_positions,
            chat=recipe.chat,
            loss_on=recipe.loss_on,
            held_out=recipe.held_out,
            eval_texts=recipe.eval_text,
            eval_windows=recipe.eval_windows,
            needed_windows=self.steps * recipe.batch_size,
        )
        with self.progress("reading the texts"):
            return build_store(self.folder, load_tokenizer(str(self.source.folder)), spec, self.source.config.full)

    def _check_digests(self) -> None:
        """Refuse processes that have read other texts: their machines differ.

        Raises:
            EnvironmentFailure: so they have.
        """
        ours = torch.tensor([int(self.store.digest[:12], 16)], device=self.accelerator.device)
        if len(self.accelerator.gather(ours).unique()) > 1:
            raise EnvironmentFailure(
                f"the processes hold different tokens in {self.folder}; give all machines the same texts, or "
                "a run_dir that they share"
            )

    def _student(self, device: str) -> tuple[Any, Selection]:
        recipe = self.recipe
        sharded = is_on("ACCELERATE_USE_FSDP") or is_on("ACCELERATE_USE_DEEPSPEED")
        if sharded and recipe.lora_rank:
            raise UserError("adapters are small enough for every device; leave lora_rank or the sharding out")
        torch.manual_seed(recipe.seed)  # adapters begin at random
        # What is sharded afterwards is loaded to the host.
        student = load_model(self.source.folder, dtype="float32", device="cpu" if sharded else device)
        if recipe.reset_positions:
            check_packing(student)
        selection = select(student, recipe.train, recipe.lora_rank, recipe.lora_alpha)
        check_fsdp(student, selection.layer)
        if recipe.gradient_checkpointing:
            checkpoint_activations(student)
        if not sharded:
            lower_frozen(student, getattr(torch, DTYPES[self.precision]))
        return student, selection

    def _teacher(self, student: Any) -> Teacher | None:
        if not self.recipe.teacher:
            return None
        teacher = self._other(self.recipe.teacher, self.recipe.teacher_revision)
        layers = bool(self.recipe.layer_share)
        self._check_other(self.recipe.teacher, self.recipe.teacher_revision, teacher, layers=layers)
        return Teacher(teacher, attention_modules(teacher) if layers else ())

    def _check_other(self, name: str, revision: str | None, model: Any, *, layers: bool = False) -> None:
        """Refuse a teacher or reference that is not about the same text.

        Raises:
            UserError: see `check_pair` and `check_tokenizers`.
        """
        config = self.source.config.full.get_text_config(decoder=True)
        check_pair(name, config, model.config.get_text_config(decoder=True), layers=layers, window=self.window)
        try:
            with open_source(name, revision=revision) as source:
                theirs = load_tokenizer(str(source.folder))
        except UserError:  # it came without one
            return
        check_tokenizers(name, load_tokenizer(str(self.source.folder)), theirs)

    def _other(self, name: str, revision: str | None = None) -> Any:
        """A model that is only run, in the precision of the run."""
        return load_model(
            name,
            dtype=DTYPES[self.precision],
            device=str(self.accelerator.device),
            revision=revision,
        )

    def _identity(self) -> dict[str, Any]:
        """What the weights are a function of. Models and texts count by what they hold, not by where they lie."""
        recipe = self.recipe
        identity = recipe.identity() | {"model": self.source.digest(), "data": self.store.train_digest}
        if recipe.teacher:
            with open_source(recipe.teacher, revision=recipe.teacher_revision) as teacher:
                identity["teacher"] = teacher.digest()
        return identity | {"precision": self.precision, "steps": self.steps, "window": self.window}

    def resume(self) -> None:
        """Take up the last checkpoint that is whole; without one, judge the model as it came in.

        Raises:
            CheckFailed: the model predicts text no better than a guess.
            EnvironmentFailure: there is no room for checkpoints.
        """
        saved = self.saved
        if self.is_main:
            forget_others(self.folder, self.store)
            check_room(self.folder, _STATE_BYTES * self.trained)
        if saved:
            self.checkpoints.restore(saved)
            self.training.step = self.resumed_from = saved.step
            self.say(f"going on from step {saved.step} of {self.steps}")
        # Without a checkpoint the model is judged again, so even the figures of step 0 are forgotten.
        self.history = History(self.folder, saved.step if saved else -1) if self.is_main else None
        looks = [line for line in self.history.lines if "held_out" in line] if self.history else []
        (self.looks,) = broadcast_object_list([looks])
        self.reference = self.looks[0].get("reference", {}) if self.looks else {}
        if not saved:
            self.reference = self._reference_losses()
            check_start(self.look(0), self.reference, self.guess, self.recipe.model)
        elif saved.step == self.steps and not any(look["step"] == saved.step for look in self.looks):
            self.look(saved.step)  # what was written down is lost

    def _reference_losses(self) -> dict[str, float]:
        teacher, name = self.training.teacher, self.recipe.reference
        if not teacher and not name:
            return {}
        if name:
            model = self._other(name)
            self._check_other(name, None, model)
        else:
            name, model = self.recipe.teacher, teacher.model
        losses = self._judge(Trainee(model))
        check_reference(losses, name)
        return losses

    def _judge(self, model: nn.Module) -> dict[str, float]:
        return held_out_losses(
            model,
            self.store.held_out,
            self.accelerator,
            windows=self.recipe.eval_windows,
            micro_batch_size=self.recipe.micro_batch_size,
        )

    def look(self, step: int) -> dict[str, float]:
        """Judge the model on the held-out texts, and write it down."""
        losses = self._judge(self.training.model)
        line = {"step": step, "tokens": self._tokens_after(step), "held_out": losses, "reference": self.reference}
        self.looks.append(line)
        if self.history:
            self.history.add(**line)
        beside = {name: f" (reference {self.reference[name]:.4f})" for name in losses if name in self.reference}
        said = ", ".join(f"{name} {loss:.4f}{beside.get(name, '')}" for name, loss in losses.items())
        self.say(f"step {step}: held-out loss in nats a token: {said}")
        if self.recipe.track:
            self.accelerator.log({f"held_out/{name}": loss for name, loss in losses.items()}, step=step)
        return losses

    def train(self) -> None:
        """Take the steps that are left.

        Raises:
            CheckFailed: the loss is no number any more.
            Stopped: a signal asked for it; a checkpoint was saved.
        """
        recipe, started = self.recipe, self.training.step
        recent: deque[float] = deque(maxlen=recipe.log_every)
        with self.progress("uptraining") as advance, _signals() as asked:
            for done in self.training.steps():
                recent.append(done.loss)
                self.seconds += done.seconds
                speed = (done.step - started) * done.tokens / self.seconds
                advance(done.step, self.steps, f"loss {sum(recent) / len(recent):.4f}, {speed:,.0f} tokens/s")
                self._write_down(done, speed)
                last = done.step == self.steps
                if last or (recipe.eval_every and done.step % recipe.eval_every == 0):
                    check_going(self.look(done.step), self.guess if last else math.inf, done.step)
                stopped = self._agreed(asked)
                if last or stopped or (recipe.save_every and done.step % recipe.save_every == 0):
                    self.checkpoints.save(done.step)
                if stopped and not last:
                    raise Stopped(stopped, f"step {done.step} of {self.steps} is saved; the same command goes on")

    def _agreed(self, asked: list[int]) -> int:
        """The signal that any process was sent, or 0: all stop after the same step."""
        if self.accelerator.num_processes == 1:
            return asked[0] if asked else 0
        anyone = self.accelerator.reduce(torch.tensor([len(asked)], device=self.accelerator.device), "sum")
        return (asked[0] if asked else int(signal.SIGTERM)) if int(anyone) else 0

    def _write_down(self, done: StepReport, speed: float) -> None:
        tokens = self._tokens_after(done.step)
        if self.history:
            self.history.add(**asdict(done) | {"tokens": tokens})
        if self.recipe.track and done.step % self.recipe.log_every == 0:
            figures = {key: value for key, value in asdict(done).items() if isinstance(value, float)}
            self.accelerator.log({**figures, "tokens": tokens, "tokens_per_second": speed}, step=done.step)

    def _tokens_after(self, step: int) -> int:
        return step * self.recipe.batch_size * self.window

    def write(self) -> UptrainReport:
        """Write the healed checkpoint, and the picture of the losses."""
        state, trained = self._trained_state()
        report = self._report()
        if self.is_main:
            assert self.history is not None
            write_result(
                self.recipe,
                self.source,
                state,
                trained,
                record={
                    "command": "uptrain",
                    **self._published(),
                    "held_out_share": self.recipe.held_out,  # what the run ended with stands under its name
                    "held_out": report.held_out,
                },
                progress=self.progress,
            )
            if why_not := draw(self.history.lines, Path(self.recipe.out).name, self.folder / PICTURE):
                self.say(f"no {PICTURE} was drawn: {why_not}")
        self.accelerator.wait_for_everyone()
        if self.recipe.track:
            self.accelerator.end_training()
        return report

    def _trained_state(self) -> tuple[dict[str, Tensor], set[str]]:
        """The student's tensors by name, and the names of those that have changed."""
        trained = set(self.selection.parameters)
        if self.accelerator.distributed_type in SHARDED:
            state = self.accelerator.get_state_dict(self.training.model)
        else:
            trainee = self.training.finish()
            if self.recipe.lora_rank:
                merge_adapters(trainee.model)
                # model.layers.0.self_attn.q_proj.lora_A.default.weight -> model.layers.0.self_attn.q_proj.weight
                trained = {re.sub(r"\.lora_.*", ".weight", name) for name in trained}
            state = trainee.state_dict()
        return {name.removeprefix("model."): tensor for name, tensor in state.items()}, trained

    def _published(self) -> dict[str, Any]:
        """The run's identity without paths of this machine, of which the last part is kept."""
        names = {name: _last_part(getattr(self.recipe, name)) for name in ("model", "teacher", "init_from")}
        texts = [_last_part(text) for text in self.recipe.data]
        hashes = {f"{name}_digest": self.identity[name] for name in HASHED}
        return self.identity | names | hashes | {"data": texts}

    def _report(self) -> UptrainReport:
        recipe, accelerator = self.recipe, self.accelerator
        taken = self._tokens_after(self.steps - self.resumed_from)
        return UptrainReport(
            model=recipe.out,
            source=recipe.model,
            trained=self.trained,
            parameters=self.parameters,
            window=self.window,
            steps=self.steps,
            tokens=self._tokens_after(self.steps),
            epochs=self.steps * recipe.batch_size / self.training.order.epoch_size,
            processes=accelerator.num_processes,
            precision=self.precision,
            sharding=sharding(),
            held_out_before=next((look["held_out"] for look in self.looks if look["step"] == 0), {}),
            held_out=self.looks[-1]["held_out"],
            reference=self.reference,
            tokens_per_second=taken / self.seconds if self.seconds else 0.0,
            resumed_from=self.resumed_from,
            run_dir=str(self.folder),
        )

    def foresee(self) -> UptrainPlan:
        """What the run will take from its first step on."""
        teacher, device = self.training.teacher, self.accelerator.device
        return plan(
            self.recipe,
            self.source.config.full.get_text_config(decoder=True),
            parameters=self.parameters,
            trained=self.trained,
            teacher_parameters=sum(parameter.numel() for parameter in teacher.model.parameters()) if teacher else 0,
            window=self.window,
            windows=self.store.windows,
            stages=self.training.knobs.course.stages,
            width=getattr(torch, DTYPES[self.precision]).itemsize,
            sharding=sharding(),
            processes=self.accelerator.num_processes,
            device=device.type,
            available=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
            time_step=self.training.time_step,
        )

    def say(self, line: str) -> None:
        if self.is_main:
            say(line)


def _said(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says of its run's identity by itself, see `Run._identity`."""
    derived = {*HASHED, "precision", *(name for name in ("steps", "window") if getattr(recipe, name) is None)}
    return {name: value for name, value in recipe.identity().items() if name not in derived}


def knobs_of(recipe: Recipe, steps: int) -> LoopKnobs:
    """What the loop needs of a recipe."""
    return LoopKnobs(
        course=course(
            steps,
            Schedule(recipe.schedule, recipe.warmup_steps, recipe.decay_share, recipe.final_lr_share),
            learning_rate=recipe.learning_rate,
            layer_share=recipe.layer_share if recipe.teacher else 0.0,
            layer_learning_rate=recipe.layer_learning_rate,
        ),
        batch_size=recipe.batch_size,
        micro_batch_size=recipe.micro_batch_size,
        weight_decay=recipe.weight_decay,
        betas=(recipe.betas[0], recipe.betas[1]),
        clip=recipe.clip,
        seed=recipe.seed,
    )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask to stop, instead of unwinding in the middle of a step."""
    asked: list[int] = []
    before = [signal.signal(number, lambda number, frame: asked.append(number)) for number in SIGNALS]
    try:
        yield asked
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def _last_part(name: str | None) -> str | None:
    return last_part(name) if name and Path(name).exists() else name
