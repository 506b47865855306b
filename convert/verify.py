"""How far a result is from its source, on the same text: in its predictions, and layer by layer.

Both are run by stock transformers, in one dtype, on the tokens of the source's tokenizer. What differs is then
the conversion, not how it was measured. An export in stock MLA form carries its source's residual stream times a
constant (`residual_scale` in the `kvfold` block of its config.json), which is taken out before layers are compared.

Legend: B windows, T positions, D hidden size, L decoder layers, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import UserError
from ..common.kvcache import fit_context
from ..common.loading import load_model, load_tokenizer, resolve_device
from ..common.parallel import Workers
from ..common.progress import Progress
from ..common.protocol import Protocol, TokenizedText, protocol_of, token_ids, tokenize_texts
from ..common.scoring import compare_hidden, evaluating, hidden_states, map_batches
from ..common.sources import check_there, quiet
from ..common.tokens import check_vocabulary
from ..common.windows import Window, batches, split_windows
from .check import check_readable
from .latent_form import BLOCK

DEFAULT_WINDOW = 512
DEFAULT_THRESHOLD = 0.5

# What the config of a result must share with its source's for the two to compare.
_ALIKE = {"vocab_size": "vocabulary", "num_hidden_layers": "number of decoder layers", "hidden_size": "hidden size"}


@dataclass(frozen=True)
class Distance:
    """How far a model is from its source; figures are not finite where the models' are not.

    Attributes:
        kl: KL(source || result) in nats, averaged over predicted tokens.
        top1_agreement: part of the predicted tokens for which both find the same token likeliest.
        loss: of the result, in nats, averaged over predicted tokens.
        source_loss: of the source.
        layer_errors: for each decoder layer |h_result - h_source| / |h_source|, h its output for one token,
            averaged over all tokens. A mean of ratios, so that a first token's massive activation counts as
            one token among many.
    """

    kl: float
    top1_agreement: float
    loss: float
    source_loss: float
    layer_errors: list[float]


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`. A figure that is not finite is None.

    Attributes:
        kl, top1_agreement, loss, source_loss, layer_errors: see `Distance`.
        perplexity: `exp(loss)`, and so on.
        perplexity_ratio: the result's over the source's.
        max_loss: ln V, the loss of a model that guesses; a result above it has failed, unless its source is, too.
        tokens: how many were predicted.
        windows: how many windows they came from.
        first_bad_layer: the first, counted from 0, whose error exceeds `threshold`; None if none does.
        max_ratio: the perplexity ratio above which the result has failed, if one was asked for.
        passed: whether the result has not failed.
        reason: why it has.
    """

    model: str
    source: str
    kl: float | None
    top1_agreement: float
    perplexity: float | None
    source_perplexity: float | None
    perplexity_ratio: float | None
    loss: float | None
    source_loss: float | None
    max_loss: float
    tokens: int
    windows: int
    layer_errors: list[float | None]
    first_bad_layer: int | None
    threshold: float
    max_ratio: float | None
    passed: bool
    reason: str
    protocol: Protocol


