"""What a run of uptraining saw each time that it looked at held-out text, from its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...uptrain.history import read_history
from ..timed import run_folder


@dataclass(frozen=True)
class Looks:
    """Losses in nats a token, of one run.

    Attributes:
        tokens: read before each look; the first is 0.
        losses: by text, one for each look.
        source: by text, of the model that was converted, on the same windows.
        seconds: of the steps alone, also of those before the run was stopped and gone on with.
    """

    tokens: tuple[int, ...]
    losses: dict[str, tuple[float, ...]]
    source: dict[str, float]
    seconds: float

    def points(self, text: str) -> list[tuple[int, float]]:
        return list(zip(self.tokens, self.losses[text], strict=True))


def read_looks(out: Path) -> Looks:
    """The looks of the run that wrote `out`."""
    lines = read_history(run_folder(out))
    looks = [line for line in lines if "held_out" in line]
    return Looks(
        tokens=tuple(look["tokens"] for look in looks),
        losses={text: tuple(look["held_out"][text] for look in looks) for text in looks[0]["held_out"]},
        source=looks[0]["reference"],
        seconds=sum(line["seconds"] for line in lines if "seconds" in line),
    )
