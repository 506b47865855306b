"""The commands that a recipe stands for, stage by stage, as a user would type them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...uptrain.recipe import SOURCE
from .read import Pipeline

STAGES = ("calibrate", "convert", "uptrain", "eval", "tasks", "report", "publish")

RECIPE = "recipe.yaml"
STATISTICS, CONVERTED, HEALED, REPORT = "stats.safetensors", "converted", "healed", "report"
RUN_SUFFIX = ".run"  # of the folder that an uptraining works in, beside what it writes

# What changes no result, or none but by rounding: where and in which pieces it is computed, and what is allowed.
_BESIDE = frozenset({"device", "batch_size", "calib_batch_size", "offload", "no_hash", "overwrite", "accept_license"})
_WITH_COMMAS = frozenset({"for"})  # the one option that lists its values
_TEXTS = ("calib", "calib_window", "no_calib_builtin", "chat")  # which text, of calibration and refinement
_SCORING = ("text", "window", "max_windows", "batch_size", "max_ratio", "dtype", "device")


@dataclass(frozen=True)
class Work:
    """One command of a run.

    Attributes:
        name: of the step; one for each command.
        stage: of `STAGES`.
        words: what stands behind `kvfold`, but for `--json`.
        overwrite: the word that lets it replace what it made before.
        settings: what its result depends on, besides what it reads.
        reads: models and files, by what to call them.
        makes: the file or the folder that it creates; None if what it prints is all.
        works_in: where it keeps what it goes on from.
        costly: whether what it makes is made anew only if the user says so.
    """

    name: str
    stage: str
    words: tuple[str, ...]
    overwrite: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    reads: dict[str, str] = field(default_factory=dict)
    makes: Path | None = None
    works_in: Path | None = None
    costly: bool = False

    @property
    def line(self) -> str:
        """As it stands in a shell."""
        return shlex.join(["kvfold", *self.words])


@dataclass(frozen=True)
class Place:
    """Where a pipeline finds and puts things.

    Attributes:
        folder: of the run.
        source: what it begins with, as a command takes it.
        commit: of a Hub id, which no branch moves.
    """

    folder: Path
    source: str
    commit: str | None

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def revision(self) -> list[str]:
        return ["--revision", self.commit] if self.commit else []


def works(pipeline: Pipeline, place: Place) -> list[Work]:
    """The commands of a recipe, in their order."""
    return [work for stage in STAGES for work in _MAKERS[stage](pipeline, place)]


def flags(values: Mapping[str, Any]) -> list[str]:
    """Values of a section as words of a command line."""
    words: list[str] = []
    for key, value in values.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] * value
        elif key in _WITH_COMMAS:
            words += [flag, ",".join(value)]
        else:
            for one in value if isinstance(value, tuple) else (value,):
                words += [flag, str(one)]
    return words


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a result depends on, as JSON has them."""
    return json.loads(json.dumps({key: value for key, value in values.items() if key not in _BESIDE}))


def _reads(place: Place, *names: str, texts: Iterable[str] = ()) -> dict[str, str]:
    """What a command reads of the run, and the texts that are files."""
    models = {SOURCE: place.source} if SOURCE in names else {}
    made = {name: place / name for name in names if name != SOURCE}
    return models | made | {text: text for text in texts if Path(text).is_file()}


def _final(pipeline: Pipeline) -> str:
    return HEALED if "uptrain" in pipeline.sections else CONVERTED


def _calibrate(pipeline: Pipeline, place: Place) -> list[Work]:
    if (section := pipeline.sections.get("calibrate")) is None:
        return []
    return [
        Work(
            "calibrate",
            "calibrate",
            ("calibrate", place.source, "-o", place / STATISTICS, *place.revision, *flags(section)),
            overwrite="--overwrite",
            settings=_settings(section),
            reads=_reads(place, SOURCE, texts=section.get("calib", ())),
            makes=place.folder / STATISTICS,
            costly=True,
        )
    ]


def conversion(pipeline: Pipeline) -> dict[str, Any]:
    """The flags of the conversion; refinement reads text too, and means that of the calibration."""
    section, calibrate = pipeline.sections["convert"], pipeline.sections.get("calibrate", {})
    texts = {key: value for key, value in calibrate.items() if key in _TEXTS and section.get("refine")}
    return {key: value for key, value in section.items() if key != "to"} | texts


