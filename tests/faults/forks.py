"""Commands of kvfold in forks of this process: a start costs milliseconds instead of seconds of imports.

Sound as long as this process has one thread: nothing here may compute with torch on more, or start a backward pass.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_OURS = 99  # the status of a fork that this file broke
PATIENCE = 120.0

_NOT_LOADED = frozenset({"__main__", "tests", "bench", "engines", "heal", "real"})  # what no command needs
_LOADED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "matplotlib.pyplot",
)


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status (minus a signal's number), and what it said."""

    status: int
    stdout: str
    stderr: str


class _Forked:
    """What `common.launcher` needs of subprocess.Popen, by a fork."""

    def __init__(
        self, argv: Sequence[str], *, env: dict[str, str], stdout: BinaryIO | None, start_new_session: bool
    ) -> None:
        python, dash_m, module, *words = argv
        assert (python, dash_m) == (sys.executable, "-m"), argv
        _flush()
        self.pid = os.fork()
        if self.pid == 0:
            with _never_back():
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as an exec does
                    if signal.getsignal(number) is not signal.SIG_IGN:
                        signal.signal(number, signal.SIG_DFL)
                os.setsid()
                if stdout is not None:
                    os.dup2(stdout.fileno(), 1)
                os.environ.clear()
                os.environ.update(env)
                _be(module, words)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _never_back:
    """Around what a fork does: it must not go on with what its parent does."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> NoReturn:
        if error is not None:
            sys.excepthook(kind, error, traceback)
            _flush()
        os._exit(_OURS)


def prepare() -> None:
    """Import everything, once, and let kvfold start its processes as forks."""
    import torch

    import kvfold

    found = (module.name for module in pkgutil.walk_packages(kvfold.__path__, "kvfold.", onerror=lambda name: None))
    for name in (*_LOADED, *found):
        if not _NOT_LOADED.intersection(name.split(".")):
            with suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(name)
    from kvfold.common import launcher

    torch.set_num_threads(1)
    launcher.subprocess = SimpleNamespace(Popen=_Forked)  # type: ignore[assignment]
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a killed command are waited for too


def start(words: Sequence[str], folder: Path, log: Path, *, before: Callable[[], None] = lambda: None) -> int:
    """Start `kvfold WORDS` in a folder, its output to LOG.out and LOG.err; returns the number of its process.

    Args:
        before: called in it first.
    """
    _flush()
    if (process := os.fork()) == 0:
        with _never_back():
            os.setsid()
            os.chdir(folder)
            for descriptor, name in ((1, "out"), (2, "err")):
                os.dup2(
                    os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666), descriptor
                )
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            before()
            _be("kvfold.cli", words)
    return process


def _be(module: str, words: Sequence[str]) -> None:
    import torch

    from kvfold.common.launcher import end_with_launcher
    from kvfold.common.status import leave, prepare_process, status_of

    torch.set_num_threads(1)  # after a fork torch makes its pool anew, and threads would race to do so
    sys.argv = ["kvfold", *words]
    if module == "kvfold.cli":
        from kvfold.cli import main

        main()
    assert module == "kvfold.uptrain", module
    from kvfold.uptrain.__main__ import main as train

    prepare_process()
    end_with_launcher()
    leave(status_of(train))


def end(process: int, log: Path, *, others: Sequence[int] = ()) -> Ended:
    """Wait for a command, and for all that it started.

    Args:
        others: children of ours that are not waited for.
    """
    limit, status = time.monotonic() + PATIENCE, None
    while status is None or children() - {*others}:
        if time.monotonic() > limit:
            for one in children() - {*others}:
                os.kill(one, signal.SIGKILL)
            raise TimeoutError(f"still at work after {PATIENCE:.0f} s")
        for child in children() - {*others}:
            done, how = os.waitpid(child, os.WNOHANG)
            if done == process:
                status = os.waitstatus_to_exitcode(how)
        time.sleep(0.002)
    return Ended(status, *(Path(f"{log}.{name}").read_text(errors="replace") for name in ("out", "err")))


def children() -> set[int]:
    return {int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
