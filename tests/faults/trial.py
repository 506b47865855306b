"""One trial: a command is begun, something happens, and what is left is looked at; then the command is run again.

What has to hold: it said why in one line, or nothing where it was killed; what it read is as it was; what it makes is
not there, is what was there before, or is whole; nothing else lies about; and run again, it ends as if nothing had
happened.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from .commands import COMMANDS, Command
from .events import Events
from .forks import Ended, end, start
from .kinds import Blow
from .place import Place
from .world import World, digest

_LINE = re.compile(r"kvfold: (?!warning: )")
_SIBLING = re.compile(r"\.kvfold-(new|old)$")
# Of what is published, what says when and how fast.
_OF_THE_DAY = re.compile(r"README\.md|report/.*|recipe\.yaml")

State = Mapping[str, Any]


class Lost(AssertionError):
    """Something did not hold."""


def hold(true: bool, otherwise: str) -> None:
    if not true:
        raise Lost(otherwise)


@dataclass(frozen=True)
class Undisturbed:
    """What a command comes to, with how many calls and in how many seconds."""

    state: State
    calls: int
    seconds: float


@dataclass
class Bench:
    """All that trials share: the places, and what undisturbed runs came to."""

    world: World
    small: Path | None
    known: dict[Any, Any] = field(default_factory=dict)

    def place(self, small: bool = False) -> Place:
        assert not small or self.small
        root = self.small if small and self.small else self.world.folder
        return Place(root / "trial", self.world.folder / "said")

    def once(self, key: Any, work: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = work()
        return self.known[key]


class Trial:
    """A command, a kind of fault, and a number that decides all the rest.

    Args:
        blow: what happens at a call or a time, if that is what happens.
    """

    def __init__(self, bench: Bench, name: str, draw: Random, said: list[str], *, blow: Blow | None = None) -> None:
        self.bench, self.world, self.name, self.draw = bench, bench.world, name, draw
        self.command: Command = COMMANDS[name]
        self.blow = blow
        self.place = bench.place(bool(blow and blow.small))
        self.replacing = bool(self.command.replacing) and draw.random() < 0.4
        self.said = said
        said += ["replacing"] * self.replacing

    @property
    def folder(self) -> Path:
        return self.place.folder

    @cached_property
    def words(self) -> list[str]:
        return f"{self.command.words} {self.command.replacing if self.replacing else ''}".split()

    @cached_property
    def expected(self) -> Undisturbed:
        """Of the same command, undisturbed."""
        blow = self.blow or Blow(frozenset())
        key = (self.name, self.replacing, blow.calls, blow.of_source)
        return self.bench.once(key, lambda: self._undisturbed(blow))

    @cached_property
    def earlier(self) -> State:
        """What stands where the command writes, before it."""
        return self.bench.once((self.name, "earlier", self.replacing), self._earlier)

    def _earlier(self) -> State:
        self.lay_out()
        return self.state()

    def _undisturbed(self, blow: Blow) -> Undisturbed:
        self.lay_out()
        events = Events(blow.calls, within=self.source if blow.of_source else None)
        began = time.monotonic()
        ended = self.run(self.words, events=events)
        assert ended.status == 0, (self.words, ended)
        return Undisturbed(self.state(), events.count, time.monotonic() - began)

    @property
    def source(self) -> Path:
        return self.folder / self.command.source

    def lay_out(self) -> None:
        """Begin anew: what the command reads, and what it is to replace."""
        self.world.hub.forget()
        self.place.lay_out(self.world.shared, self.command.reads)
        if self.replacing:
            assert self.run(self.command.earlier.split()).status == 0
        self.before = self.inputs()

    def begin(self) -> Undisturbed:
        """Know what the command comes to undisturbed, then lay out."""
        expected, _ = self.expected, self.earlier
        self.lay_out()
        return expected

    def run(self, words: list[str], *, events: Events | None = None, unprivileged: bool = False) -> Ended:
        return self.end(self.start(words, events=events, unprivileged=unprivileged))

    def start(
        self,
        words: list[str],
        *,
        events: Events | None = None,
        unprivileged: bool = False,
        forked: bool = True,
        log: Path | None = None,
    ) -> int:
        def before() -> None:
            self.place.enter(unprivileged=unprivileged)
            if events:
                events.watch()
            if not forked:
                os.execv(sys.executable, [sys.executable, "-m", "kvfold.cli", *words])

        return start(words, self.folder, log or self.place.log, before=before)

    def end(self, process: int) -> Ended:
        return end(process, self.place.log, others=self.world.others)

    def is_over(self) -> bool:
        """Whether what the command makes is all there."""
        return self.state() == self.expected.state

    def inputs(self) -> dict[str, str]:
        return {name: digest(self.folder / name) for name in self.command.reads}

    def state(self) -> State:
        """What the command makes, as it is now."""
        made: dict[str, Any] = {name: digest(self.folder / name) for name in self.command.makes}
        if self.command.on_hub:
            files = self.world.hub.holds().get("me/model", {})
            made["the Hub"] = {path: hashed for path, hashed in files.items() if not _OF_THE_DAY.fullmatch(path)}
        return made

    def check_said(self, ended: Ended, statuses: frozenset[int]) -> None:
        """One line that says why, on a status that may be."""
        said = ended.stderr.strip()
        hold("Traceback" not in said, f"a traceback: {said[-400:]}")
        hold(ended.status in statuses, f"status {ended.status}: {said[-400:]}")
        if ended.status > 0:
            lines = said.splitlines()
            hold(bool(lines) and bool(_LINE.match(lines[-1])), f"the last line is not kvfold's: {said[-400:]}")
            own = [line for line in lines if _LINE.match(line)]
            hold(len(own) == 1 or self.name in ("run", "uptrain"), f"{len(own)} lines: {own}")

    def check_left(self, *, leaves: bool) -> None:
        """What the command read and makes, and that nothing else lies about."""
        for name, now in self.inputs().items():
            hold(now == self.before[name], f"{name} was changed")
        for name, now in self.state().items():
            whole = (self.expected.state[name], self.earlier[name])  # of which the second may be that nothing is there
            hold(now in whole, f"{name} is neither what was there before nor whole")
        self.check_strays(leaves=leaves)

    def check_strays(self, *, leaves: bool, but_for_tmp: bool = False) -> None:
        makes = {name.partition("/")[0] for name in (*self.command.makes, *self.command.reads, *self.command.beside)}
        for path in sorted(self.folder.rglob("*")):
            sibling = bool(_SIBLING.search(path.name))
            hold(leaves or not sibling, f"{path.relative_to(self.folder)} was left")
            if path.parent == self.folder and not sibling:
                hold(path.name in makes, f"{path.name} is a stray")
        if not leaves and not but_for_tmp:
            hold(not (left := sorted(path.name for path in self.place.tmp.iterdir())), f"{left} left in TMPDIR")

    def finish(self, *, leaves: bool = False) -> None:
        """The same command again ends as if nothing had happened.

        Args:
            leaves: whether a killed one has left in TMPDIR what the system clears.
        """
        over = self.is_over()
        ended = self.run(self.words)
        if not (over and ended.status == 2 and "exists" in ended.stderr):
            hold(ended.status == 0, f"run again, it ends with {ended.status}: {ended.stderr.strip()[-400:]}")
        for name, now in self.state().items():
            hold(now == self.expected.state[name], f"run again, {name} is not what an undisturbed run makes")
        self.check_strays(leaves=False, but_for_tmp=leaves)
