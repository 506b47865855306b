"""What happens to a command at one of its calls, or at a time: signals, a disk that fills up, errors of reading and
writing, rights that go."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .events import CHANGES, READS, WRITES, Strike
from .place import Place

STOPPED = 128


@dataclass(frozen=True)
class Blow:
    """Something that happens while a command runs.

    Attributes:
        statuses: that the command may end with then.
        calls: those of `events` at which it may happen.
        of_source: only at calls on the source's files.
        strike: makes ready what is called at the call in its place.
        by_time: a signal that may come at any time instead, to the first process.
        undo: makes the place whole again before it is looked at.
        leaves: whether what was being written may lie there until the next run.
        unprivileged: run without root's right to pass over rights.
        small: on the small disk.
    """

    statuses: frozenset[int]
    calls: frozenset[str] = CHANGES
    of_source: bool = False
    strike: Callable[[Place, Random], Strike] | None = None
    by_time: signal.Signals | None = None
    undo: Callable[[Place], None] = lambda place: None
    leaves: bool = False
    unprivileged: bool = False
    small: bool = False


def _fails(code: int) -> Callable[[Place, Random], Strike]:
    def ready(place: Place, draw: Random) -> Strike:
        def strike(first: int) -> None:
            raise OSError(code, os.strerror(code))

        return strike

    return ready


def _sends(number: int) -> Callable[[Place, Random], Strike]:
    """To the process at the call, or to the first one."""

    def ready(place: Place, draw: Random) -> Strike:
        to_first = draw.random() < 0.5
        return lambda first: os.kill(first if to_first else os.getpid(), number)

    return ready


def _fill(place: Place, draw: Random) -> Strike:
    return lambda first: place.fill()


def _forbid(place: Place, draw: Random) -> Strike:
    """Take away the right to write to a folder, or to read a file: what there is, is drawn."""
    folder = place.folder
    shards = sorted(folder.glob("src/*.safetensors")) or sorted(folder.glob("narrow/*.safetensors"))
    path, mode = draw.choice([(folder, 0o555), (folder, 0o555), (place.tmp, 0o555), (draw.choice(shards), 0)])

    def strike(first: int) -> None:
        path.chmod(mode)

    return strike


def _permit(place: Place) -> None:
    for path in (place.folder, place.tmp, *place.folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


BLOWS = {
    "kill": Blow(frozenset({-signal.SIGKILL, 3}), strike=_sends(signal.SIGKILL), by_time=signal.SIGKILL, leaves=True),
    "term": Blow(frozenset({STOPPED + signal.SIGTERM}), strike=_sends(signal.SIGTERM), by_time=signal.SIGTERM),
    "int": Blow(frozenset({STOPPED + signal.SIGINT}), strike=_sends(signal.SIGINT), by_time=signal.SIGINT),
    "full": Blow(frozenset({0, 3}), strike=_fill, undo=Place.empty, small=True),
    "no-space": Blow(frozenset({0, 3}), calls=WRITES, strike=_fails(errno.ENOSPC)),
    "write-error": Blow(frozenset({0, 3}), calls=WRITES, strike=_fails(errno.EIO)),
    "read-error": Blow(frozenset({0, 3}), calls=READS, of_source=True, strike=_fails(errno.EIO)),
    "denied": Blow(frozenset({0, 2, 3}), strike=_forbid, undo=_permit, leaves=True, unprivileged=True),
}
