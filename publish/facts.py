"""What is known of a result: by its config and headers, its kvfold.json, the README of its source, and a report on it.

All of these may have been anybody's: what they say is typed when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ..common.atomic import real_path
from ..common.errors import UserError
from ..common.raw_config import read_json, read_raw_config
from ..common.text import HUB
from ..convert.check import CheckReport, check
from ..convert.checkpoint import Checkpoint
from ..convert.demands import ENGINES
from ..convert.directory import RECORD, records
from ..convert.inspect import InspectReport, inspect_model
from ..eval.report.plain import plain
from ..eval.report.read import read_report
from ..eval.report.record import Report
from ..eval.report.runs import describe
from .commands import Line, Step, command_lines
from .licences import Head, read_head
from .words import HUB_ID, public_name

README = "README.md"
SOURCE_README = "README.source.md"


@dataclass(frozen=True)
class Cache:
    """What a model caches a token: elements in a layer, and bytes over all layers; None where that is not known."""

    attention_kind: str | None
    kv_elements_per_token_per_layer: int | None
    kv_bytes_per_token: int | None


@dataclass(frozen=True)
class Facts:
    """What is known of a result.

    Attributes:
        out: its directory.
        name: the last part of that.
        record: its kvfold.json.
        inspected: by config and headers.
        steps: of its history, oldest first.
        commands: that made it.
        base: id of the base model on the Hub, and its commit, if it came from there.
        source: name of what the first step was done to.
        source_cache: what that caches.
        readme: the source's README, by its name in `out`, if it came with one.
        head: what that says in its head.
        engines: what each says to the result, in the table's order.
        report: figures of it and others; None without.
        row: which of them it is.
        datasets: texts of the Hub that it was calibrated and trained on.
    """

    out: Path
    name: str
    record: Mapping[str, Any]
    inspected: InspectReport
    steps: tuple[Step, ...]
    commands: tuple[Line, ...]
    base: str | None
    base_revision: str | None
    source: str
    source_cache: Cache
    readme: str | None
    head: Head
    engines: tuple[CheckReport, ...]
    report: Report | None
    row: int | None
    datasets: tuple[str, ...]

    @property
    def is_plain(self) -> bool:
        """Whether it is in the form that kvfold alone reads."""
        return self.inspected.form == "plain"

    @property
    def read_by(self) -> tuple[CheckReport, ...]:
        return tuple(engine for engine in self.engines if engine.passed)

    @property
    def recipes(self) -> list[str]:
        """What was done, a line a step."""
        return [plain(describe(step.recipe)) for step in self.steps]


def gather(out: Path, *, base_model: str | None = None, report: Path | None = None) -> Facts:
    """Find out what is known of a result.

    Args:
        out: a checkpoint that kvfold wrote.
        base_model: id of its base model on the Hub, where kvfold.json does not say it.
        report: folder of a report with a row of it.

    Raises:
        UserError: it is none, or `report` is not about it, or either is broken.
    """
    record = read_record(out)
    read_raw_config(out)
    Checkpoint.open(out)
    if base_model is not None and not HUB_ID.fullmatch(base_model):
        raise UserError(f"--base-model {base_model} is no id of the Hub; write OWNER/NAME, or leave it out")
    steps = history(record, out / RECORD)
    first = steps[0]
    on_hub = bool(first.revision) and bool(HUB_ID.fullmatch(first.source))
    base = base_model or (first.source if on_hub else None)
    inspected = inspect_model(out)
    name = real_path(out).name
    figures = None if report is None else read_report(report)
    readme = _readme_of(out, record)
    return Facts(
        out=out,
        name=name,
        record=record,
        inspected=inspected,
        steps=steps,
        commands=tuple(command_lines(steps, name, base)),
        base=base,
        base_revision=first.revision if on_hub and base == first.source else None,
        source=public_name(first.source, {base} if base else ()),
        source_cache=_source_cache(record, inspected, figures),
        readme=readme,
        head=read_head((out / readme).read_bytes()) if readme else Head(),
        engines=tuple(check(out, engine=engine) for engine in ENGINES),
        report=figures,
        row=None if figures is None or report is None else find_row(figures, report, out, inspected, steps),
        datasets=_datasets(steps),
    )


def read_record(out: Path) -> dict[str, Any]:
    """The kvfold.json of a result.

    Raises:
        UserError: there is none, or it is broken.
    """
    if not out.is_dir():
        raise UserError(f"{out} is no directory; give the one that kvfold convert or kvfold uptrain wrote")
    if not (out / RECORD).is_file():
        raise UserError(
            f"{out} has no {RECORD}, which says how it was made and what its files are; only what kvfold wrote can be "
            "published: convert its source again"
        )
    record = read_json(out / RECORD, "record of a conversion")
    files = record.get("files")
    if not isinstance(files, dict) or not all(isinstance(row, dict) for row in files.values()):
        raise UserError(f"{out / RECORD} lists no files; convert the source again")
    return record


def history(record: Mapping[str, Any], path: Path) -> tuple[Step, ...]:
    """The records of a result and of what it was made from, oldest first.

    Raises:
        UserError: they are broken.
    """
    found: list[Step] = []
    for at in records(record):
        recipe, source, versions = (_table(at, name) for name in ("recipe", "source", "versions"))
        asked = at.get("asked")
        if not recipe:
            raise UserError(f"{path} does not say how the model was made; convert the source again")
        found.append(
            Step(
                recipe=recipe,
                asked=asked if isinstance(asked, Mapping) else None,
                source=plain(_text(source.get("name")) or "the source"),
                revision=_text(source.get("revision")),
                kvfold=plain(_text(versions.get("kvfold")) or "unknown"),
            )
        )
    return tuple(found[::-1])


def _table(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _source_cache(record: Mapping[str, Any], inspected: InspectReport, report: Report | None) -> Cache:
    """By the oldest record that says it, else by a report, else by what an export says of its source."""
    oldest = [*records(record)][-1]
    if found := _table(_table(oldest, "source"), "cache"):
        return Cache(
            plain(_text(found.get("attention_kind")) or "") or None,
            _count(found.get("kv_elements_per_token_per_layer")),
            _count(found.get("kv_bytes_per_token")),
        )
    if report is not None:
        row = report.source
        return Cache(row.attention_kind, row.kv_elements_per_token_per_layer, row.kv_bytes_per_token)
    return Cache(None, inspected.source_kv_elements_per_token_per_layer, None)


def _readme_of(out: Path, record: Mapping[str, Any]) -> str | None:
    """Which file is the source's README: a result that was published before has a card of its own beside it."""
    return next((name for name in (README, SOURCE_README) if name in record["files"] and (out / name).is_file()), None)


