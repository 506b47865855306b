"""Conversions and uptrainings in processes of their own, with what each took; what was made before is used again.

A result is used again if the same code made it of the same model in the same way. An uptraining that was stopped in
between is gone on with.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import CheckFailed, UserError
from ..convert.source import open_source

CONVERTING = ("attention", "common", "convert")
UPTRAINING = (*CONVERTING, "uptrain")
JUDGING = ("attention", "common", "eval")
_POLL = 0.1  # seconds


@dataclass(frozen=True)
class Made:
    """A result, and what it took: seconds and peak resident bytes of the process that made it.

    Of an uptraining that was stopped and gone on with, both are those of the last process.
    """

    folder: Path
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Job:
    """A command of kvfold that writes a checkpoint.

    Attributes:
        out: the checkpoint.
        arguments: of python.
        asked: what the result is a function of, as JSON has it.
        work: a folder to go on from if `asked` is the same, and to throw away if not.
        log: a file for what the command says; None to let it speak.
    """

    out: Path
    arguments: tuple[str, ...]
    asked: dict[str, Any]
    work: Path | None = None
    log: Path | None = None

    @property
    def note(self) -> Path:
        """Says what was asked for when the job began, and what it took when it is done."""
        return self.out.with_name(f"{self.out.name}.made.json")

    def found(self) -> Made | None:
        """What was made before."""
        said = _read(self.note)
        if said.get("asked") != self.asked or "seconds" not in said or not self.out.exists():
            return None
        return Made(self.out, said["seconds"], said["peak_bytes"])

    def start(self, threads: int | None) -> subprocess.Popen[bytes]:
        if self.work and _read(self.note).get("asked") != self.asked:
            shutil.rmtree(self.work, ignore_errors=True)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.note.write_text(json.dumps({"asked": self.asked}))
        environment = {**os.environ} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        command = [sys.executable, *self.arguments]
        if not self.log:
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment)

    def finish(self, status: int, seconds: float, peak_bytes: int) -> Made:
        """Write down what it took.

        Raises:
            CheckFailed: the command failed.
        """
        if status:
            lines = self.log.read_text(errors="replace").split("\n") if self.log else []
            said = next((f": {line}" for line in reversed(lines) if line.strip()), "")
            raise CheckFailed(f"python {' '.join(self.arguments)} ended with status {status}{said}")
        self.note.write_text(json.dumps({"asked": self.asked, "seconds": seconds, "peak_bytes": peak_bytes}))
        return Made(self.out, seconds, peak_bytes)


def conversion(source: Path, out: Path, options: Mapping[str, str], to: str = "gqa") -> Job:
    """`kvfold convert`.

    Args:
        options: flags and their values.
        to: what to convert to, a sub-command.
    """
    flags = [part for option in options.items() for part in option]
    arguments = ("-m", "kvfold.cli", "convert", to, str(source), str(out), "--overwrite", *flags)
    return Job(out, arguments, {"to": to, "options": dict(options), "code": code_digest(CONVERTING)})


def uptraining(model: Path, out: Path, values: Mapping[str, Any]) -> Job:
    """`python -m kvfold.uptrain` on one process.

    Args:
        model: a checkpoint that is there.
        values: the rest of the recipe.
    """
    recipe = {"model": str(model), "out": str(out), "run_dir": str(run_folder(out)), "overwrite": True, **values}
    with open_source(str(model)) as source:
        asked = {"recipe": recipe, "model": source.digest(), "code": code_digest(UPTRAINING)}
    pairs = tuple(f"{key}={json.dumps(value)}" for key, value in recipe.items())
    log = out.with_name(f"{out.name}.log")
    return Job(out, ("-m", "kvfold.uptrain", *pairs), asked, work=run_folder(out), log=log)


def run_folder(out: Path) -> Path:
    """Where an uptraining keeps its metrics."""
    return out.with_name(f"{out.name}.run")


def run_jobs(jobs: Iterable[Job], at_once: int = 1) -> list[Made]:
    """Do what is not done yet.

    Args:
        at_once: so many processes; more than one share the cores evenly. Small models gain more from a second process
            than from a second thread.

    Raises:
        UserError: `at_once` is no number of processes.
        CheckFailed: a command failed. What is done is kept, and what is running is asked to stop.
    """
    if at_once < 1:
        raise UserError(f"{at_once} at once never come to an end; give at least 1")
    jobs = list(jobs)
    made = {job.out: found for job in jobs if (found := job.found())}
    waiting = [job for job in jobs if job.out not in made]
    running: list[tuple[Job, subprocess.Popen[bytes], float]] = []
    threads = max(1, _cores() // at_once) if at_once > 1 else None
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running.append((job, job.start(threads), time.perf_counter()))
            for entry in list(running):
                job, process, start = entry
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                if not ended:
                    continue
                running.remove(entry)
                process.returncode = os.waitstatus_to_exitcode(status)
                seconds = time.perf_counter() - start
                made[job.out] = job.finish(process.returncode, seconds, usage.ru_maxrss * 1024)
                if job.log:
                    print(f"{job.out.name}: {seconds:.0f} s", file=sys.stderr, flush=True)
            time.sleep(_POLL if running else 0)
    finally:  # an uptraining saves where it is
        for _, process, _ in running:
            process.terminate()
        for _, process, _ in running:
            process.wait()
    return [made[job.out] for job in jobs]


def timed_convert(source: Path, out: Path, options: Mapping[str, str], to: str = "gqa") -> Made:
    """Run `kvfold convert`, or find what the same code made before with the same options.

    Args:
        options: flags and their values.
        to: what to convert to, a sub-command.

    Raises:
        CheckFailed: the command failed; it has said why.
    """
    return run_jobs([conversion(source, out, options, to)])[0]


def remembered(path: Path, asked: dict[str, Any], find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `find` finds, or found before and left at `path` when the same was asked for; both as JSON has it."""
    said = _read(path)
    if said.get("asked") != asked:
        said = {"asked": asked, "found": find()}
        path.write_text(json.dumps(said))
    return said["found"]


def code_digest(folders: Sequence[str]) -> str:
    """A hash of the code in some folders of the package."""
    package = Path(__file__).parents[1]
    paths = sorted(path for folder in folders for path in (package / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    """A note; empty if there is none, or its writer was killed over it."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
