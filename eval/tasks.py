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
from ..common.sources import first_line
from ..convert.check import check_readable

# lm-eval's own: of Python's and of numpy's, torch's and the few-shot examples' random numbers.
SEED, OTHER_SEED = 0, 1234


@dataclass(frozen=True)
class TaskResult:
    """One metric of one task, or of a group of tasks.

    Attributes:
        task, metric, filter: lm-eval's names; the filter is what a generated answer was read with.
        value: None if it is not finite.
        stderr: standard error; None where lm-eval has none for this metric. It is estimated from the samples, and 0
            where all of them came out alike: of few, that is no certainty.
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
    task: str | Path | Sequence[str | Path],
    include_path: str | Path | Sequence[str | Path] = (),
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
        task: one or several: names of tasks, groups or tags that lm-eval knows, or YAML files in its format. A relative
            path of data in a file counts from the working directory.
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
    names, folders = _several(task), _several(include_path)
    _check(names, folders, num_fewshot=(num_fewshot, 0), limit=(limit, 1), batch_size=(batch_size, 1))
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
        chosen = _open(names, folders)
        for name, one in chosen["tasks"].items():
            with one_line(_label(name, one)):
                said = one.get_config("num_fewshot")
                one.set_config("num_fewshot", num_fewshot if num_fewshot is not None and said != 0 else said or 0)
                one.set_fewshot_seed(OTHER_SEED)
        loaded = load_model(model, dtype=dtype, device=workers.device, revision=revision)
        check_readable(model, loaded.config)
        harness = Harness(loaded, tokenizer, workers=workers, batch_size=batch_size, progress=progress)

    chosen: dict[str, Any] = {}
    harness: Any = None
    with hushed():
        # In every process; what is wrong is said by all at once, or a launcher would stop the one that speaks.
        workers.spread(prepare, range(workers.size))
        with one_line(", ".join(_label(name, one) for name, one in chosen["tasks"].items())):
            found = evaluate(
                harness,
                chosen,
                limit=limit,
                log_samples=False,
                apply_chat_template=apply_chat_template,
                fewshot_as_multiturn=apply_chat_template,
            )
            results = _rows(found)
    return TasksReport(
        model=str(model),
        results=results,
        lm_eval=version("lm_eval"),
        limit=limit,
        batch_size=batch_size,
        chat_template=apply_chat_template,
        dtype=str(harness.model.dtype).removeprefix("torch."),
        device=str(harness.device),
    )


def _several(given: str | Path | Sequence[str | Path]) -> list[str]:
    """One or several names, each once."""
    return list(dict.fromkeys(map(str, [given] if isinstance(given, str | Path) else given)))


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
    from .harness import one_line

    files = {name: _read(name) for name in names if _is_file(name)}
    groups = {name: body["group"] for name, body in files.items() if "group" in body}
    # A group names its tasks, which stand beside it. A task stands alone: to look around would be slow, if it lies
    # where much else does.
    folders = [*folders, *(str(Path(name).parent) for name in groups)]
    # lm-eval's own index takes five seconds.
    needs_all = bool(groups) or len(files) < len(names)
    manager = _manage(folders, needs_all)
    opened: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
    for name in names:
        entry = manager.task_index.get(name)
        with one_line(_beside(name, getattr(entry, "yaml_path", None))):
            if name in files:
                _check_file(name, manager.task_index)
            else:
                _check_registered(name, manager.task_index)
            more = manager.load([groups.get(name, name)])
            _refuse_unsafe(task for task, one in more["tasks"].items() if getattr(one, "UNSAFE_CODE", False))
            for task, one in more["tasks"].items():
                _check_figures(task, one)
            if not more["tasks"]:
                raise UserError(f"{name} brings no task; a group lists the names of its tasks under task")
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
        raise UserError(f"there is no task file {name}; give a YAML file, or the name of a task of lm-eval")
    return True


def _manage(folders: Sequence[str], needs_all: bool) -> Any:
    """lm-eval's `TaskManager`, which finds the tasks of folders by their names.

    Raises:
        UserError: a file there gives a task a name that is not text, over which lm-eval would stumble.
    """
    from lm_eval.tasks import TaskManager

    from .harness import one_line

    with one_line(f"index of {', '.join(folders)}"):
        try:
            return TaskManager(include_path=folders, include_defaults=needs_all)
        except TypeError:  # it sorts the names
            _refuse_odd_names(folders)
            raise


def _refuse_odd_names(folders: Sequence[str]) -> None:
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.yaml")):
        try:
            body = yaml.load(path.read_bytes(), _Reader)
        except Exception:  # lm-eval leaves it out, whatever it is
            continue
        if isinstance(body, dict):
            _check_names(path, body)
            tags = body.get("tag")
            for tag in tags if isinstance(tags, list) else [tags]:
                _check_name(path, "tag", tag)


def _check_names(path: str | Path, body: Mapping[Any, Any]) -> None:
    """Refuse a file that names itself by something that is not text; a group's `task` is a list of others."""
    key = "group" if "group" in body else "task"
    _check_name(path, key, body.get(key))


