"""How charts speak of results, and what marks them."""

from __future__ import annotations

from collections.abc import Sequence

from ..record import Result
from ..say import say_bytes, say_number, say_tick

# Of a kind of attention: marker, and its size.
MARKERS = {"MHA": ("^", 9), "GQA": ("o", 9), "MQA": ("s", 8), "MLA": ("D", 7.5)}


def colour_of(row: Result) -> str:
    """The name of a model's colour."""
    return "ink" if row.verdict == "source" else row.attention_kind.lower()


def label(number: int, row: Result, *, name: bool = True) -> str:
    mark = "★" if number == 0 else str(number)
    return f"{mark} {short(row.name, 26)}" if name else mark


def short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def hint(number: int, row: Result) -> str:
    return (
        f"{label(number, row)}: perplexity {say_number(row.perplexity)}, "
        f"{say_bytes(row.kv_bytes_per_token)} a token, {row.verdict}"
    )


def say_numbers(numbers: Sequence[int]) -> str:
    """`1, 2, 3, 7` as `1-3, 7`, and the source's as a star."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1 and runs[-1][0] > 0:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join("★" if run == [0] else str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def say_tokens(tokens: float) -> str:
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens / size:g}{unit}"
    return say_tick(tokens) if tokens < 10_000 else f"{tokens / 1000:g}k" if tokens < 1e6 else f"{tokens / 1e6:g}M"
