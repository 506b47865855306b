"""Several conversions of one model, each held against it on the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ..common.errors import UserError
from ..common.kvcache import fit_context
from ..common.progress import Progress
from ..common.protocol import Protocol
from ..common.sources import check_there


@dataclass(frozen=True)
class Compared:
    """One result beside its source; a figure that is not finite is None. See `convert.verify.VerifyReport`."""

    model: str
    perplexity: float | None
    perplexity_ratio: float | None
    loss: float | None
    kl: float | None
    top1_agreement: float
    layer_errors: list[float | None]
    first_bad_layer: int | None
    passed: bool
    reason: str


@dataclass(frozen=True)
class CompareReport:
    """The source's own figures, and how far each result is from it.

    Attributes:
        source: what the user calls it.
        source_perplexity, source_loss: None where not finite.
        max_loss: ln V, the loss of a model that guesses.
        tokens: how many were predicted.
        windows: how many windows they came from.
        results: in the order in which they were named.
    """

    source: str
    source_perplexity: float | None
    source_loss: float | None
    max_loss: float
    tokens: int
    windows: int
    results: list[Compared]
    protocol: Protocol


def compare(
    src: str | Path,
    outs: Sequence[str | Path],
    *,
    text: Sequence[str],
    window: int | None = None,
    max_windows: int | None = None,
    batch_size: int = 1,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    progress: Progress | None = None,
) -> CompareReport:
    """Measure how far several results are from their source, one after the other, on the same tokens.

    Two models are in memory at a time. Several processes (`accelerate launch`, `torchrun`) take batches by turns, and
    give the figures of one.

    Args:
        src: directory, GGUF file or Hub id; its tokenizer is used.
        outs: the same, of the results. Their tokenizers must give the same tokens.
        text: paths, or `builtin`; see `common.text.read_texts`.
        window: positions a window has; 512 by default, or the source's context if that is smaller.
        max_windows, batch_size, dtype, device, revision: see `convert.verify.verify`.
        progress: called with `(windows done, windows in all)`, over all results.

    Raises:
        UserError: a text, a model or a number does not fit, or a model is not alike.
        EnvironmentFailure: see `common.loading.load_model`.
    """
    if not outs:
        raise UserError("there is nothing to compare the source with; name at least one result")
    check_there(src, *outs, revision=revision)
    from ..convert.verify import DEFAULT_WINDOW, open_reference

    source = open_reference(
        src,
        text=text,
        window=window,
        max_windows=max_windows,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        revision=revision,
    )
    # Said, so that every result is held against it on the same windows.
    window = fit_context(source.loaded.config, "window", window, DEFAULT_WINDOW)
    reports = [
        source.verify(
            out,
            window=window,
            max_windows=max_windows,
            batch_size=batch_size,
            progress=_part(progress, number, len(outs)),
        )
        for number, out in enumerate(outs)
    ]
    first = reports[0]
    return CompareReport(
        source=first.source,
        source_perplexity=first.source_perplexity,
        source_loss=first.source_loss,
        max_loss=first.max_loss,
        tokens=first.tokens,
        windows=first.windows,
        results=[
            Compared(**{field.name: getattr(report, field.name) for field in fields(Compared)}) for report in reports
        ],
        protocol=first.protocol,
    )


def _part(progress: Progress | None, number: int, parts: int) -> Progress | None:
    """The progress of one part of several equal ones, as progress of them all."""
    return progress and (lambda done, total: progress(number * total + done, parts * total))