def _check_name(path: str | Path, key: str, name: Any) -> None:
    if name is not None and not isinstance(name, str):
        raise UserError(f"{path} says {key}: {str(name)[:40]}, which is not a name; write one, in quotes")


def _label(name: str, task: Any) -> str:
    """A loaded task's name, and its file."""
    metadata = getattr(getattr(task, "config", None), "metadata", None)
    place = metadata.get("config_source") if isinstance(metadata, Mapping) else None  # lm-eval's; may be "inline"
    return _beside(name, place if isinstance(place, str) and place.endswith((".yaml", ".yml")) else None)


def _beside(name: str, path: str | Path | None) -> str:
    """A task's name, and its file if there is one that did not come with lm-eval."""
    import lm_eval

    return f"{name} ({path})" if path and Path(lm_eval.__file__).parent not in Path(path).parents else name


class _Reader(yaml.SafeLoader):
    """Reads a task file without running the functions that it names."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, OverflowError) as error:  # PyYAML lets Python's own through, without a place
            raise yaml.constructor.ConstructorError(
                None, None, f"{error}; quote it, if it is text", node.start_mark
            ) from error


_Reader.add_multi_constructor("!", lambda *_: None)


def _read(path: str) -> dict[str, Any]:
    """What a task file says.

    Raises:
        UserError: it is not YAML, or names no task.
    """
    said = Path(path).read_bytes()
    try:
        body = yaml.load(said, _Reader)
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply to be read; untangle it") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML ({_where(error)})") from error
    if not isinstance(body, dict) or not any(body.get(key) for key in ("task", "group", "include")):
        raise UserError(f"{path} names no task; see lm-eval's guide to new tasks")
    _check_names(path, body)
    return body


def _where(error: yaml.YAMLError) -> str:
    """What is wrong with a YAML file, and on which line."""
    mark, context = getattr(error, "problem_mark", None), getattr(error, "context", None)
    if mark is None:
        return first_line(error)
    said = f"{context}, {error.problem}" if context else error.problem
    return f"line {mark.line + 1}, column {mark.column + 1}: {said}"


def _check_registered(name: str, index: Mapping[str, Any]) -> None:
    """Refuse a name that is unknown, or one of a task that runs what a model writes, before its data is fetched."""
    if name not in index:
        near = did_you_mean(name, index)
        way = near if near.startswith("; did") else "; lm-eval ls tasks lists what it has"  # there are thousands
        raise UserError(f"{name!r} is neither a task of lm-eval nor a YAML file here{way}")
    configs = {task: index[task].cfg or {} for task in _leaves(name, index)}
    _refuse_unsafe(task for task, config in configs.items() if config.get("unsafe_code"))
    for task, config in configs.items():
        _check_config(_beside(task, index[task].yaml_path), config)


def _check_file(path: str, index: Mapping[str, Any]) -> None:
    """Refuse a task file over which lm-eval would stumble without saying why."""
    from lm_eval.tasks._yaml_loader import load_yaml  # with what it includes

    config = load_yaml(path, resolve_func=False)
    _check_names(path, config)
    if "group" not in config:
        _check_config(path, config)
        return
    members = config.get("task")
    for member in members if isinstance(members, list) else ():
        if isinstance(member, str) and member not in index:
            near = did_you_mean(member, index)
            way = near if near.startswith("; did") else "; put its file beside, or into an included folder"
            raise UserError(f"{path} names the task {member!r}, which is not there{way}")


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a task without data, or with a metric that has no known way to be averaged."""
    from lm_eval.api.metrics import mean  # noqa: F401 - fills the registry
    from lm_eval.api.registry import get_metric_aggregation

    if not any(config.get(key) for key in ("dataset_path", "custom_dataset", "class")):
        raise UserError(f"task {name} has no data; give it a dataset_path")
    for metric in config.get("metric_list") or ():
        given = metric.get("metric") if isinstance(metric, Mapping) else None
        if not isinstance(given, str) or "aggregation" in metric:
            continue
        known = given.rpartition(".")[2] if Path(given).is_absolute() else given  # lm-eval's place of a function
        if get_metric_aggregation(known) is None:
            raise _unknown("metric", known, name)


def _check_figures(name: str, task: Any) -> None:
    """Refuse a task with metrics or aggregations that were not found: lm-eval would leave their figures out."""
    config = getattr(task, "config", None)
    found = {"aggregation of": getattr(task, "_aggregation_list", {})}
    if getattr(config, "process_results", None) is None:  # else that is the metric
        found["metric"] = getattr(task, "_metric_fn_list", {})
    for kind, functions in found.items():
        if missing := [metric for metric, function in functions.items() if function is None]:
            raise _unknown(kind, missing[0], _label(name, task))


def _unknown(kind: str, metric: str, task: str) -> UserError:
    way = (
        "or give one of the evaluate library, which the Hub has, and its aggregation" if kind == "metric" else "as mean"
    )
    return UserError(
        f"the {kind} {metric!r} in the metric_list of task {task} is unknown to lm-eval; name one that it has, {way}"
    )


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
