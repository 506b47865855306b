"""Throw faults at kvfold's commands, and print a table of what came of it; status 1 if anything was lost.

Every trial is drawn from a seed, and can be made again by itself. Needs Linux; as root it also mounts a small disk in
memory to fill up.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count, islice, product
from pathlib import Path

from .commands import COMMANDS
from .neighbour import Neighbour
from .place import mount_small_disk, unmount
from .table import Result, Results, table

_KINDS = ("kill", "term", "int", "full", "no-space", "write-error", "read-error", "denied", "truncated", "flipped")
KINDS = (*_KINDS, "damaged", "second", "process")
_NOT_THERE = frozenset(product(("no-space", "write-error"), ("publish",)))  # it writes nothing here
_AS_ROOT = frozenset({"full"})
SEED = 20261201


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=400, metavar="N", help="trials over all  [400]")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--command", action="append", choices=COMMANDS, help="only this one; may be repeated")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this one; may be repeated")
    parser.add_argument("--trial", action="append", metavar="COMMAND/KIND/NUMBER", help="only this one")
    parser.add_argument("--state", type=Path, metavar="DIR", help="keep results there, go on from them, and show all")
    asked = parser.parse_args()
    names = asked.trial or list(islice(_names(asked.command or COMMANDS, asked.kind or KINDS), asked.faults))
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="kvfold-faults-") as folder:
        os.environ |= {"HF_HOME": f"{folder}/home", "KVFOLD_CACHE": f"{folder}/cache"}
        Path(folder).chmod(0o755)
        results = Results(asked.state or Path(folder))
        results.path.parent.mkdir(parents=True, exist_ok=True)
        todo = [name for name in names if not results.has(asked.seed, name)]
        began = time.monotonic()
        if todo:
            _try_all(todo, asked.seed, Path(folder), results)
        shown = [one for one in results.all if one.seed == asked.seed]
    print(f"\n{table(shown)}\n{len(shown)} trials, {time.monotonic() - began:.0f} s")
    for one in (lost := [one for one in shown if one.lost]):
        print(f"\n{one.name} ({one.said}): {one.lost}\n  {one.again}")
    return int(bool(lost))


def _names(commands: object, kinds: object) -> Iterator[str]:
    """Trials without end, one of each kind of each command after the other."""
    there = [pair for pair in product(kinds, commands) if _can(pair[0]) and pair not in _NOT_THERE]  # type: ignore[call-overload]
    for number in count():
        yield from (f"{command}/{kind}/{number}" for kind, command in there)


def _can(kind: str) -> bool:
    return os.geteuid() == 0 or kind not in _AS_ROOT


def _try_all(names: list[str], seed: int, folder: Path, results: Results) -> None:
    hub = Neighbour()
    small = folder / "small"
    try:
        os.environ |= hub.environment  # before the client is imported
        from . import forks

        forks.prepare()
        from .scenarios import attempt
        from .trial import Bench, Lost
        from .world import World

        bench = Bench(World.make(folder, hub), small if mount_small_disk(small) else None)
        for position, name in enumerate(names, 1):
            command, kind, number = name.split("/")
            began, said, lost = time.monotonic(), [], ""
            try:
                attempt(bench, command, kind, int(number), seed, said)
            except (Lost, TimeoutError) as error:
                lost = str(error)
            seconds = time.monotonic() - began
            results.add(Result(seed, command, kind, int(number), ", ".join(said), lost, round(seconds, 2)))
            mark = f"LOST: {lost}" if lost else "survived"
            print(
                f"{position}/{len(names)} {name} ({', '.join(said)}) {seconds:.1f} s: {mark}",
                file=sys.stderr,
                flush=True,
            )
    finally:
        unmount(small)
        hub.end()


if __name__ == "__main__":
    sys.exit(main())
