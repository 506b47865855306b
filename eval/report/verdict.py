"""What to make of figures: a word for each result, and a sentence for all."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .commands import command_line
from .record import Result, Verdict


@dataclass(frozen=True)
class Level:
    """How good a result is.

    Attributes:
        word: stands beside each result.
        said: the same in a sentence.
        limit: the perplexity, as a multiple of the source's, up to which it holds.
        mark: stands beside the word, so that colour is not needed.
        tone: of the page's colours.
        advice: what to do with such a result.
    """

    word: str
    said: str
    limit: float
    mark: str
    tone: str
    advice: str


LEVELS = (
    Level("as good", "as good as its source", 1.02, "✓", "good", "Use it as it is."),
    Level("close", "close to its source", 1.10, "≈", "near", "Use it, or heal it on a little text."),
    Level(
        "wants healing",
        "it wants healing",
        1.5,
        "△",
        "fair",
        "Refine it (--refine 64) or heal it by a short uptraining.",
    ),
    Level(
        "wants uptraining",
        "it wants uptraining",
        float("inf"),
        "▲",
        "poor",
        "Convert it anew with --refine 64, or keep more of the cache; then heal it.",
    ),
)
BROKEN = Level("broken", "it is broken", float("nan"), "✕", "bad", "Look for the first bad layer, and convert anew.")
UNKNOWN = Level("not judged", "it was not judged", float("nan"), "?", "none", "Measure it again on other text.")
SOURCE = Level("source", "the source", float("nan"), "★", "none", "")
ALL = {level.word: level for level in (*LEVELS, BROKEN, UNKNOWN, SOURCE)}

FEW_TOKENS = 2000  # of which a perplexity says little


def level_of(ratio: float | None, passed: bool) -> Level:
    """The level of a result by its perplexity over the source's, and by whether it beats guessing."""
    if not passed:
        return BROKEN
    if ratio is None:
        return UNKNOWN
    return next(level for level in LEVELS if ratio <= level.limit)


def judge(
    rows: Sequence[Result], max_ratio: float, *, tokens: int, scoring: Sequence[str]
) -> tuple[list[Result], Verdict]:
    """The results with their words and with the Pareto set marked, and what to make of them.

    Where the source itself is worse than guessing, results are judged by their ratio to it alone.

    Args:
        rows: the source first.
        max_ratio: see `record.Verdict`.
        tokens: that were scored.
        scoring: flags with which a command scores the same text in the same way.
    """
    source, *outs = rows
    lost = source.loss is not None and not source.passed

    def works(row: Result) -> bool:
        return row.passed or (lost and row.perplexity_ratio is not None and row.kl is not None)

    marked = [
        replace(source, verdict=SOURCE.word),
        *(replace(row, verdict=level_of(row.perplexity_ratio, works(row)).word) for row in outs),
    ]
    judged = [row for row in marked[1:] if ALL[row.verdict] in LEVELS]
    verdict = _with_doubts(_verdict(marked, judged, max_ratio, scoring), lost=lost, tokens=tokens)
    rivals = [marked[0], *(row for row in marked[1:] if works(row))] if source.passed or lost else judged
    names = {row.name for row in rivals}
    return [replace(row, pareto=row.name in names and _undominated(row, rivals)) for row in marked], verdict


def _undominated(row: Result, rows: Sequence[Result]) -> bool:
    if row.perplexity is None:
        return False
    mine = (row.perplexity, row.kv_bytes_per_token)
    theirs = [(other.perplexity, other.kv_bytes_per_token) for other in rows]
    return not any(p is not None and p <= mine[0] and b <= mine[1] and (p, b) != mine for p, b in theirs)