def verify(
    src: str | Path,
    out: str | Path,
    *,
    text: Sequence[str],
    window: int | None = None,
    max_windows: int | None = None,
    batch_size: int = 1,
    dtype: str = "auto",
    device: str = "auto",
    threshold: float = DEFAULT_THRESHOLD,
    max_ratio: float | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Measure how far a result is from its source, and judge whether it came out whole.

    Args:
        src: directory, GGUF file or Hub id; its tokenizer is used.
        out: the same, of the result. Its tokenizer, if it has one, must give the same tokens.
        text: paths, or `builtin`; see `common.text.read_texts`.
        window: positions a window has; 512 by default, or the smaller context of the two if that is less.
        max_windows: compare on only the first so many.
        batch_size: windows at a time; does not change the result.
        dtype: both run in it; `auto` and `checkpoint` as in `common.loading.load_model`, by the source.
        device: see `load_model`.
        threshold: the relative error above which a layer is bad.
        max_ratio: fail too if the result's perplexity is more than so many times the source's.
        revision: of `src`, if it is a Hub id.
        progress: called with `(windows done, windows in all)`.

    Raises:
        UserError: a text, a model or a number does not fit, or the models are not alike.
        EnvironmentFailure: see `load_model`.
    """
    if not 0 <= threshold < math.inf:
        raise UserError(f"a threshold of {threshold} bounds nothing; give a relative error such as 0.5")
    if max_ratio is not None and not 0 < max_ratio < math.inf:
        raise UserError(f"a perplexity ratio of {max_ratio} bounds nothing; give a positive number such as 1.5")
    check_there(src, out, revision=revision)
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
    return source.verify(
        out,
        window=window,
        max_windows=max_windows,
        batch_size=batch_size,
        threshold=threshold,
        max_ratio=max_ratio,
        progress=progress,
    )


@dataclass(frozen=True)
class Reference:
    """A source, loaded, and the text on which results are held against it.

    Attributes:
        model: what the user calls it.
        loaded: the model.
        text: as its tokenizer reads it.
        workers: the processes that share the windows.
    """

    model: str
    loaded: Any
    text: TokenizedText
    workers: Workers

    def verify(
        self,
        out: str | Path,
        *,
        window: int | None = None,
        max_windows: int | None = None,
        batch_size: int = 1,
        threshold: float = DEFAULT_THRESHOLD,
        max_ratio: float | None = None,
        progress: Progress | None = None,
    ) -> VerifyReport:
        """`verify` of one result, which is in memory no longer than that takes."""
        dtype = str(self.loaded.dtype).removeprefix("torch.")
        check_tokenizer(self.model, out, self.text)

        def fits(config: Any) -> None:
            check_alike(self.model, out, self.loaded.config, config)
            check_readable(out, config)
            check_windows(config, self.text, window, max_windows, batch_size)

        result = load_model(out, dtype=dtype, device=self.workers.device, fits=fits)
        window = min(fit_context(model.config, "window", window, DEFAULT_WINDOW) for model in (self.loaded, result))
        windows = split_windows(len(self.text.ids), window, max_windows=max_windows)
        far = distance(
            self.loaded,
            result,
            self.text.ids,
            windows,
            batch_size=batch_size,
            workers=self.workers,
            progress=progress,
        )
        return _report(self, out, far, windows, window, max_windows, threshold, max_ratio)


def open_reference(
    src: str | Path,
    *,
    text: Sequence[str],
    window: int | None = None,
    max_windows: int | None = None,
    batch_size: int = 1,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
) -> Reference:
    """Load the source of results that are to be verified; the arguments and errors are those of `verify`."""
    tokenized = tokenize_texts(src, text, revision=revision)
    workers = Workers(resolve_device(device))

    def fits(config: Any) -> None:
        check_readable(src, config)
        check_windows(config, tokenized, window, max_windows, batch_size)

    loaded = load_model(src, dtype=dtype, device=workers.device, revision=revision, fits=fits)
    return Reference(str(src), loaded, tokenized, workers)


def check_windows(
    config: Any, text: TokenizedText, window: int | None, max_windows: int | None, batch_size: int
) -> None:
    """Refuse, before a model is loaded, a text or numbers that do not fit its config; see `verify`.

    Raises:
        UserError: names what does not.
    """
    check_vocabulary(config, max(text.ids, default=0))
    window = fit_context(config, "window", window, DEFAULT_WINDOW)
    list(batches(split_windows(len(text.ids), window, max_windows=max_windows), batch_size))


def _report(
    source: Reference,
    out: str | Path,
    far: Distance,
    windows: Sequence[Window],
    window: int,
    max_windows: int | None,
    threshold: float,
    max_ratio: float | None,
) -> VerifyReport:
    max_loss = math.log(_text_config(source.loaded).vocab_size)
    bad = next((number for number, error in enumerate(far.layer_errors) if not error <= threshold), None)
    reason = _why_failed(far, max_loss, max_ratio, threshold, bad)
    return VerifyReport(
        model=str(out),
        source=source.model,
        kl=_finite(far.kl),
        top1_agreement=far.top1_agreement,
        perplexity=_finite(_exp(far.loss)),
        source_perplexity=_finite(_exp(far.source_loss)),
        perplexity_ratio=_finite(_exp(far.loss - far.source_loss)),
        loss=_finite(far.loss),
        source_loss=_finite(far.source_loss),
        max_loss=max_loss,
        tokens=sum(w.scored for w in windows),
        windows=len(windows),
        layer_errors=[_finite(error) for error in far.layer_errors],
        first_bad_layer=bad,
        threshold=threshold,
        max_ratio=max_ratio,
        passed=not reason,
        reason=reason,
        protocol=protocol_of(source.text, source.loaded, window=window, stride=window, max_windows=max_windows),
    )


def distance(
    source,
    result,
    ids: Sequence[int],
    windows: Sequence[Window],
    *,
    batch_size: int = 1,
    chunk: int | None = None,
    workers: Workers | None = None,
    progress: Progress | None = None,
) -> Distance:
    """Compare two loaded models that are alike, on the same device.

    The source's hidden states of one batch, [B, T, D] a layer, are kept while the result runs on it, and none
    for longer.

    Args:
        ids: the whole text.
        windows: cut without BOS or stride, so that each scores all but its first token.
        batch_size, chunk, workers, progress: as in `common.scoring.window_nll`.

    Raises:
        UserError: the models are not of one depth, or of one vocabulary.
    """
    text = torch.as_tensor(ids)

    def far(batch: list[Window]) -> list[float]:
        """The fields of a comparison, then the layers."""
        tokens = torch.stack([text[w.start : w.stop] for w in batch]).to(source.device)
        # Summed on the CPU, as not every accelerator has fp64.
        return [figure.cpu().double().sum().item() for figure in _compare(source, result, tokens, chunk)]

    with evaluating(source), evaluating(result), quiet():  # some classes warn of ids that could be padding
        sums = map_batches(far, windows, batch_size, workers, progress)
    kl, agreed, loss, source_loss, *layers = (math.fsum(column) for column in zip(*sums, strict=True))
    scored, held = sum(w.scored for w in windows), sum(w.stop - w.start for w in windows)
    layer_errors = [total / held for total in layers]
    return Distance(kl / scored, agreed / scored, loss / scored, source_loss / scored, layer_errors)


def _compare(source, result, tokens: Tensor, chunk: int | None) -> list[Tensor]:
    """The fields of a `Comparison`, each [B, T - 1], then the layers' errors, each [B, T], for tokens [B, T]."""
    source_layers, result_layers = decoder_layers(source), decoder_layers(result)
    if len(source_layers) != len(result_layers):
        raise UserError(f"{len(result_layers)} decoder layers do not compare with the source's {len(source_layers)}")
    states: deque[Tensor] = deque()
    errors: list[Tensor] = []
    scale = _residual_scale(result) / _residual_scale(source)
    with _listening(source_layers, states.append):
        source_hidden = hidden_states(source, tokens)
    with _listening(result_layers, lambda state: errors.append(_token_errors(states.popleft(), state, scale))):
        hidden = hidden_states(result, tokens)
    # Position t predicts token t + 1.
    compared = compare_hidden(source, source_hidden[:, :-1], result, hidden[:, :-1], tokens[:, 1:], chunk=chunk)
    return [*compared, *errors]


def decoder_layers(model) -> nn.ModuleList:
    """The decoder layers of a causal language model, first to last.

    Raises:
        UserError: its decoder holds no list of that many modules.
    """
    count = _text_config(model).num_hidden_layers
    for module in model.get_decoder().modules():  # outer before inner, so a layer's own lists come after it
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{type(model).__name__} keeps no list of {count} decoder layers, so layers cannot be compared")


@contextmanager
def _listening(layers: Iterable[nn.Module], take: Callable[[Tensor], None]) -> Iterator[None]:
    """Hand every layer's output [B, T, D] to `take` as it appears."""

    def hook(module: nn.Module, args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
        take(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _residual_scale(model) -> float:
    """What an export multiplied the residual stream by, so that its norms' eps could be another; 1 for other models.

    Raises:
        UserError: its config says no such number.
    """
    block = getattr(model.config, BLOCK, None)
    if not isinstance(block, Mapping):
        return 1.0
    scale = block.get("residual_scale", 1.0)
    if type(scale) not in (int, float) or not 0 < scale < math.inf:
        raise UserError(f"residual_scale is {scale} in the {BLOCK} block of a config.json; export the model again")
    return scale


def _token_errors(source: Tensor, result: Tensor, scale: float = 1.0) -> Tensor:
    """Relative errors [B, T] of hidden states [B, T, D], of which the result's are `scale` times as large; in fp32 or
    fp64."""
    wide = torch.float64 if source.dtype == torch.float64 else torch.float32
    source = source.to(wide)
    norm = source.norm(dim=-1).clamp_min(torch.finfo(wide).tiny)  # equal zeros have no error
    return (result.to(wide) / scale - source).norm(dim=-1) / norm


def check_tokenizer(src: str | Path, out: str | Path, text: TokenizedText) -> None:
    """Refuse a result whose tokenizer reads the text in another way than its source's.

    Raises:
        UserError: so it is.
    """
    if not (Path(out) / "tokenizer.json").is_file():
        return
    theirs = token_ids(out, load_tokenizer(out), text.joined)
    if theirs != text.ids:
        place = next(i for i, (a, b) in enumerate(zip_longest(theirs, text.ids)) if a != b)
        raise UserError(
            f"the tokenizer of {out} reads another token {place} in the text than that of {src}; "
            "copy the source's tokenizer files into it"
        )


def check_alike(src: str | Path, out: str | Path, source, result) -> None:
    """Refuse a result whose config does not go with its source's.

    Raises:
        UserError: so it is.
    """
    for name, meaning in _ALIKE.items():
        theirs, ours = (getattr(config.get_text_config(decoder=True), name) for config in (source, result))
        if theirs != ours:
            raise UserError(f"{out} has a {meaning} of {ours}, {src} of {theirs}; is it that source's result?")


def _text_config(model):
    return model.config.get_text_config(decoder=True)


def _why_failed(far: Distance, max_loss: float, max_ratio: float | None, threshold: float, bad: int | None) -> str:
    """One line that says what is wrong and where it begins, or nothing if nothing is."""
    if bad is None:
        worst = max(range(len(far.layer_errors)), key=far.layer_errors.__getitem__)
        where = f"no layer's error exceeds {threshold:g} (the largest is {far.layer_errors[worst]:.3g}, layer {worst})"
    else:
        where = f"the first bad layer is {bad}, with an error of {far.layer_errors[bad]:.3g} (threshold {threshold:g})"
    for name, figure in {"source's loss": far.source_loss, "loss": far.loss, "divergence": far.kl}.items():
        if not math.isfinite(figure):
            return f"the {name} is {figure}; look for non-finite weights, or try a wider --dtype; {where}"
    if far.loss > max_loss >= far.source_loss:  # where the source does no better, this says nothing of its result
        return (
            f"the loss after conversion is {far.loss:.4g} nats per token, above ln(vocabulary) = {max_loss:.4g}, "
            f"which guessing reaches (the source's is {far.source_loss:.4g}); {where}"
        )
    ratio = _exp(far.loss - far.source_loss)
    if max_ratio is not None and ratio > max_ratio:
        return f"the perplexity is {ratio:.4g} times the source's, above the {max_ratio:g} allowed; {where}"
    return ""


def _exp(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None
