"""What trials came to: kept line by line, so that a run can be stopped and gone on with, and shown as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

_NAME = "trials.jsonl"


@dataclass(frozen=True)
class Result:
    """Of one trial.

    Attributes:
        said: what happened in it.
        lost: what did not hold; empty if all did.
    """

    seed: int
    command: str
    kind: str
    number: int
    said: str
    lost: str
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.command}/{self.kind}/{self.number}"

    @property
    def again(self) -> str:
        """The command that makes the same trial again."""
        return f"python -m tests.faults --seed {self.seed} --trial {self.name}"


class Results:
    """Of all trials of a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / _NAME
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.all = [Result(**json.loads(line)) for line in lines if line.endswith("}")]

    def has(self, seed: int, name: str) -> bool:
        return any((one.seed, one.name) == (seed, name) for one in self.all)

    def add(self, result: Result) -> None:
        self.all.append(result)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def table(results: Iterable[Result]) -> str:
    """Commands by kinds: tried / survived / lost."""
    results = list(results)
    commands = list(dict.fromkeys(one.command for one in results))
    kinds = list(dict.fromkeys(one.kind for one in results))
    rows = [["", *commands, "all"]]
    for kind in (*kinds, "all"):
        cells = [
            [one for one in results if kind in (one.kind, "all") and of in (one.command, "all")] for of in rows[0][1:]
        ]
        rows.append([kind, *(_cell(cell) for cell in cells)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(["tried / survived / lost", *lines])


def _cell(results: list[Result]) -> str:
    lost = sum(bool(one.lost) for one in results)
    return f"{len(results)}/{len(results) - lost}/{lost}" if results else "-"
