"""Perplexity, with the protocol that makes one comparable to another.

Text is joined, tokenised and cut as `kvfold.common.protocol` says; losses are fp32 log-softmax, summed in fp64
and averaged over tokens. Every report carries what these rules leave open, so equal protocols mean comparable
figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import CheckFailed
from ..common.kvcache import fit_context
from ..common.loading import load_model
from ..common.progress import Progress
from ..common.protocol import Protocol, protocol_of, tokenize_texts
from ..common.windows import split_windows
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
    """The result of `perplexity`; see `Score` for the figures."""

    model: str
    perplexity: float
    loss: float
    tokens: int
    windows: int
    protocol: Protocol


def perplexity(
    model: str | Path,
    *,
    text: Sequence[str],
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
        window: positions a window has; 2048 by default, or the model's context if that is smaller.
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
    tokenized = tokenize_texts(model, text, bos=bos, revision=revision)
    loaded = load_model(model, dtype=dtype, device=device, revision=revision)
    check_readable(model, loaded.config)
    score = score_tokens(
        loaded,
        tokenized.ids,
        window=window,
        stride=stride,
        max_windows=max_windows,
        bos_id=tokenized.bos_id,
        batch_size=batch_size,
        progress=progress,
    )
    return PerplexityReport(
        model=str(model),
        perplexity=score.perplexity,
        loss=score.loss,
        tokens=score.tokens,
        windows=score.windows,
        protocol=protocol_of(tokenized, loaded, window=score.window, stride=score.stride, max_windows=max_windows),
    )


def score_tokens(
    model,
    ids: Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    max_windows: int | None = None,
    bos_id: int | None = None,
    batch_size: int = 1,
    progress: Progress | None = None,
) -> Score:
    """Score a loaded model on the token ids of one text; the arguments are those of `perplexity`.

    Raises:
        UserError: a number does not fit.
        CheckFailed: the loss is not finite, or so large that the perplexity is not.
    """
    from ..common.scoring import window_nll  # here, so that importing this module does not import torch

    window = fit_context(model.config, "window", window, DEFAULT_WINDOW)
    bos = bos_id is not None
    windows = split_windows(len(ids), window, stride=stride, bos=bos, max_windows=max_windows)
    sums = window_nll(model, ids, windows, bos_id=bos_id, batch_size=batch_size, progress=progress)
    tokens = sum(w.scored for w in windows)
    loss = math.fsum(sums) / tokens
    try:
        result = math.exp(loss)
    except OverflowError:
        raise CheckFailed(
            f"a loss of {loss:.1f} nats per token has no finite perplexity; the model's weights are broken"
        ) from None
    return Score(result, loss, tokens, len(windows), window, stride or window - bos)
