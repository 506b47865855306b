"""The kinds of trial: what happens, and what has to hold of it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from . import damage
from .events import CHANGES, Events
from .forks import Ended, end
from .kinds import BLOWS, Blow
from .place import remove
from .trial import Bench, Trial, Undisturbed, hold
from .world import digest

_BY_TIME = 0.25  # of the signals, that come at a time and not at a call
_TWICE = 0.25  # of the trials: it happens to the second run as well
_REFUSED = frozenset({1, 2})
_FAILED = frozenset({1, 2, 3})


def struck(trial: Trial) -> None:
    """Something happens at a call, or at a time."""
    blow = trial.blow
    assert blow
    expected = trial.begin()
    for _ in range(1 + (trial.draw.random() < _TWICE)):
        ended = _strike(trial, blow, expected)
        blow.undo(trial.place)
        over = trial.is_over()
        too_early = {-blow.by_time} if blow.by_time else set()  # kvfold was not there yet, to say something
        trial.check_said(ended, blow.statuses | too_early | ({0, 2} if over else set()))
        trial.check_left(leaves=blow.leaves)
        if over:
            break
    trial.finish(leaves=blow.leaves)


def _strike(trial: Trial, blow: Blow, expected: Undisturbed) -> Ended:
    draw = trial.draw
    if blow.by_time and draw.random() < _BY_TIME:
        seconds = draw.uniform(0.02, 1.05) * expected.seconds
        trial.said.append(f"after {seconds:.3f} s")
        process = trial.start(trial.words)
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(process, blow.by_time)
        return trial.end(process)
    at = draw.randint(1, max(1, expected.calls))
    trial.said.append(f"at call {at} of {expected.calls}")
    assert blow.strike
    within = trial.source if blow.of_source else None
    events = Events(blow.calls, within=within, at=at, strike=blow.strike(trial.place, draw))
    return trial.run(trial.words, events=events, unprivileged=blow.unprivileged)


def of_source(harm: Callable[..., damage.Damage]) -> Callable[[Trial], None]:
    """A shard of the source is not what it was. That is found, or nobody can know, and the run is one of what stands
    there."""

    def scenario(trial: Trial) -> None:
        trial.begin()
        harmed = harm(trial.draw.choice(sorted(trial.source.glob("*.safetensors"))), trial.draw)
        trial.said.append(harmed.said)
        trial.before = trial.inputs()
        ended = trial.run(trial.words)
        trial.check_said(ended, _REFUSED | {0})
        if ended.status == 0:
            hold(not trial.command.hashed or trial.is_over(), f"nobody noticed {harmed.said}")
            made, content = trial.state(), harmed.path.read_bytes()
            trial.lay_out()
            harmed.path.write_bytes(content)
            hold(trial.run(trial.words).status == 0, "the second run of the same failed")
            hold(trial.state() == made, "two runs of the same differ")
            return
        trial.check_left(leaves=False)
        harmed.mend()
        trial.before = trial.inputs()
        trial.finish()

    return scenario


def of_result(trial: Trial) -> None:
    """What a run made, or goes on from, is not what it was: whoever reads on says so, or makes the same of it."""
    draw, command = trial.draw, trial.command
    trial.replacing = False
    expected = trial.begin()
    read = trial.bench.once((trial.name, "read"), lambda: _undisturbed_reader(trial)) if command.reader else ""
    trial.lay_out()
    if command.reader or command.first:
        hold(trial.run((command.first or command.words).split()).status == 0, "undisturbed, it does not end well")
    elif trial.name == "uptrain":
        at = draw.randint(expected.calls // 2, expected.calls - 1)
        trial.run(trial.words, events=Events(CHANGES, at=at, strike=BLOWS["kill"].strike(trial.place, Random(0))))
    found = draw.choice([files for pattern in command.damaged if (files := _files(trial.folder, pattern))])
    quietly = draw.random() < 0.5
    harmed = draw.choice([damage.truncate, damage.flip])(draw.choice(found), draw, quietly=quietly)
    trial.said.append(f"{harmed.path.relative_to(trial.folder).parent}/{harmed.said}{', its time kept' * quietly}")
    ended = trial.run((command.reader or command.words).split())
    trial.check_said(ended, _FAILED | {0})
    if ended.status == 0:
        same = digest(trial.folder / "read") == read if command.reader else trial.is_over()
        hold(same, f"nobody noticed {harmed.path.relative_to(trial.folder).parent}/{harmed.said}")
        return
    if harmed.path.relative_to(trial.folder).parts[0] in command.reads:
        harmed.mend()
    mended = (command.mended or command.words).split()
    ended = trial.run(mended)
    if ended.status == 2 and re.search("move .* away", ended.stderr):  # it cannot be known to be ours any more
        remove(trial.folder / harmed.path.relative_to(trial.folder).parts[0])
        ended = trial.run(mended)
    hold(ended.status == 0, f"made anew, it ends with {ended.status}: {ended.stderr.strip()[-400:]}")
    hold(trial.is_over(), "made anew, it is not what an undisturbed run makes")


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if path.is_file() and path.stat().st_size)


def _undisturbed_reader(trial: Trial) -> str:
    trial.lay_out()
    for words in (trial.command.words, trial.command.reader):
        assert trial.run(words.split()).status == 0
    return digest(trial.folder / "read")


def together(trial: Trial) -> None:
    """A second process of the same command, at the same time or a little later."""
    expected = trial.begin()
    later = trial.draw.choice([0.0, trial.draw.uniform(0, 1) * expected.seconds])
    trial.said.append(f"{later:.3f} s later")
    logs = [trial.place.log, Path(f"{trial.place.log}-2")]
    first = trial.start(trial.words)
    time.sleep(later)
    second = trial.start(trial.words, log=logs[1])
    ended = [
        end(process, log, others=(*trial.world.others, *others))
        for process, log, others in ((first, logs[0], (second,)), (second, logs[1], ()))
    ]
    for one in ended:
        trial.check_said(one, frozenset({0, 2}))
    hold(any(one.status == 0 for one in ended), f"neither did it: {[one.stderr for one in ended]}")
    trial.check_left(leaves=False)
    hold(trial.is_over(), "both are done, and it is not what one makes")
    trial.finish()


def in_a_process(trial: Trial) -> None:
    """A signal at any time to a process of its own: that forks do as such a one does is held here too."""
    trial.begin()
    key = (trial.name, "process", trial.replacing)
    seconds = trial.bench.once(key, lambda: _seconds_of_a_process(trial))
    trial.lay_out()
    number = trial.draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    after = trial.draw.uniform(0.05, 1.05) * seconds
    trial.said.append(f"{number.name} after {after:.3f} of {seconds:.3f} s")
    process = trial.start(trial.words, forked=False)
    time.sleep(after)
    with suppress(ProcessLookupError):
        os.kill(process, number)
    ended = trial.end(process)
    over = trial.is_over()
    # A process that has not yet come as far as kvfold dies of the signal.
    trial.check_said(ended, frozenset({-number, 128 + number}) | ({0, 2} if over else set()))
    trial.check_left(leaves=number == signal.SIGKILL)
    if not over:
        hold(trial.end(trial.start(trial.words, forked=False)).status == 0, "run again, it does not end well")
        hold(trial.is_over(), "run again, it is not what a fork makes")


def _seconds_of_a_process(trial: Trial) -> float:
    trial.lay_out()
    began = time.monotonic()
    hold(trial.end(trial.start(trial.words, forked=False)).status == 0, "a process does not end well")
    return time.monotonic() - began


SCENARIOS: dict[str, tuple[Callable[[Trial], None], Blow | None]] = {
    **{name: (struck, blow) for name, blow in BLOWS.items()},
    "truncated": (of_source(damage.truncate), None),
    "flipped": (of_source(damage.flip), None),
    "damaged": (of_result, None),
    "second": (together, None),
    "process": (in_a_process, None),
}


def attempt(bench: Bench, command: str, kind: str, number: int, seed: int, said: list[str]) -> None:
    """Make one trial; what happens in it is added to `said`.

    Raises:
        Lost: something did not hold.
    """
    scenario, blow = SCENARIOS[kind]
    trial = Trial(bench, command, Random(f"{seed} {command} {kind} {number}"), said, blow=blow)
    scenario(trial)
