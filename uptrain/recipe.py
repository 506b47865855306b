"""The recipe of an uptraining run: one flat table of values, checked before a model or torch is opened."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ..common.embedded import named_model
from ..common.errors import UserError, did_you_mean
from ..common.typed import (
    AT_LEAST_0,
    AT_LEAST_1,
    POSITIVE,
    Rule,
    at_home,
    check_choice,
    check_rule,
    check_sane,
    kinds_of,
    plain_key,
    quoted,
    read_table,
    split_pair,
    typed,
    typed_table,
    written,
)

SECTION = "uptrain"  # of a recipe that has one section for each step of a pipeline
SOURCE = "source"  # the section of what such a pipeline begins with, and its name as a teacher

CHOICES = {
    "train": ("attention", "attention+norms", "all"),
    "loss_on": ("all", "assistant"),
    "schedule": ("cosine", "wsd", "linear", "constant"),
    "precision": ("auto", "fp32", "bf16", "fp16"),
}
# accelerate's own list; it can be asked only with torch at hand.
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")

_DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu|npu|hpu)(:\d+)?")
_SHARE: Rule = (lambda x: 0 <= x <= 1, "between 0 and 1")
_BELOW_1: Rule = (lambda x: 0 <= x < 1, "at least 0 and below 1")
_PART: Rule = (lambda x: 0 < x <= 1, "more than 0 and at most 1")

# What a number, or each number of a list, must be. None is always let through: it means what the docstring says.
_RANGES: dict[str, Rule] = {
    **dict.fromkeys(("tokens", "steps", "pretrain_tokens", "batch_size", "micro_batch_size"), AT_LEAST_1),
    **dict.fromkeys(("eval_windows", "log_every", "keep", "processes"), AT_LEAST_1),
    **dict.fromkeys(("lora_rank", "top_k", "warmup_steps", "weight_decay", "clip", "seed"), AT_LEAST_0),
    **dict.fromkeys(("eval_every", "save_every"), AT_LEAST_0),
    **dict.fromkeys(("lora_alpha", "weights", "layer_learning_rate", "learning_rate"), POSITIVE),
    **dict.fromkeys(("ce_share", "layer_share", "final_lr_share"), _SHARE),
    "temperature": (lambda x: 1e-3 <= x <= 1e3, "between 0.001 and 1000"),
    "held_out": (lambda x: x == 0 or 1e-6 <= x < 1, "0, or at least 1e-6 and below 1"),
    "betas": _BELOW_1,
    **dict.fromkeys(("alpha", "decay_share"), _PART),
    "window": (lambda x: x >= 2, "at least 2: the first token of a window is not predicted"),
}

# What may be the path of something of the user's, in which ~ is home.
_INPUTS = ("model", "teacher", "reference", "init_from", "data", "eval_text")
_PATHS = (*_INPUTS, "out", "run_dir")
_MODELS = ("model", "teacher", "reference")  # which may be `embedded`

_BUDGETS = ("tokens", "steps", "alpha")
# What says nothing unless something else is set: the value of the other is what switches it on.
_NEEDS = {
    **dict.fromkeys(("teacher_revision", "temperature", "ce_share", "top_k"), "teacher"),
    **dict.fromkeys(("layer_share", "layer_learning_rate"), "teacher"),
    "lora_alpha": "lora_rank",
    "pretrain_tokens": "alpha",
    "alpha": "pretrain_tokens",
    "loss_on": "chat",
}
# What leaves the weights as they are, but for rounding. Where a run is computed and in which pieces must be free to
# change when it is taken up again: on another machine, with fewer windows at a time after memory ran out.
_BESIDE_THE_WEIGHTS = frozenset(
    {"out", "run_dir", "overwrite", "keep", "track", "log_every", "eval_every", "save_every"}
    | {"eval_text", "eval_windows", "reference", "processes", "accelerate", "device", "micro_batch_size"}
    | {"gradient_checkpointing"}
)


@dataclass(frozen=True)
class Recipe:
    """What an uptraining run is made of. The names are the keys of the YAML.

    Args:
        model: the checkpoint to heal: a directory, a GGUF file, a Hub id, or `embedded`, the one inside kvfold.
        out: the directory of the healed checkpoint.
        run_dir: where the run keeps its tokens, checkpoints and metrics; empty for ``out`` + ".run".
        revision: branch, tag or commit of ``model``.
        train: which parameters learn. Converting changed the attention only, so that is what needs healing.
        lora_rank: train adapters of this rank on the attention instead of its weights; 0 is off.
        lora_alpha: the adapters' scale times the rank; None for twice the rank.
        data: texts to train on: files (plain text, .jsonl, .csv, .parquet), ``builtin[:KIND]`` or ``hub:NAME``.
        weights: how often each text is drawn, in proportion; None for in proportion to its windows.
        window: tokens of a window; None for 2048, or the model's context if smaller.
        reset_positions: count positions from 0 in every document of a window.
        chat: the texts are tables of messages, rendered by the tokenizer's chat template.
        loss_on: with ``chat``, learn from every token or only from what assistants say.
        held_out: share of the texts' content that is never trained on, and judged by.
        eval_text: further texts to judge by.
        eval_windows: windows to judge by, of each text.
        teacher: the model to learn from, usually the one that was converted; None to learn from text alone.
        teacher_revision: branch, tag or commit of ``teacher``.
        reference: the model whose held-out loss is shown beside; None for the teacher, if there is one.
        temperature: both models' logits are divided by it in the divergence.
        ce_share: share of the cross entropy in the loss beside the divergence from the teacher.
        top_k: compare the teacher's so many likeliest tokens, and the rest as one; 0 for all tokens.
        layer_share: share of the steps that match the teacher's attention outputs, before the others match logits.
        layer_learning_rate: peak learning rate of those steps.
        tokens: budget in tokens read. Exactly one budget is given.
        steps: budget in optimizer steps.
        alpha: budget as a share of ``pretrain_tokens``, the GQA paper's alpha (arXiv 2305.13245).
        pretrain_tokens: tokens that the source was trained on.
        batch_size: windows a step, over all processes together: their number does not change what is learnt.
        micro_batch_size: windows that a process holds at a time.
        learning_rate: peak learning rate.
        schedule: how the rate falls after the warm-up; ``wsd`` stays up until the last ``decay_share``.
        warmup_steps: steps over which the rate rises, in each stage; None for 20, or a tenth of the stage's if fewer.
        decay_share: share of the steps over which ``wsd`` falls.
        final_lr_share: share of the peak rate that is left at the end.
        weight_decay: AdamW's decoupled weight decay, on matrices only.
        betas: AdamW's two averaging factors.
        clip: largest norm of all gradients together; 0 never clips.
        seed: of the order of the windows and of every other random draw.
        precision: of the computation; the trained weights themselves are kept in fp32.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        device: where a single process computes: auto, cpu, cuda, cuda:1.
        log_every: steps between two lines of metrics.
        eval_every: steps between two looks at the held-out text; 0 for only before the first and after the last.
        save_every: steps between two checkpoints; 0 for only when a signal asks to stop.
        keep: checkpoints kept.
        track: trackers of accelerate to report to.
        processes: how many processes the run must find itself in; None for as many as there are.
        accelerate: an accelerate config to launch by, kvfold's by name or a file; None to choose by the devices.
        init_from: begin anew from the weights of this checkpoint of a run.
        overwrite: replace ``out`` if it exists, once the new one is whole.

    Raises:
        UserError: a value is out of range, or two of them contradict each other.
    """

    model: str
    out: str
    run_dir: str = ""
    revision: str | None = None
    train: str = "attention"
    lora_rank: int = 0
    lora_alpha: float | None = None

    data: tuple[str, ...] = ("builtin",)
    weights: tuple[float, ...] | None = None
    window: int | None = None
    reset_positions: bool = False
    chat: bool = False
    loss_on: str = "all"
    held_out: float = 0.02
    eval_text: tuple[str, ...] = ()
    eval_windows: int = 16

    teacher: str | None = None
    teacher_revision: str | None = None
    reference: str | None = None
    temperature: float = 1.0
    ce_share: float = 0.0
    top_k: int = 0
    layer_share: float = 0.2
    layer_learning_rate: float = 2e-4

    tokens: int | None = None
    steps: int | None = None
    alpha: float | None = None
    pretrain_tokens: int | None = None

    batch_size: int = 32
    micro_batch_size: int = 1
    learning_rate: float = 8e-5
    schedule: str = "cosine"
    warmup_steps: int | None = None
    decay_share: float = 0.2
    final_lr_share: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0

    precision: str = "auto"
    gradient_checkpointing: bool = False
    device: str = "auto"

    log_every: int = 10
    eval_every: int = 100
    save_every: int = 100
    keep: int = 2
    track: tuple[str, ...] = ()
    processes: int | None = None
    accelerate: str | None = None
    init_from: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, kind in kinds_of(type(self)).items():
            value = getattr(self, name)
            if kind.many and value is not None:  # a caller in Python may give a list
                value = (value,) if isinstance(value, str) else tuple(value)
            if name in _MODELS and isinstance(value, str):
                value = named_model(value)
            if name in _PATHS:
                value = at_home(value)
            object.__setattr__(self, name, value)
            _check_value(name, value)
        _check_budget(self)
        _check_together(self)
        _check_paths(self)

    @property
    def run_folder(self) -> Path:
        """Where the run keeps its tokens, checkpoints and metrics."""
        return Path(self.run_dir or f"{Path(self.out)}.run")

    def steps_of(self, window: int) -> int:
        """Optimizer steps of a run on windows of ``window`` tokens: as many as the budget holds whole.

        Raises:
            UserError: the budget is smaller than one step.
        """
        if self.steps is not None:
            return self.steps
        budget = self.tokens if self.tokens is not None else int(self.alpha * self.pretrain_tokens)
        a_step = self.batch_size * window
        if budget < a_step:
            raise UserError(
                f"a budget of {budget:,} tokens is less than one step of {self.batch_size} windows of {window} "
                f"({a_step:,}); raise it, or lower batch_size or window"
            )
        return budget // a_step

    def windows_per_process(self, processes: int) -> int:
        """Windows of a step that each of ``processes`` computes.

        Raises:
            UserError: the windows of a step do not divide among them.
        """
        if self.batch_size % processes:
            raise UserError(
                f"batch_size {self.batch_size} does not divide among {processes} processes; try "
                f"{math.ceil(self.batch_size / processes) * processes}"
            )
        return self.batch_size // processes

    def identity(self) -> dict[str, Any]:
        """The values that determine the weights: two runs that agree in them may take up each other's checkpoints.

        Left out is what only says where results go, what is shown on the way, and where and in which pieces the
        same sums are computed. Plain data, equal to itself after a way through JSON.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _BESIDE_THE_WEIGHTS}
        if self.init_from:  # however it is spelt
            values["init_from"] = str(Path(self.init_from).resolve())
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def read_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a YAML file and ``key=value`` pairs; a later pair wins over an earlier one and the file.

    Args:
        path: a file that is flat, or that has a section `uptrain` beside others, which are left alone; None to
            take everything from the pairs.
        overrides: ``key=value``; ``uptrain.key=value`` too, if the file has sections. A list is ``[a, b]``.

    Raises:
        UserError: the file cannot be read, a key is unknown or stands there twice, a value is of the wrong type
            or out of range, or something is missing.
    """
    table, sections = ({}, False) if path is None else _read_file(Path(path))
    where = "" if path is None else f"{path}: "
    known = kinds_of(Recipe)
    values = typed_table(table, known, where)
    for override in overrides:
        key, text = split_pair(override)
        name = plain_key(key.removeprefix(f"{SECTION}.") if sections else key)
        if name not in known:
            raise UserError(f"unknown key {key!r} in {override!r}{did_you_mean(name, known)}")
        values[name] = typed(name, written(name, text, known[name]), known[name])
    for field in fields(Recipe):
        if field.default is MISSING and field.name not in values:
            also = f"; kvfold run fills in model and out of a section {SECTION}" * sections
            raise UserError(
                f"{where}the recipe has no {field.name}; write {field.name}: ..., or {field.name}=...{also}"
            )
    return Recipe(**values)


def _read_file(path: Path) -> tuple[dict[str, Any], bool]:
    """The table of a file, its scalars as text, and whether it was a section beside others."""
    table = read_table(path, missing="give a YAML file, or model=... and out=...")
    if SECTION not in table:
        return table, False
    section = table[SECTION] or {}
    if not isinstance(section, dict):
        raise UserError(f"{path}: the section {SECTION} is not a table of keys and values")
    return teach(section, table.get(SOURCE)), True


def teach(section: Mapping[str, Any], source: object) -> dict[str, Any]:
    """An `uptrain` section whose teacher may be called `source`: what the pipeline begins with.

    Args:
        section, source: those sections of a recipe, as they stand there.
    """
    if section.get("teacher") != SOURCE or not isinstance(source, Mapping) or not source.get("model"):
        return dict(section)
    revision = {"teacher_revision": source["revision"]} if source.get("revision") else {}
    return {**section, "teacher": source["model"], **revision}


def _check_value(name: str, value: Any) -> None:
    for one in value if isinstance(value, tuple) else (value,):
        check_sane(name, one)
        check_rule(name, one, _RANGES.get(name))
        check_choice(name, one, CHOICES.get(name, ()))
        if name == "track":
            check_choice("tracker", one, TRACKERS)


def _check_budget(recipe: Recipe) -> None:
    given = [name for name in _BUDGETS if getattr(recipe, name) is not None]
    if len(given) != 1:
        said = " and ".join(f"{name} {getattr(recipe, name):,}" for name in given) or "no budget"
        verb = "are" if given else "is"
        raise UserError(f"{said} {verb} given; say how long to train by one of {', '.join(_BUDGETS)}")


def _check_together(recipe: Recipe) -> None:
    """Refuse what would be ignored, and what contradicts itself."""
    usual = {field.name: field.default for field in fields(recipe)}
    for name, needed in _NEEDS.items():
        if getattr(recipe, name) != usual[name] and not getattr(recipe, needed):
            raise UserError(f"{name} {getattr(recipe, name)} says nothing without {needed}; set it, or leave it out")
    if not recipe.data:
        raise UserError("data names no text; give a file, builtin or hub:NAME")
    if recipe.weights is not None and len(recipe.weights) != len(recipe.data):
        raise UserError(f"{len(recipe.weights)} weights are given for {len(recipe.data)} texts; give one for each")
    for name in ("data", "eval_text"):
        spelt = {text: str(Path(text).resolve()) if Path(text).exists() else text for text in getattr(recipe, name)}
        files = [spelt[text] for text in getattr(recipe, name)]
        if twice := next((text for text in spelt if files.count(spelt[text]) > 1), None):
            raise UserError(f"{name} names {twice} twice; give it once{', with a weight' * (name == 'data')}")
    if len(recipe.betas) != 2:
        raise UserError(f"{len(recipe.betas)} betas are given; AdamW has two")
    if recipe.lora_rank and recipe.train == "all":
        raise UserError("lora_rank trains adapters of the attention, train: all every weight; leave one out")
    if not recipe.held_out and not recipe.eval_text:
        raise UserError("held_out 0 leaves no text to judge by; name one as eval_text")
    if recipe.micro_batch_size > recipe.batch_size:
        raise UserError(
            f"micro_batch_size {recipe.micro_batch_size} is more than the {recipe.batch_size} windows of a step "
            "(batch_size); lower it"
        )
    if recipe.processes is not None:
        recipe.windows_per_process(recipe.processes)


def _check_paths(recipe: Recipe) -> None:
    for name in ("model", "out", "device"):
        if not getattr(recipe, name).strip():
            raise UserError(f"{name} is empty; is a shell variable unset?")
    if not _DEVICE.fullmatch(recipe.device):
        known = "auto, cpu, or as torch names one: cuda, cuda:1, mps"
        raise UserError(f"device is {quoted(recipe.device)}; it must be {known}")
    if Path(recipe.out).name in ("", ".."):
        raise UserError(f"out {recipe.out} has no name of its own; give the directory to write")
    out, folder = Path(recipe.out).resolve(), recipe.run_folder.resolve()
    for name in _INPUTS:
        values = getattr(recipe, name)
        for value in values if isinstance(values, tuple) else (values,):
            if value and Path(value).resolve() == out:
                raise UserError(f"out {recipe.out} is the {name} itself; write the healed model to another directory")
            if value and Path(value).exists() and Path(value).resolve().is_relative_to(out):
                raise UserError(f"{name} {value} lies in out {recipe.out}; write the healed model to another directory")
    if folder == out:
        raise UserError(f"run_dir {recipe.run_dir} is out itself; give them different names")
    for inner, outer, names in ((folder, out, ("run_dir", "out")), (out, folder, ("out", "run_dir"))):
        if inner.is_relative_to(outer):
            raise UserError(f"{names[0]} {inner} lies in {names[1]} {outer}; neither may be in the other")
    if (folder / "config.json").exists():
        raise UserError(f"run_dir {folder} is a checkpoint; give the run a folder of its own")
