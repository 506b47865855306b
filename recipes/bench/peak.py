"""Peak memory of a command's process, watched from outside."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...common.errors import CheckFailed

_EVERY = 0.005  # seconds


@dataclass
class Peak:
    """Largest resident set seen, in bytes: anonymous memory, and pages of mapped files."""

    anonymous: int = 0
    files: int = 0


def peak_of(command: Sequence[str]) -> Peak:
    """Run a command to its end and return its peak memory, read from /proc again and again.

    Raises:
        CheckFailed: it failed; it has said why.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak, done = Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(_EVERY):
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines)
                anonymous, files = (int(status[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile"))
            except (OSError, KeyError):  # it has ended
                return
            peak.anonymous, peak.files = max(peak.anonymous, anonymous), max(peak.files, files)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, said = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        raise CheckFailed(f"{' '.join(command)} ended with status {process.returncode}: {''.join(last)}")
    return peak