def _datasets(steps: Sequence[Step]) -> tuple[str, ...]:
    """Ids of the datasets on the Hub that a result was calibrated, refined and trained on."""
    texts: list[Any] = []
    for step in steps:
        calibration, refine = _table(step.recipe, "calibration"), _table(step.recipe, "refine")
        data = step.recipe.get("data")
        texts += [*_table(calibration, "kinds"), *_table(refine, "kinds"), *(data if isinstance(data, list) else [])]
    ids = (text[len(HUB) :].partition(":")[0] for text in texts if isinstance(text, str) and text.startswith(HUB))
    return tuple(dict.fromkeys(one for one in ids if HUB_ID.fullmatch(one)))


def find_row(report: Report, folder: Path, out: Path, inspected: InspectReport, steps: Sequence[Step]) -> int:
    """Which row of a report is about a result: the one whose path leads to it; else, where all was moved, of its name.

    Raises:
        UserError: none is, or what it says is of another state of that model.
    """
    rows = list(enumerate(report.results))[1:]
    target = real_path(out)
    found = [place for place, row in rows if _leads_to(row.model, target)]
    found = found or [place for place, row in rows if PurePath(row.model).name == target.name]
    if len(found) != 1:
        named = ", ".join(PurePath(row.model).name for _, row in rows) or "nothing"
        how = "more than once" if found else f"not (it is about {named})"
        raise UserError(f"the report in {folder} is about {out.name} {how}; make one with kvfold report SRC {out}")
    row = report.results[found[0]]
    ours, theirs = inspected.kv_elements_per_token_per_layer, row.kv_elements_per_token_per_layer
    if ours != theirs:
        raise UserError(
            f"the report in {folder} is about a model that caches {theirs} elements a token and layer, and {out} "
            f"caches {ours}; make it again with kvfold report"
        )
    made_by = [plain(describe(step.recipe)) for step in steps]
    if row.made_by != made_by:
        raise UserError(
            f"the report in {folder} is about a model that was made in another way than {out} "
            f"({row.made_by[-1] if row.made_by else 'unknown'}); make it again with kvfold report"
        )
    return found[0]


def _leads_to(name: str, target: Path) -> bool:
    try:
        return real_path(Path(name)) == target
    except (OSError, ValueError):
        return False
