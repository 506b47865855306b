"""What a run was like: one JSON object a line in `metrics.jsonl`, and a picture of the losses at the end.

Two kinds of lines: of steps (`loss`, `learning_rate`, ...) and of looks at held-out text (`held_out`).
"""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

from ..common.typed import MOST

NAME = "metrics.jsonl"
PICTURE = "loss.png"
_LOOKS = {"held_out", "reference"}  # losses by texts
_NUMBERS = {"loss", "cross_entropy", "seconds", "learning_rate"}
_DRAWN = {"held_out", "cross_entropy"}

_FAR = 1e200  # nats: beyond any loss, and thousands of them can be added


class History:
    """The metrics of a run, up to a step; lines beyond it are forgotten, since those steps will be taken again.

    Args:
        folder: of the run.
        step: steps that are done.
    """

    def __init__(self, folder: Path, step: int):
        self.path = folder / NAME
        self.lines = [line for line in read_history(folder) if line["step"] <= step]
        aside = self.path.with_name(NAME + ".new")
        aside.write_text("".join(map(_dump, self.lines)))
        aside.replace(self.path)

    def add(self, **figures: Any) -> None:
        """Write a line; figures that are no finite number are left out."""
        line = _without_broken(figures)
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(_dump(line))


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, up to one that was cut short by whoever killed the run, or written by another.

    Whatever is read of a line holds: `step`, and `tokens` where there is one, are counts; losses are finite numbers,
    those of a look by their texts; and a line with a loss that is drawn says after how many tokens.
    """
    try:
        lines = (folder / NAME).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    read = []
    for line in lines:
        try:
            figures = json.loads(line)
            _dump(figures)  # or it could not be written again: NaN is no JSON
        except (ValueError, RecursionError):
            break
        if not _is_ours(figures):
            break
        read.append(figures)
    return read


def _is_ours(line: Any) -> bool:
    """Whether a line is one that `History` writes."""
    if not isinstance(line, dict) or not _is_count(line.get("step")):
        return False
    if not _is_count(line.get("tokens", None if _DRAWN & line.keys() else 0)):
        return False
    if not all(_is_number(line[name]) for name in _NUMBERS & line.keys()):
        return False
    looks = [line[name] for name in _LOOKS & line.keys()]
    return all(isinstance(look, dict) and all(map(_is_number, look.values())) for look in looks)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_FAR <= value <= _FAR  # false of nan


def draw(lines: list[dict[str, Any]], title: str, path: Path) -> str:
    """Draw training and held-out losses against the tokens read; returns why there is no picture, if there is none.

    A picture is the last thing that a run should fail at, whatever its fonts make of the names in it.
    """
    import matplotlib

    try:
        with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _draw(lines, title, path)
    except Exception as error:
        return f"matplotlib says: {error}"
    return ""


def _draw(lines: list[dict[str, Any]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    steps = [line for line in lines if "cross_entropy" in line]
    axes.plot(
        [line["tokens"] for line in steps], [line["cross_entropy"] for line in steps], alpha=0.5, label="training"
    )
    looks = [line for line in lines if "held_out" in line]
    for name in looks[0]["held_out"] if looks else ():
        (curve,) = axes.plot(
            [line["tokens"] for line in looks],
            [line["held_out"].get(name, math.nan) for line in looks],
            marker="o",
            label=name,
        )
        if name in (reference := looks[0].get("reference") or {}):
            axes.axhline(reference[name], color=curve.get_color(), linestyle="--", label=f"{name}, reference")
    axes.set(title=title, xlabel="tokens", ylabel="nats a token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _dump(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


def _without_broken(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_broken(value) if isinstance(value, dict) else value
        for key, value in figures.items()
        if not (value is None or (isinstance(value, float) and not math.isfinite(value)))
    }
