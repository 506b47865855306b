"""Perplexity, with the protocol that makes one comparable to another.

The text's documents are joined by one blank line and tokenised once without special tokens; windows are cut
and scored as `kvfold.common.windows` says; losses are fp32 log-softmax, summed in fp64 and averaged over
tokens. Every report carries what these rules leave open, so equal protocols mean comparable figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import CheckFailed, UserError
from ..common.kvcache import fit_context
from ..common.loading import load_model, load_tokenizer
from ..common.progress import Progress
from ..common.sources import one_line_errors
from ..common.text import join_documents, read_texts, text_hash
from ..common.windows import split_windows

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
class Protocol:
    """How a perplexity was measured. Figures compare when this (but dtype and device) and the tokenizer agree."""

    text_hash: str
    texts: tuple[str, ...]
    join: str
    tokens_in_text: int
    window: int
    stride: int
    max_windows: int | None
    bos: str
    scored: str
    dtype: str
    device: str


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
    names = (text,) if isinstance(text, str) else tuple(text)
    joined = join_documents(read_texts(names))
    tokenizer = load_tokenizer(model, revision=revision)
    if bos and tokenizer.bos_token_id is None:
        raise UserError(f"the tokenizer of {model} has no BOS token; leave --bos out")
    # Not verbose: it would warn that a whole text is longer than a context.
    with one_line_errors(model):
        ids = tokenizer(joined, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    loaded = load_model(model, dtype=dtype, device=device, revision=revision)
    score = score_tokens(
        loaded,
        ids,
        window=window,
        stride=stride,
        max_windows=max_windows,
        bos_id=tokenizer.bos_token_id if bos else None,
        batch_size=batch_size,
        progress=progress,
    )
    if bos:
        bos_rule = f"{tokenizer.bos_token} (id {tokenizer.bos_token_id}) before every window, counted in it"
        scored_rule = "every token, once"
    else:
        bos_rule = "none"
        overlapping = score.stride < score.window
        scored_rule = f"every token but the first of {'the text' if overlapping else 'each window'}, once"
    return PerplexityReport(
        model=str(model),
        perplexity=score.perplexity,
        loss=score.loss,
        tokens=score.tokens,
        windows=score.windows,
        protocol=Protocol(
            text_hash=text_hash(joined),
            texts=names,
            join="one blank line",
            tokens_in_text=len(ids),
            window=score.window,
            stride=score.stride,
            max_windows=max_windows,
            bos=bos_rule,
            scored=scored_rule,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=str(loaded.device),
        ),
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