def _verdict(rows: Sequence[Result], judged: Sequence[Result], max_ratio: float, scoring: Sequence[str]) -> Verdict:
    """What to make of `rows`, the source first, of which the results in `judged` are not broken."""
    source, *outs = rows
    within = [row for row in judged if row.perplexity_ratio <= max_ratio]
    if within:
        best = min(within, key=lambda row: (row.kv_bytes_per_token, row.perplexity_ratio))
        return _accept(source, best, max_ratio)
    if judged:
        best = min(judged, key=lambda row: row.perplexity_ratio)
        return _nearest(source, best, max_ratio, alone=len(outs) == 1)
    if source.loss is None:
        text = "The source itself has no finite perplexity on this text, so nothing can be compared with it."
        return Verdict(text, None, False, max_ratio, "Measure on another text, or in a wider --dtype.", "")
    whose = "The result is" if len(outs) == 1 else f"All {len(outs)} results are"
    text = f"{whose} broken: no better than guessing, or without a finite loss."
    command = command_line(["verify"], [source.model, outs[0].model], scoring)
    return Verdict(text, None, False, max_ratio, "Find the first layer that went wrong.", command)


def _accept(source: Result, best: Result, max_ratio: float) -> Verdict:
    level = ALL[best.verdict]
    if best.kv_ratio >= 1:
        return _saves_nothing(source, best, max_ratio, within=True)
    text = f"{_with(best)} at {best.perplexity_ratio:.3f} times its perplexity: {level.said}."
    command = command_line(["check"], [best.model], ["--engine", "transformers"])
    return Verdict(text, best.name, True, max_ratio, f"{level.advice} First ask whether your engine reads it.", command)


def _nearest(source: Result, best: Result, max_ratio: float, *, alone: bool) -> Verdict:
    level = ALL[best.verdict]
    if best.kv_ratio >= 1:
        return _saves_nothing(source, best, max_ratio, within=False)
    if alone:
        text = f"{_with(best)}, but at {best.perplexity_ratio:.3f} times its perplexity: {level.said}."
    else:
        text = (
            f"No result stays within {max_ratio:g} times the source's perplexity; {best.name} comes nearest with "
            f"{best.perplexity_ratio:.3f} times, and {_cache(best)}."
        )
    line = ["kvfold", "uptrain", f"model={best.model}", f"out={best.model}-healed", f"teacher={source.model}"]
    return Verdict(text, best.name, False, max_ratio, level.advice, shlex.join(line) + " data=TEXT tokens=1e6")


def _saves_nothing(source: Result, best: Result, max_ratio: float, *, within: bool) -> Verdict:
    """Of the results that would be named, the best has no smaller cache than the source."""
    of = f"at {best.perplexity_ratio:.3f} times the source's perplexity and with {_cache(best)}"
    if best.kv_elements_ratio < 1:
        cause = f"it is stored in {best.kv_dtype}, the source in {source.kv_dtype}."
        advice = f"Convert it anew with --dtype {source.kv_dtype}, as the source is stored."
    else:
        cause = "are SRC and OUT swapped?"
        advice = "Name the original first, and after it conversions that cache less."
    return Verdict(f"{best.name}, {of}, saves no cache; {cause}", best.name, within, max_ratio, advice, "")


def _with_doubts(verdict: Verdict, *, lost: bool, tokens: int) -> Verdict:
    """The verdict with what takes its weight away, and the advice to mend that first."""
    if lost:
        text = (
            "The source itself is worse than guessing on this text, so results are only held against it. "
            f"{verdict.text}"
        )
        advice = "Measure on text that the source can predict; these ratios say little of what it is good at."
        verdict = replace(verdict, text=text, next=advice, command="")
    if tokens < FEW_TOKENS:
        text = f"{verdict.text} So few tokens ({tokens:,}) tell little."
        verdict = replace(verdict, text=text, next="Give more text, by --text or --max-windows.", command="")
    return verdict


def _with(row: Result) -> str:
    return f"{row.name} makes do with {_cache(row)}"


def _cache(row: Result) -> str:
    if row.kv_ratio > 1:
        return f"{row.kv_ratio:.3g} times the source's KV cache"
    return f"{100 * row.kv_ratio:.3g} % of the source's KV cache"
