"""Progress of long work on standard error: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from .parallel import is_main_process

Progress = Callable[[int, int], None]
"""Called as ``progress(done, total)`` by long work, as often as it likes."""

NotedProgress = Callable[[int, int, str], None]
"""A `Progress` that is also told what to show beside, such as the loss."""

Stages = Callable[[str], AbstractContextManager[Progress]]
"""Opens a `Progress` for each stage of work that has several; `show_progress` is one."""

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def silent(label: str) -> Iterator[Progress]:
    """Yield a `Progress` that shows nothing."""
    yield lambda done, total, note="": None


@contextmanager
def show_progress(label: str) -> Iterator[Any]:
    """Yield a `Progress`, and `NotedProgress`, that shows itself under ``label`` on standard error, if this is the
    main process."""
    if not is_main_process():
        yield lambda done, total, note="": None
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        note_column = TextColumn("{task.fields[note]}")
        columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), note_column, TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=None, note="")
            yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)
        return

    last = time.monotonic()
    began: tuple[float, int] | None = None  # work that was taken up again does not begin with nothing done

    def line(done: int, total: int, note: str = "") -> None:
        nonlocal last, began
        now = time.monotonic()
        start, first = began = began or (now, done)
        if now - last < SECONDS_BETWEEN_LINES:
            return
        last = now
        left = f", {_minutes((now - start) * (total - done) / (done - first))} left" if done > first else ""
        print(f"{label}: {100 * done / total:.0f} %{', ' * bool(note)}{note}{left}", file=sys.stderr, flush=True)

    yield line


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
