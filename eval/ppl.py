"""Perplexity, with the protocol that makes one comparable to another.

Text is joined, tokenised and cut as `kvfold.common.protocol` says; losses are fp32 log-softmax, summed in fp64
and averaged over tokens. Every report carries what these rules leave open, so equal protocols mean comparable
figures. Several processes (`accelerate launch`, `torchrun`) take batches by turns, and give the figures of one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import CheckFailed, UserError, did_you_mean
from ..common.kvcache import context_length, fit_context
from ..common.loading import load_model, resolve_device
from ..common.parallel import Workers
from ..common.progress import Progress
from ..common.protocol import KVFOLD, LM_EVAL, PROTOCOLS, Protocol, protocol_of, tokenize_texts
from ..common.tokens import check_vocabulary
from ..common.windows import Window, batches, rolling_windows, split_windows
from ..convert.check import check_readable

DEFAULT_WINDOW = 2048


@dataclass(frozen=True)
class Score:
    """What a model makes of one text.

    Attributes:
        perplexity: `exp(loss)`.
        loss: nats per token, averaged over all scored tokens alike.
        tokens: how many were scored.
        windows: how many windows they came from.
        window: positions of a window, the BOS included.
        stride: text tokens from one window's start to the next.
    """

    perplexity: float
    loss: float
    tokens: int
    windows: int
    window: int
    stride: int


@dataclass(frozen=True)
class PerplexityReport:
    """The result of `perplexity`; see `Score` for the figures.

    Those of the text rather than of its tokens are lm-evaluation-harness's, and None where not all of the text was
    scored: `word_perplexity` a word between white space, `byte_perplexity` a byte of UTF-8, and `bits_per_byte`.
    """

    model: str
    perplexity: float
    loss: float
    tokens: int
    windows: int
    word_perplexity: float | None
    byte_perplexity: float | None
    bits_per_byte: float | None
    protocol: Protocol


def perplexity(
    model: str | Path,
    *,
    text: Sequence[str],
    protocol: str = KVFOLD,
    window: int | None = None,
    stride: int | None = None,
    max_windows: int | None = None,
    batch_size: int = 1,
    dtype: str = "auto",
    device: str = "auto",
    bos: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
) -> PerplexityReport:
    """Measure the perplexity of a checkpoint on texts.

    Args:
        model: directory, GGUF file or Hub id.
        text: paths, or `builtin`; see `common.text.read_texts`.
        protocol: `kvfold`, or `lm-eval` for the figure of lm-evaluation-harness; see `common.protocol`.
        window: positions a window has; 2048 by default, or the model's context if that is smaller. By `lm-eval` the
            tokens that it scores, by default as many as the model's context.
        stride: tokens from one window's start to the next; windows do not overlap by default.
        max_windows: score only the first so many.
        batch_size: windows at a time; does not change the result.
        dtype, device, revision: see `common.loading.load_model`.
        bos: put the tokenizer's BOS in front of every window (it takes one of the window's positions).
        progress: called with `(windows done, windows in all)`.

    Raises:
        UserError: text, model or a number does not fit.
        CheckFailed: the loss is not finite, or so large that the perplexity is not.
        EnvironmentFailure: see `load_model`.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"unknown protocol {protocol!r}{did_you_mean(protocol, PROTOCOLS)}")
    if protocol == LM_EVAL and (bos or stride is not None):
        raise UserError(
            f"{LM_EVAL} says itself where a BOS stands and how windows overlap; leave --bos and --stride out"
        )
    tokenized = tokenize_texts(model, text, protocol=protocol, bos=bos, revision=revision)
    workers = Workers(resolve_device(device))

    def fits(config: Any) -> None:
        check_readable(model, config)
        check_vocabulary(config, max(tokenized.ids, default=0))
        *_, windows = _cut(config, len(tokenized.ids), protocol, window, stride, max_windows, tokenized.lead_id)
        list(batches(windows, batch_size))

    loaded = load_model(model, dtype=dtype, device=workers.device, revision=revision, fits=fits)
    score = score_tokens(
        loaded,
        tokenized.ids,
        protocol=protocol,
        window=window,
        stride=stride,
        max_windows=max_windows,
        lead_id=tokenized.lead_id,
        batch_size=batch_size,
        workers=workers,
        progress=progress,
    )
    whole = protocol == LM_EVAL and score.tokens == len(tokenized.ids)
    return PerplexityReport(
        model=str(model),
        perplexity=score.perplexity,
        loss=score.loss,
        tokens=score.tokens,
        windows=score.windows,
        **_of_text(tokenized.joined, score.loss * score.tokens if whole else None),
        protocol=protocol_of(tokenized, loaded, window=score.window, stride=score.stride, max_windows=max_windows),
    )


def score_tokens(
    model,
    ids: Sequence[int],
    *,
    protocol: str = KVFOLD,
    window: int | None = None,
    stride: int | None = None,
    max_windows: int | None = None,
    lead_id: int | None = None,
    batch_size: int = 1,
    workers: Workers | None = None,
    progress: Progress | None = None,
) -> Score:
    """Score a loaded model on the token ids of one text; the arguments are those of `perplexity`, and

        lead_id: the token before every window, if any; by `lm-eval` the one before the text.
        workers: the processes that share the windows.

    Raises:
        UserError: a number does not fit.
        CheckFailed: the loss is not finite, or so large that the perplexity is not.
    """
    from ..common.scoring import window_nll  # here, so that importing this module does not import torch

    window, stride, windows = _cut(model.config, len(ids), protocol, window, stride, max_windows, lead_id)
    sums = window_nll(model, ids, windows, lead_id=lead_id, batch_size=batch_size, workers=workers, progress=progress)
    tokens = sum(w.scored for w in windows)
    loss = math.fsum(sums) / tokens
    try:
        result = math.exp(loss)
    except OverflowError:
        raise CheckFailed(
            f"a loss of {loss:.1f} nats per token has no finite perplexity; the model's weights are broken"
        ) from None
    return Score(result, loss, tokens, len(windows), window, stride)


def _cut(
    config: Any,
    tokens: int,
    protocol: str,
    window: int | None,
    stride: int | None,
    max_windows: int | None,
    lead_id: int | None,
) -> tuple[int, int, list[Window]]:
    """Window, stride and windows of a text of so many tokens, for a model of this config; see `score_tokens`."""
    if protocol == LM_EVAL:
        window = fit_context(config, "window", window, context_length(config) or DEFAULT_WINDOW)
        return window, window, rolling_windows(tokens, window, max_windows=max_windows)
    window, bos = fit_context(config, "window", window, DEFAULT_WINDOW), lead_id is not None
    stride = window - bos if stride is None else stride
    return window, stride, split_windows(tokens, window, stride=stride, bos=bos, max_windows=max_windows)


def _of_text(text: str, nats: float | None) -> dict[str, float | None]:
    """The figures of a text that costs so many nats, of which a word or byte may cost more than a float holds."""
    units = {"word": len(re.split(r"\s+", text)), "byte": len(text.encode())}
    figures = {f"{name}_perplexity": None if nats is None else _exp(nats / count) for name, count in units.items()}
    return {**figures, "bits_per_byte": None if nats is None else nats / units["byte"] / math.log(2)}


def _exp(loss: float) -> float | None:
    try:
        return math.exp(loss)
    except OverflowError:
        return None
