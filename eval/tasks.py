"""Tasks of lm-evaluation-harness, on a model that kvfold loads: the optional extra `kvfold[tasks]`.

The protocol is lm-eval's, so that figures compare with those that others publish: its prompts, few-shot examples,
seeds, metrics and errors, and the special tokens that the tokenizer adds by default. Several processes (`accelerate
launch`, `torchrun`) share the requests and give the figures of one; only text that is drawn at random differs.

A task is a name that lm-eval knows, or a file of the user's in its format. With local data (`dataset_path: json` and
`data_files`) that needs no network. What code a task brings is run: a file's `!function` is the user's own, as are
those of an included folder; a registered task's comes with the installed lm-eval, and may fetch metrics from the Hub.
Code that a data set brings is never run, and neither is what a model writes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

import yaml

from ..common.errors import UserError, did_you_mean
from ..common.loading import load_model, load_tokenizer, resolve_device
from ..common.parallel import Workers
from ..common.progress import Progress
from ..convert.check import check_readable

# lm-eval's own: of Python's and of numpy's, torch's and the few-shot examples' random numbers.
SEED, OTHER_SEED = 0, 1234


@dataclass(frozen=True)
class TaskResult:
    """One metric of one task, or of a group of tasks.

    Attributes:
        task, metric, filter: lm-eval's names; the filter is what a generated answer was read with.
        value: None if it is not finite.
        stderr: standard error; None where lm-eval has none for this metric.
        higher_is_better: None where lm-eval does not say.
        samples: documents.
        num_fewshot: examples before each; None for a group whose tasks differ.
        version: of the task; None if it has none.
    """

    task: str
    metric: str
    filter: str
    value: float | None
    stderr: float | None
    higher_is_better: bool | None
    samples: int
    num_fewshot: int | None
    version: str | None


@dataclass(frozen=True)
class TasksReport:
    """The result of `tasks`.

    Attributes:
        results: sorted by task, metric and filter.
        lm_eval: the version that made the requests and the metrics.
        limit: documents a task at most; None for all.
        chat_template: whether prompts went through the tokenizer's.
    """

    model: str
    results: tuple[TaskResult, ...]
    lm_eval: str
    limit: int | None
    batch_size: int
    chat_template: bool
    dtype: str
    device: str


def tasks(
    model: str | Path,
    *,
    tasks: Sequence[str | Path],
    include_path: Sequence[str | Path] = (),
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    apply_chat_template: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    progress: Progress | None = None,
) -> TasksReport:
    """Judge a checkpoint on tasks of lm-evaluation-harness.

    Args:
        model: directory, GGUF file or Hub id.
        tasks: names of tasks, groups or tags that lm-eval knows, or YAML files in its format. A relative path of data
            in a file counts from the working directory.
        include_path: folders with more tasks, by name.
        num_fewshot: examples before each document; by default what the task says. A task that says 0 keeps it.
        limit: only the first so many documents of each task.
        batch_size: sequences at a time; changes the result by rounding alone.
        apply_chat_template: put every prompt into the tokenizer's chat template, examples as turns of their own.
        dtype, device, revision: see `common.loading.load_model`.
        progress: called with `(requests answered, requests in all)`, anew for each kind of request.

    Raises:
        UserError: lm-eval is not installed, a task is unknown or broken or runs what a model writes, or a number does
            not fit.
        CheckFailed: the model's likelihoods are not numbers.
        EnvironmentFailure: the data of a task cannot be downloaded; and see `load_model`.
    """
    names = [tasks] if isinstance(tasks, str | Path) else list(dict.fromkeys(tasks))
    _check(names, include_path, num_fewshot=(num_fewshot, 0), limit=(limit, 1), batch_size=(batch_size, 1))
    tokenizer = load_tokenizer(model, revision=revision)
    if apply_chat_template and not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {model} has no chat template; leave --apply-chat-template out")
    workers = Workers(resolve_device(device))

    # Here, so that importing this module imports neither torch nor lm-eval.
    from lm_eval import evaluate

    from .harness import Harness, hushed, one_line

    def prepare(_: int) -> None:
        nonlocal chosen, harness
        _seed()  # here, as a task may draw its documents
        chosen = _open([str(name) for name in names], [str(folder) for folder in include_path])
        for task in chosen["tasks"].values():
            said = task.get_config("num_fewshot")
            task.set_config("num_fewshot", num_fewshot if num_fewshot is not None and said != 0 else said or 0)
            task.set_fewshot_seed(OTHER_SEED)
        loaded = load_model(model, dtype=dtype, device=workers.device, revision=revision)
        check_readable(model, loaded.config)
        harness = Harness(loaded, tokenizer, workers=workers, batch_size=batch_size, progress=progress)

    chosen: dict[str, Any] = {}
    harness: Any = None
    with hushed():
        # In every process; what is wrong is said by all at once, or a launcher would stop the one that speaks.
        workers.spread(prepare, range(workers.size))
        with one_line(", ".join(chosen["tasks"])):
            found = evaluate(
                harness,
                chosen,
                limit=limit,
                log_samples=False,
                apply_chat_template=apply_chat_template,
                fewshot_as_multiturn=apply_chat_template,
            )
    return TasksReport(
        model=str(model),
        results=_rows(found),
        lm_eval=version("lm_eval"),
        limit=limit,
        batch_size=batch_size,
        chat_template=apply_chat_template,
        dtype=str(harness.model.dtype).removeprefix("torch."),
        device=str(harness.device),
    )


def _check(names: Sequence[Any], folders: Sequence[Any], **numbers: tuple[int | None, int]) -> None:
    """Refuse what needs no model to be seen to be wrong; of each number, the least that it may be is given too."""
    if find_spec("lm_eval") is None:
        raise UserError("tasks need lm-evaluation-harness; pip install 'kvfold[tasks]'")
    if not names:
        raise UserError("no task given; name one that lm-eval knows, or a YAML file")
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"there is no folder {folder} to include tasks from")
    for name, (number, least) in numbers.items():
        if number is not None and number < least:
            raise UserError(f"{name.replace('_', ' ')} {number} is not possible; give {least} or more")


def _seed() -> None:
    import numpy
    import torch

    random.seed(SEED)
    numpy.random.seed(OTHER_SEED)
    torch.manual_seed(OTHER_SEED)


def _open(names: Sequence[str], folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The tasks and groups of these names, as lm-eval's `evaluate` takes them, with their data.

    Raises:
        UserError: one is unknown or broken, runs what a model writes, or brings a task that another brought.
        EnvironmentFailure: its data cannot be downloaded.
    """
    from lm_eval.tasks import TaskManager

    from .harness import one_line

    files = {name: _read(name) for name in names if _is_file(name)}
    groups = {name: body["group"] for name, body in files.items() if "group" in body}
    # A group names its tasks, which stand beside it. A task stands alone: to look around would be slow, if it lies
    # where much else does.
    folders = [*folders, *(str(Path(name).parent) for name in groups)]
    # lm-eval's own index takes five seconds.
    needs_all = bool(groups) or len(files) < len(names)
    manager = TaskManager(include_path=folders, include_defaults=needs_all)
    opened: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
    for name in names:
        if name not in files:
            _check_registered(name, manager.task_index)
        with one_line(name):
            more = manager.load([groups.get(name, name)])
        _refuse_unsafe(name for name, task in more["tasks"].items() if getattr(task, "UNSAFE_CODE", False))
        for kind, known in opened.items():
            if twice := sorted(known.keys() & more[kind]):
                raise UserError(f"{name} brings {twice[0]}, which was there before; name each task once")
            known.update(more[kind])
    return opened