def _convert(pipeline: Pipeline, place: Place) -> list[Work]:
    section, knobs = pipeline.sections["convert"], conversion(pipeline)
    calibrated = "calibrate" in pipeline.sections
    return [
        Work(
            "convert",
            "convert",
            (
                *("convert", section["to"], place.source, place / CONVERTED, *place.revision, *flags(knobs)),
                *(("--stats", place / STATISTICS) if calibrated else ()),
            ),
            overwrite="--overwrite",
            settings=_settings(section | knobs),
            reads=_reads(
                place,
                SOURCE,
                *[STATISTICS] * calibrated,
                texts=[*knobs.get("calib", ()), *([section["stats"]] if "stats" in section else [])],
            ),
            makes=place.folder / CONVERTED,
            costly=True,
        )
    ]


def _uptrain(pipeline: Pipeline, place: Place) -> list[Work]:
    if "uptrain" not in pipeline.sections:
        return []
    model, out = place / CONVERTED, place / HEALED
    recipe = pipeline.uptraining(model, out)
    taught = [SOURCE] if recipe.teacher == pipeline.model else []
    others = {"teacher": recipe.teacher} if recipe.teacher and not taught and Path(recipe.teacher).exists() else {}
    by_content = {"model", "revision", *(("teacher", "teacher_revision") if taught or others else ())}
    settings = {key: value for key, value in recipe.identity().items() if key not in by_content}
    return [
        Work(
            "uptrain",
            "uptrain",
            ("uptrain", place / RECIPE, f"model={model}", f"out={out}", f"run_dir={out}{RUN_SUFFIX}"),
            overwrite="--overwrite",
            settings=_settings(settings),
            reads=_reads(place, CONVERTED, *taught, texts=recipe.data) | others,
            makes=place.folder / HEALED,
            works_in=place.folder / f"{HEALED}{RUN_SUFFIX}",
            costly=True,
        )
    ]


def _eval(pipeline: Pipeline, place: Place) -> list[Work]:
    if (section := pipeline.sections.get("eval")) is None:
        return []
    final = _final(pipeline)
    return [
        Work(
            "eval",
            "eval",
            ("verify", place.source, place / final, *place.revision, *flags(section)),
            settings=_settings(section),
            reads=_reads(place, SOURCE, final, texts=section["text"]),
        )
    ]


def _tasks(pipeline: Pipeline, place: Place) -> list[Work]:
    if (section := pipeline.sections.get("tasks")) is None:
        return []
    final = _final(pipeline)
    judged = ((f"tasks-{SOURCE}", place.source, SOURCE, place.revision), ("tasks", place / final, final, []))
    return [
        Work(
            name,
            "tasks",
            ("eval", "tasks", model, *revision, *flags(section)),
            settings=_settings(section),
            reads=_reads(place, read, texts=section["task"]),
        )
        for name, model, read, revision in judged
    ]


def _report(pipeline: Pipeline, place: Place) -> list[Work]:
    if not {"eval", "report"} & pipeline.sections.keys():
        return []
    scoring = {key: value for key, value in pipeline.sections.get("eval", {}).items() if key in _SCORING}
    section = {"title": pipeline.name, **scoring, **pipeline.sections.get("report", {})}
    results = list(dict.fromkeys((CONVERTED, _final(pipeline))))
    return [
        Work(
            "report",
            "report",
            (
                *("report", place.source, *(place / result for result in results), "-o", place / REPORT),
                *(*place.revision, *flags(section)),
            ),
            overwrite="--overwrite",
            settings=_settings(section),
            reads=_reads(place, SOURCE, *results, texts=section.get("text", ())),
            makes=place.folder / REPORT,
        )
    ]


def _publish(pipeline: Pipeline, place: Place) -> list[Work]:
    section = pipeline.sections.get("publish", {})
    if not section.get("repo_id"):
        return []
    final = _final(pipeline)
    knobs = {key: value for key, value in section.items() if key != "repo_id"}
    shown = _report(pipeline, place)
    return [
        Work(
            "publish",
            "publish",
            (
                *("publish", place / final, section["repo_id"], "--recipe", place / RECIPE),
                *(("--report", place / REPORT) if shown else ()),
                *flags(knobs),
            ),
            settings=_settings(section),
            reads=_reads(place, final, *[REPORT] * bool(shown)),
        )
    ]


_MAKERS: Mapping[str, Callable[[Pipeline, Place], list[Work]]] = {
    "calibrate": _calibrate,
    "convert": _convert,
    "uptrain": _uptrain,
    "eval": _eval,
    "tasks": _tasks,
    "report": _report,
    "publish": _publish,
}
