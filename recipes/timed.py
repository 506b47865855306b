"""Conversions in processes of their own, with what each took; what was made before is used again."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import CheckFailed


@dataclass(frozen=True)
class Made:
    """A result, and what it took: seconds and peak resident bytes of the process that made it."""

    folder: Path
    seconds: float
    peak_bytes: int


def timed_convert(source: Path, out: Path, options: dict[str, str], to: str = "gqa") -> Made:
    """Run `kvfold convert`, or find what the same code made before with the same options.

    Args:
        options: flags and their values.
        to: what to convert to, a sub-command.

    Raises:
        CheckFailed: the command failed; it has said why.
    """
    said = out.with_name(f"{out.name}.made.json")
    asked = {"to": to, "options": options, "code": code_digest()}
    if out.exists() and said.exists() and (found := json.loads(said.read_text()))["asked"] == asked:
        return Made(out, found["seconds"], found["peak_bytes"])
    flags = [part for option in options.items() for part in option]
    command = [sys.executable, "-m", "kvfold.cli", "convert", to, str(source), str(out), "--overwrite", *flags]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise CheckFailed(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    made = Made(out, time.perf_counter() - start, usage.ru_maxrss * 1024)
    said.write_text(json.dumps({"asked": asked, "seconds": made.seconds, "peak_bytes": made.peak_bytes}))
    return made


def code_digest() -> str:
    """A hash of everything that converts."""
    package = Path(__file__).parents[1]
    paths = sorted(path for folder in ("attention", "common", "convert") for path in (package / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]
