"""Start a command in a process of its own, wait for it, and see to it that neither outlives the other unheard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import EnvironmentFailure, UserError

LAUNCHER = "KVFOLD_LAUNCHER"  # process number of what started this process and waits for it
_PR_SET_PDEATHSIG = 1
_LOOK = 0.1  # seconds between two looks at a process
# `python -m` would import from the working directory first, which may be a checkpoint's; from Python 3.11 on.
_NOTHING_FROM_HERE = {"PYTHONSAFEPATH": "1"}
# What is handed on of what asks us to stop. Nobody sends SIGHUP to those who are not on the terminal that closed.
_HANDED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}


@dataclass(frozen=True)
class Command:
    """A program to run, and all of its environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


def launch(
    command: Command,
    *,
    stdout: BinaryIO | None = None,
    started: Callable[[int], None] = lambda process: None,
    short_of_memory: str,
) -> int:
    """Run a command until it ends, and hand on the first signal that asks to stop, so that it can save.

    Once only: torchrun kills everything at a second one. For the same reason the command gets a session of its own,
    or a terminal's Ctrl-C would reach it twice. It stops, as at a signal, if this process is killed.

    Args:
        stdout: a file for what it prints; None for our own standard output.
        started: told its process number.
        short_of_memory: what to do about it if memory ran out.

    Returns:
        Its exit status; 128 + the signal's number if one was handed on and it did not end well.

    Raises:
        EnvironmentFailure: the system killed it.
    """
    got: list[int] = []
    child: subprocess.Popen | None = None

    def hand_on(number: int, frame: object) -> None:
        got.append(number)
        if len(got) == 1 and child is not None:
            child.send_signal(_HANDED_ON[signal.Signals(number)])

    # Whoever started us under nohup wants hanging up to be ignored.
    heard = [number for number in _HANDED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hand_on) for number in heard}
    try:
        env = command.env | {LAUNCHER: str(os.getpid()), **_NOTHING_FROM_HERE}
        child = subprocess.Popen(command.argv, env=env, stdout=stdout, start_new_session=True)
        started(child.pid)
        if got:  # while it was being started
            child.send_signal(_HANDED_ON[signal.Signals(got[0])])
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    status = status if status >= 0 else 128 - status
    if status and got:
        return 128 + got[0]
    if status == 128 + signal.SIGKILL:
        raise EnvironmentFailure(
            f"a process of the run was killed (signal 9), as the system does when memory runs out; {short_of_memory}"
        )
    return status


def wait_for_orphan(process: int, word: str, patience: float) -> None:
    """Wait for a command whose launcher was killed: it was told to stop, and may still be saving.

    Args:
        process: its number, which may be another's by now.
        word: that its command line has.
        patience: seconds.

    Raises:
        UserError: it still runs.
    """
    command = Path(f"/proc/{process}/cmdline")  # where there is none, its locks tell
    end = time.monotonic() + patience
    while process:
        try:
            if word.encode() not in command.read_bytes():  # another's; and that of one that has ended is empty
                return
        except OSError:
            return
        if time.monotonic() > end:
            raise UserError(f"process {process} of this run, which was killed, still works; wait for it, or end it")
        time.sleep(_LOOK)


def end_with_launcher() -> None:
    """Be asked to stop when what started this process dies, even by a signal that it cannot hand on.

    Nobody would know of a run that went on by itself, in a session of its own. Only Linux has a way to ask for that;
    elsewhere, and for a launcher that does not name itself, nothing changes.
    """
    launcher = os.environ.pop(LAUNCHER, "")  # not that of whatever this process starts
    if not launcher or not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before
        signal.raise_signal(signal.SIGTERM)
