"""Run the stages of a recipe one after the other, each in a process of its own, and go on where a run was stopped.

A step is done if what it made is there, made with the same settings of inputs of the same content. What took long is
made anew only if the user says so.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...common.atomic import output_file, real_path, working_folder
from ...common.errors import CheckFailed, EnvironmentFailure, KvfoldError, UserError, did_you_mean
from ...common.launcher import Command, launch, wait_for_orphan
from ...common.sources import one_line_errors, quiet, source_kind
from ...common.status import Stopped
from ...convert.source import check_source
from ...eval.report.write import PAGE
from ...uptrain.launch import spread
from ...uptrain.recipe import SOURCE
from .read import Pipeline, read_pipeline
from .record import Record, Step
from .stages import CONVERTED, HEALED, RECIPE, REPORT, STAGES, Place, Work, conversion, flags, works

STEPS = "steps"  # the folder of what the commands printed
_SHORT_OF_MEMORY = "lower a batch size, or set calibrate.offload or uptrain.gradient_checkpointing"
_PATIENCE = 120.0  # seconds for what a killed run had started: torchrun gives as many to save
_GO_ON = "the same command goes on from there"
_FAILURES: dict[int, type[KvfoldError]] = {1: CheckFailed, 2: UserError, 3: EnvironmentFailure}


@dataclass(frozen=True)
class StepReport:
    """What became of one step.

    Attributes:
        step, stage: its name, and the stage that it is of.
        state: `done` now, `done before`, or `to do`, of a dry run.
        seconds: of all attempts.
        command: as a user would type it.
        result: the file of what it printed; empty if it is not there.
    """

    step: str
    stage: str
    state: Literal["done", "done before", "to do"]
    seconds: float
    command: str
    result: str


@dataclass(frozen=True)
class RunReport:
    """What became of a run.

    Attributes:
        recipe: its name.
        model: what it began with.
        folder: where everything is.
        seconds: of all steps and attempts, whenever that was.
        perplexity_ratio: of the final result and the source, as `eval` found it; None without.
        page: of the report; empty without.
        results: of the steps, in order.
        notes: what the recipe could do besides, and was not asked for.
    """

    recipe: str
    model: str
    folder: str
    dry_run: bool
    seconds: float
    perplexity_ratio: float | None
    page: str
    results: list[StepReport]
    notes: list[str]


def run_recipe(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    until: str | None = None,
    from_: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> RunReport:
    """Run a recipe from what it converts to what it publishes; one that was stopped goes on.

    Args:
        recipe: the name of one that comes with kvfold, or a YAML file.
        overrides: ``section.key=value``.
        out: the folder of the run; by default the recipe's name, here.
        until: the last stage to run.
        from_: the first stage to look at: what those before it made is taken as it is.
        overwrite: make anew what was made with other settings, or has been changed since.
        dry_run: only say what would be done.
        say: told what is going on, line by line.

    Raises:
        UserError: the recipe is wrong, or would replace what it may not; or a step's input is wrong.
        CheckFailed: a step's check said no.
        EnvironmentFailure: the machine failed, or the Hub cannot be reached.
        Stopped: by a signal.
    """
    pipeline = read_pipeline(recipe, overrides)
    folder = Path(out or pipeline.name).absolute()  # what an uptraining goes on from knows its model by its path
    _check_stages(pipeline, folder, until, from_)
    if dry_run:
        return _Run(pipeline, Record.open(folder, pipeline.name), overwrite=overwrite, say=say).rehearse(until, from_)
    with working_folder(folder):
        record = Record.open(folder, pipeline.name)
        if not record.steps and (inside := sorted(path.name for path in folder.iterdir())):
            raise UserError(f"{folder} holds {inside[0]} and no run; name another folder with -o")
        return _Run(pipeline, record, overwrite=overwrite, say=say).go(until, from_)


def _check_stages(pipeline: Pipeline, folder: Path, until: str | None, from_: str | None) -> None:
    """Refuse a stage that there is not, before a folder is made."""
    there = list(dict.fromkeys(work.stage for work in works(pipeline, Place(folder, pipeline.model, None))))
    for flag, stage in (("--until", until), ("--from", from_)):
        if stage is not None and stage not in there:
            if stage == "publish":
                raise UserError(f"{flag} publish needs to know where to; say publish.repo_id=NAME/REPOSITORY")
            raise UserError(f"{flag}: the recipe has no stage {stage!r}{did_you_mean(stage, there)}")
    if until and from_ and STAGES.index(until) < STAGES.index(from_):
        raise UserError(f"--until {until} comes before --from {from_}; turn them round")
    if check_source(pipeline.model, pipeline.revision) == "folder" and real_path(Path(pipeline.model)).is_relative_to(
        real_path(folder)
    ):
        raise UserError(f"the source {pipeline.model} lies in the folder of the run, {folder}; name another with -o")


class _Run:
    """One run: the commands of a recipe, and what is known of them."""

    def __init__(self, pipeline: Pipeline, record: Record, *, overwrite: bool, say: Callable[[str], None]) -> None:
        self.record, self.overwrite, self.say = record, overwrite, say
        commit = self._commit(pipeline.model, pipeline.revision)
        if commit:
            pinned = {**pipeline.sections[SOURCE], "revision": commit}
            pipeline = replace(pipeline, sections={**pipeline.sections, SOURCE: pinned})
        self.pipeline = pipeline
        self.place = Place(record.folder, pipeline.model, commit)
        self.works = works(pipeline, self.place)

    def go(self, until: str | None, from_: str | None) -> RunReport:
        """Do what is not done."""
        todo = self._between(until, from_)
        self._check_taken(from_)
        for work in todo:  # before anything is done: not after hours of what goes before
            self._check_replacing(work, known_inputs=False)
        self._foresee({work.stage for work in todo})
        write_recipe(self.pipeline, self.record.folder / RECIPE)
        reports = []
        for number, work in enumerate(todo, 1):
            asked = self._asked(work)
            before = self._done(work, asked)
            if before:
                self.say(f"{work.name} ({number} of {len(todo)}) was done before")
            else:
                self.say(f"{work.name} ({number} of {len(todo)}): {work.line}")
                self._look_again(work, asked)
                self._do(work, asked)
            reports.append(self._report(work, "done before" if before else "done"))
        self.record.save()  # with what was found to be done, and the hashes that told
        return self._sum(reports, dry_run=False)

    def rehearse(self, until: str | None, from_: str | None) -> RunReport:
        """Say what would be done; after the first step that would be, nothing is known of the inputs of the others."""
        self._check_taken(from_)
        reports, known = [], True
        for work in self._between(until, from_):
            known = known and self._done(work, self._asked(work))
            reports.append(self._report(work, "done before" if known else "to do"))
        return self._sum(reports, dry_run=True)

    def _between(self, until: str | None, from_: str | None) -> list[Work]:
        first, last = STAGES.index(from_ or STAGES[0]), STAGES.index(until or STAGES[-1])
        return [work for work in self.works if first <= STAGES.index(work.stage) <= last]

    def _check_taken(self, from_: str | None) -> None:
        """Refuse to take up what stages before the first have not made."""
        first = STAGES.index(from_ or STAGES[0])
        before = [work for work in self.works if STAGES.index(work.stage) < first]
        read = {path for work in self.works if work not in before for path in work.reads.values()}
        for work in before:
            if str(work.makes) in read and not work.makes.exists():
                raise UserError(
                    f"--from {from_} takes what {work.stage} made, and there is no {work.makes}; leave --from out"
                )
            # The recipe that is kept, and published, says how its results were made.
            step = self.record.steps.get(work.name)
            if step and work.costly and (changed := _difference(step.asked, {**step.asked, "settings": work.settings})):
                raise UserError(
                    f"--from {from_} takes what {work.stage} made, and that was made otherwise: {changed}; say it "
                    "as it was, or leave --from out"
                )

    def _foresee(self, stages: Collection[str]) -> None:
        """Refuse to begin what could not be trained here, or not be published in the end.

        Raises:
            UserError: says why.
        """
        from ...publish.publish import foresee

        if "calibrate" in stages and "calibrate" not in self.record.steps:
            self._rehearse_conversion()
        trained = self.record.steps.get("uptrain")
        if "uptrain" in stages and (trained is None or trained.state != "done"):
            spread(self.pipeline.uptraining(self.place / CONVERTED, self.place / HEALED))
        if "publish" in stages:
            source, commit = self.pipeline.model, self.place.commit
            kind = source_kind(source, commit)
            foresee(source, kind=kind, source_revision=commit, **self.pipeline.sections["publish"])

    def _rehearse_conversion(self) -> None:
        """Have the conversion look at its source, before that is calibrated for long."""
        work = next(work for work in self.works if work.stage == "convert")
        words = [*work.words[:4], *self.place.revision, *flags(conversion(self.pipeline)), "--dry-run", "--json"]
        with tempfile.TemporaryFile() as nowhere:
            self._refuse(work, self._launch(work, words, stdout=nowhere))

    def _commit(self, model: str, revision: str | None) -> str | None:
        """The commit of a Hub id, the first time that a run asks; None for a path."""
        if source_kind(model, revision) != "hub":
            return None
        name = f"{model}@{revision or 'main'}"
        if name not in self.record.commits:
            from huggingface_hub import hf_hub_download

            with one_line_errors(model), quiet():
                config = Path(hf_hub_download(model, "config.json", revision=revision))
            self.record.commits[name] = config.parent.name  # the Hub cache names a snapshot by its commit
        return self.record.commits[name]

    def _look_again(self, work: Work, asked: dict[str, Any]) -> None:
        """Refuse to go on from what has changed and kept its time. A step reads its inputs whole, so this costs little.

        Raises:
            UserError: an input has.
        """
        if changed := _difference(asked, self._asked(work, anew=True)):
            self.record.save()  # so that what made it is found to be changed
            raise UserError(
                f"{work.stage}: {changed}, and kept its time, as when a disk turns a bit over; --overwrite makes anew "
                "what this run has made"
            )

    def _asked(self, work: Work, *, anew: bool = False) -> dict[str, Any]:
        """What the result of a step is a function of; for `anew` see `Record.content`."""
        inputs = {name: self._content(path, anew=anew) for name, path in work.reads.items()}
        return {"settings": work.settings, "inputs": inputs}

    def _content(self, path: str, *, anew: bool = False) -> str:
        commit = self.place.commit if path == self.place.source else None
        return f"{path}@{commit}" if commit else self.record.content(Path(path), anew=anew)

    def _done(self, work: Work, asked: dict[str, Any]) -> bool:
        """Whether a step is done, and may be left alone.

        Raises:
            UserError: it would have to be made anew, and may not.
        """
        step = self.record.steps.get(work.name)
        if step is not None and step.state == "running":
            wait_for_orphan(step.process, "kvfold", _PATIENCE)
        if step is not None and not _difference(step.asked, asked):
            found = self._made(work)
            if step.state == "done" and found == step.made:
                return True
            if step.state == "running" and work.makes and found not in ("", step.replaced):
                step.state, step.made = "done", found  # killed before that was written down
                return True
        self._check_replacing(work)
        return False

    def _check_replacing(self, work: Work, *, known_inputs: bool = True) -> None:
        """Refuse to make anew what took long and was asked for otherwise, what was changed, and what is another's.

        Args:
            known_inputs: whether what it reads is there already.

        Raises:
            UserError: says what is in the way.
        """
        step, found = self.record.steps.get(work.name), self._made(work)
        if step is None:
            if found and work.makes:
                raise UserError(f"{work.makes} stands where {work.stage} writes, and is not of this run; move it away")
            return
        if self.overwrite:
            return
        if work.makes and found and step.state == "done" and found != step.made:
            raise UserError(f"{work.makes} was changed after {work.stage} had made it; --overwrite makes it anew")
        now = self._asked(work) if known_inputs else {**step.asked, "settings": work.settings}
        changed = _difference(step.asked, now)
        begun = found or (work.works_in is not None and work.works_in.exists())
        if changed and begun and work.costly:
            raise UserError(
                f"{work.stage} was begun or done otherwise: {changed}; --overwrite makes it anew, or take another -o"
            )

    def _made(self, work: Work) -> str:
        """The content of what a step made; of one that makes nothing, of what it printed."""
        return self.record.content(work.makes or self._printed(work))

    def _printed(self, work: Work) -> Path:
        return self.record.folder / STEPS / f"{work.name}.json"

    def _do(self, work: Work, asked: dict[str, Any]) -> None:
        """Run the command of a step until it is done.

        Raises:
            KvfoldError, Stopped: it was not.
        """
        before = self.record.steps.get(work.name)
        found = self._made(work)
        if before is not None and _difference(before.asked, asked):
            before = None
            if work.works_in:  # of another training, that is not to be gone on with
                _remove(work.works_in)
        if before is None:
            before = Step(work.stage, "running", work.line, asked)
        step = replace(
            before, state="running", command=work.line, replaced=found, attempts=before.attempts + 1, status=0
        )
        self.record.steps[work.name] = step
        self.record.save()
        began = time.monotonic()
        try:
            self._start(work, step, overwrite=bool(found))
            step.state, step.made = "done", self._made(work)
        except KvfoldError as error:
            step.state, step.status = "failed", error.exit_status
            raise
        finally:
            step.seconds = round(step.seconds + time.monotonic() - began, 3)
            self.record.save()

    def _start(self, work: Work, step: Step, *, overwrite: bool) -> None:
        def started(process: int) -> None:
            step.process = process
            self.record.save()

        words = (*work.words, *([work.overwrite] if overwrite and work.overwrite else []), "--json")
        with output_file(self._printed(work), overwrite=True) as file:
            status = self._launch(work, words, stdout=file, started=started)
            if status != CheckFailed.exit_status:  # which comes with figures
                self._refuse(work, status)
        self._refuse(work, status)

    def _launch(self, work: Work, words: Sequence[str], **streams: Any) -> int:
        """Run kvfold with these words in a process of its own, and return its status."""
        command = Command((sys.executable, "-m", "kvfold.cli", *words), dict(os.environ))
        status = launch(command, short_of_memory=_SHORT_OF_MEMORY, **streams)
        if status > 128:
            raise Stopped(status - 128, f"{work.name} is not done, and {_GO_ON}")
        return status

    def _refuse(self, work: Work, status: int) -> None:
        """Raise what a status stands for, if it is not 0; what was wrong, the command has said itself."""
        if status:
            kind, way_out = _FAILURES.get(status, KvfoldError), f"once that is mended, {_GO_ON}"
            if kind is CheckFailed:
                way_out = f"heal it longer (uptrain.steps or tokens, --overwrite), or raise {work.stage}.max_ratio"
            raise kind(f"{work.stage} ended with status {status}, as said above; {way_out}")

    def _report(self, work: Work, state: Literal["done", "done before", "to do"]) -> StepReport:
        step, printed = self.record.steps.get(work.name), self._printed(work)
        return StepReport(
            work.name,
            work.stage,
            state,
            step.seconds if step else 0.0,
            work.line,
            str(printed) if printed.exists() and state != "to do" else "",
        )

    def _ratio(self) -> float | None:
        try:
            return _number(json.loads((self.record.folder / STEPS / "eval.json").read_bytes()).get("perplexity_ratio"))
        except (OSError, ValueError, AttributeError):
            return None

    def _sum(self, reports: list[StepReport], *, dry_run: bool) -> RunReport:
        notes, page = [], self.record.folder / REPORT / PAGE
        if "publish" in self.pipeline.sections and not self.pipeline.sections["publish"].get("repo_id"):
            notes.append("nothing is published; publish.repo_id=NAME/REPOSITORY does that")
        return RunReport(
            recipe=self.pipeline.name,
            perplexity_ratio=None if dry_run else self._ratio(),
            page=str(page) if not dry_run and page.exists() else "",
            model=self.pipeline.model,
            folder=str(self.record.folder),
            dry_run=dry_run,
            seconds=sum(report.seconds for report in reports),
            results=reports,
            notes=notes,
        )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def write_recipe(pipeline: Pipeline, path: Path) -> None:
    """Write a recipe with everything that was said on the command line in its place, unless it stands there."""
    import yaml

    with suppress(UserError):
        if path.exists() and read_pipeline(path).sections == pipeline.sections:
            return
    plain = {
        section: {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        for section, values in pipeline.sections.items()
    }
    body = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    with output_file(path, overwrite=True) as file:
        file.write(f"{pipeline.head}\n{body}".lstrip("\n").encode())


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first thing that differs between what was asked for before and now, in words; empty if nothing does."""
    for kind, say in (("settings", "{name} was {before} and is {now}"), ("inputs", "its input {name} is another now")):
        was, then = before.get(kind, {}), now.get(kind, {})
        for name in sorted(was.keys() | then.keys()):
            if was.get(name) != then.get(name):
                return say.format(name=name, before=was.get(name), now=then.get(name))
    return ""


def _remove(folder: Path) -> None:
    import shutil

    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