def _is_file(name: str) -> bool:
    """Whether a task is a file of the user's, by its ending: a folder may hold anything under the name of a task.

    Raises:
        UserError: it is one, and is not there.
    """
    if not name.endswith((".yaml", ".yml")):
        return False
    if not Path(name).is_file():
        raise UserError(f"there is no task file {name}")
    return True


class _Reader(yaml.SafeLoader):
    """Reads a task file without running the functions that it names."""


_Reader.add_multi_constructor("!", lambda *_: None)


def _read(path: str) -> dict[str, Any]:
    """What a task file says.

    Raises:
        UserError: it is not YAML, or names no task.
    """
    try:
        body = yaml.load(Path(path).read_bytes(), _Reader)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML ({' '.join(str(error).split())[:100]})") from error
    if not isinstance(body, dict) or not any(body.get(key) for key in ("task", "group", "include")):
        raise UserError(f"{path} names no task; see lm-eval's guide to new tasks")
    return body


def _check_registered(name: str, index: Mapping[str, Any]) -> None:
    """Refuse a name that is unknown, or one of a task that runs what a model writes, before its data is fetched."""
    if name not in index:
        near = did_you_mean(name, index)
        way = near if near.startswith("; did") else "; lm-eval ls tasks lists what it has"  # there are thousands
        raise UserError(f"{name!r} is neither a task of lm-eval nor a YAML file here{way}")
    _refuse_unsafe(task for task in _leaves(name, index) if (index[task].cfg or {}).get("unsafe_code"))


def _leaves(name: str, index: Mapping[str, Any]) -> Iterator[str]:
    """The registered tasks that a name stands for: of a tag, or of a group, or itself."""
    entry = index.get(name)
    if entry is None:  # a group may define a task in place
        return
    members = sorted(entry.tags) if entry.kind.name == "TAG" else (entry.cfg or {}).get("task")
    if entry.kind.name not in ("TAG", "GROUP"):
        yield name
        return
    for member in [members] if isinstance(members, str) else members or ():
        child = member if isinstance(member, str) else member.get("task") or member.get("group")
        if isinstance(child, str) and child != name:
            yield from _leaves(child, index)


def _refuse_unsafe(names: Iterator[str]) -> None:
    for name in names:
        raise UserError(
            f"task {name} runs the code that a model writes, which kvfold does not; use lm-eval itself, in a sandbox"
        )


def _rows(found: Mapping[str, Any]) -> tuple[TaskResult, ...]:
    """lm-eval's results, whose keys are `metric,filter` and `metric_stderr,filter`."""
    rows = []
    for task, figures in found["results"].items():
        for key, value in figures.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            said = found["versions"].get(task)
            rows.append(
                TaskResult(
                    task=task,
                    metric=metric,
                    filter=name,
                    value=_number(value),
                    stderr=_number(figures.get(f"{metric}_stderr,{name}")),
                    higher_is_better=found["higher_is_better"].get(task, {}).get(metric),
                    samples=figures["sample_len"],
                    num_fewshot=found["n-shot"].get(task),
                    version=None if said in (None, "Yaml", "N/A") else str(said),
                )
            )
    return tuple(sorted(rows, key=lambda row: (row.task, row.metric, row.filter)))


def _number(value: Any) -> float | None:
    """A figure, or None for lm-eval's "N/A" and for what JSON has no number for."""
    return float(value) if isinstance(value, Real) and abs(value) < float("inf") else None
