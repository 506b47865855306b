"""Progress of long work on standard error: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from .parallel import is_main_process

Progress = Callable[[int, int], None]
"""Called as ``progress(done, total)`` by long work, as often as it likes."""

Stages = Callable[[str], AbstractContextManager[Progress]]
"""Opens a `Progress` for each stage of work that has several; `show_progress` is one."""

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def silent(label: str) -> Iterator[Progress]:
    """Yield a `Progress` that shows nothing."""
    yield lambda done, total: None


@contextmanager
def show_progress(label: str) -> Iterator[Progress]:
    """Yield a `Progress` that shows itself under ``label`` on standard error, if this is the main process."""
    if not is_main_process():
        yield lambda done, total: None
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    last = time.monotonic()

    def line(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{label}: {100 * done / total:.0f} %", file=sys.stderr, flush=True)

    yield line
