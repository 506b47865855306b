"""Long contexts: the loss by position, and a number found again, of a model and of what was made of it.

Latent attention gives up part of the keys' rotation. What that costs shows where positions are far apart, so one
perplexity over short windows does not tell of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..common.errors import CheckFailed
from ..common.kvcache import context_length, fit_context
from ..common.loading import load_model, load_tokenizer, resolve_device
from ..common.parallel import Workers
from ..common.progress import Progress, Stages, silent
from ..common.protocol import Protocol, protocol_of, tokenize_texts
from ..common.sources import check_there
from ..common.windows import Window, split_windows
from ..convert.check import check_readable
from .passkey import Case, ask, check_depths, make_cases

DEFAULT_WINDOWS = 4
DEFAULT_CONTEXT = 8192
DEPTHS = (0.1, 0.5, 0.9)
_FIRST_EDGE = 128  # where the first bucket ends; each further one is as long as all before it
_LENGTHS = 4  # by default the window, and so many in all, each half as long


@dataclass(frozen=True)
class Bucket:
    """The loss of tokens that so many others precede in their window.

    Attributes:
        start, stop: positions from `start` up to but not `stop`.
        tokens: how many were scored.
        loss: nats a token.
        above_source: the loss less the source's, on the same tokens.
    """

    start: int
    stop: int
    tokens: int
    loss: float
    above_source: float


@dataclass(frozen=True)
class Passkeys:
    """What became of the passkeys of one length and depth; see `passkey`.

    Attributes:
        length: tokens of a prompt and its answer.
        depth: where the number stands, from 0 to 1.
        keys: how many were asked for.
        found: the part that was found.
        loss: nats a token of the answers.
    """

    length: int
    depth: float
    keys: int
    found: float
    loss: float


@dataclass(frozen=True)
class LongModel:
    """One model's figures.

    Attributes:
        loss: over all buckets, in nats a token.
        found: over all passkeys; None if none was asked for.
    """

    model: str
    loss: float
    found: float | None
    buckets: list[Bucket]
    passkeys: list[Passkeys]


@dataclass(frozen=True)
class LongReport:
    """The result of `long`; of `results`, the source comes first."""

    source: str
    tokens: int
    windows: int
    results: list[LongModel]
    protocol: Protocol


def long(
    src: str | Path,
    outs: Sequence[str | Path] = (),
    *,
    text: Sequence[str],
    window: int | None = None,
    max_windows: int = DEFAULT_WINDOWS,
    batch_size: int = 1,
    length: Sequence[int] = (),
    depth: Sequence[float] = DEPTHS,
    keys: int = 2,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    progress: Stages = silent,
) -> LongReport:
    """Measure loss by position, and the passkey test, of a source and its results.

    One model is in memory at a time. Several processes (`accelerate launch`, `torchrun`) share the work, and give the
    figures of one.

    Args:
        src: directory, GGUF file or Hub id; its tokenizer is used.
        outs: the same, of the results.
        text: paths, or `builtin`; see `common.text.read_texts`. It is filler for the passkeys too.
        window: positions a window has; the source's context by default, or 8192 if that is smaller, or what the
            text fills.
        max_windows: score only the first so many.
        batch_size: windows at a time; does not change the result.
        length: tokens of prompts, each with its answer; by default the window, its half, quarter and eighth.
        depth: where the numbers stand.
        keys: how many for each length and depth; 0 leaves the test out.
        dtype, device, revision: see `common.loading.load_model`; results run in the source's dtype.
        progress: opened for the windows and for the passkeys of each model.

    Raises:
        UserError: a text, a model or a number does not fit, or a model is not alike.
        CheckFailed: a loss is not finite.
        EnvironmentFailure: see `load_model`.
    """
    check_there(src, *outs, revision=revision)
    if keys:
        check_depths(depth)
    from ..convert.verify import check_alike, check_tokenizer, check_windows

    tokenized = tokenize_texts(src, text, revision=revision)
    for out in outs:
        check_tokenizer(src, out, tokenized)
    workers = Workers(resolve_device(device))

    def fits(config: Any) -> None:
        check_readable(src, config)
        check_windows(config, tokenized, window, max_windows, batch_size)

    model = load_model(src, dtype=dtype, device=workers.device, revision=revision, fits=fits)
    config = model.config
    window = _window(config, window, len(tokenized.ids))
    windows = split_windows(len(tokenized.ids), window, max_windows=max_windows)
    protocol = protocol_of(tokenized, model, window=window, stride=window, max_windows=max_windows)
    cases: list[Case] = []
    if keys:
        lengths = [fit_context(config, "length", each, each) for each in length] or _halves(window)
        cases = make_cases(load_tokenizer(src, revision=revision), tokenized.ids, lengths, depth, keys)
    rows: list[LongModel] = []
    for name in (src, *outs):
        if rows:
            del model  # two are not needed at a time
            model = load_model(name, dtype=protocol.dtype, device=workers.device)
            check_alike(src, name, config, model.config)
            check_readable(name, model.config)
            fit_context(model.config, "window", max([window, *(case.length for case in cases)]), window)
        with progress(f"{name}: positions") as advance:
            losses = _losses(model, tokenized.ids, windows, batch_size, workers, advance)
        with progress(f"{name}: passkeys") as advance:
            asked = _ask(model, cases, workers, advance)
        rows.append(_row(str(name), losses, asked, rows[0].buckets if rows else []))
    return LongReport(str(src), sum(w.scored for w in windows), len(windows), rows, protocol)


def _window(config: Any, asked: int | None, tokens: int) -> int:
    if asked is not None or tokens < 2:  # which is refused where windows are cut
        return fit_context(config, "window", asked, DEFAULT_CONTEXT)
    return min(context_length(config) or DEFAULT_CONTEXT, DEFAULT_CONTEXT, tokens)


def _halves(window: int) -> list[int]:
    """Shortest first, and none that is too short for the question itself."""
    return [each for part in reversed(range(_LENGTHS)) if (each := window >> part) >= _FIRST_EDGE] or [window]


def _edges(window: int) -> Iterator[tuple[int, int]]:
    """The positions of each bucket: 1 to 128, which counts none at 0, and then twice as many each time."""
    start, stop = 1, _FIRST_EDGE
    while start < window:
        yield start, min(stop, window)
        start, stop = stop, 2 * stop


def _losses(
    model: Any, ids: Sequence[int], windows: Sequence[Window], batch_size: int, workers: Workers, progress: Progress
) -> list[tuple[int, int, int, float]]:
    """Start, stop, tokens and loss of each bucket."""
    import torch

    from ..common.scoring import batch_nll, check_ids, evaluating, map_batches

    text = torch.as_tensor(ids)
    check_ids(model, int(text.max()))
    edges = list(_edges(windows[0].stop))

    def sums(batch: list[Window]) -> list[float]:
        nll = batch_nll(model, text, batch)  # [B, T - 1], of the tokens at 1, 2, ..., T - 1
        return [nll[:, start - 1 : stop - 1].sum().item() for start, stop in edges]

    with evaluating(model):
        rows = map_batches(sums, windows, batch_size, workers, progress)
    totals = [math.fsum(column) for column in zip(*rows, strict=True)]
    held = [[max(0, min(stop, w.stop - w.start) - start) for w in windows] for start, stop in edges]
    found = []
    for (start, stop), counts, total in zip(edges, held, totals, strict=True):
        if not math.isfinite(total):
            raise CheckFailed(
                f"the loss at positions {start}:{stop} is {total}; look for non-finite weights, or try a wider dtype"
            )
        found.append((start, stop, sum(counts), total / sum(counts)))
    return found


def _ask(model: Any, cases: Sequence[Case], workers: Workers, progress: Progress) -> list[Passkeys]:
    def one(number: int) -> tuple[bool, float]:
        answer = ask(model, cases[number])
        progress(min(number + workers.size, len(cases)), len(cases))
        return answer

    answers = zip(cases, workers.spread(one, range(len(cases))), strict=True)
    rows = []
    for (length, depth), group in groupby(answers, key=lambda pair: (pair[0].length, pair[0].depth)):
        found, losses = zip(*(answer for _, answer in group), strict=True)
        rows.append(Passkeys(length, depth, len(found), sum(found) / len(found), math.fsum(losses) / len(losses)))
    return rows


def _row(
    name: str, losses: Sequence[tuple[int, int, int, float]], asked: list[Passkeys], source: Sequence[Bucket]
) -> LongModel:
    bases = [bucket.loss for bucket in source] or [loss for *_, loss in losses]
    buckets = [Bucket(*bucket, bucket[-1] - base) for bucket, base in zip(losses, bases, strict=True)]
    tokens = sum(bucket.tokens for bucket in buckets)
    keys = sum(row.keys for row in asked)
    return LongModel(
        model=name,
        loss=math.fsum(bucket.loss * bucket.tokens for bucket in buckets) / tokens,
        found=sum(row.found * row.keys for row in asked) / keys if keys else None,
        buckets=buckets,
        passkeys=asked,
    )
