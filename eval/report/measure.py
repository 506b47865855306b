"""Measure conversions of one model, and show how they compare on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...common.errors import EnvironmentFailure, UserError
from ...common.kvcache import (
    ELEMENT_BYTES,
    attention_kind,
    context_length,
    kv_bytes,
    num_key_value_heads,
)
from ...common.loading import load_model
from ...common.parallel import is_main_process
from ...common.progress import Progress, Stages, silent
from ...common.text import BUILTIN
from ..cache import CacheReport, measure_cache
from ..compare import CompareReport, compare
from ..speed.measure import DEFAULT_CONTEXTS, measure_speed
from ..speed.record import SpeedReport
from .commands import command_lines
from .names import short_names
from .record import CacheGrowth, Growth, Report, Result
from .runs import describe, recipes, uptraining
from .verdict import FEW_TOKENS, judge
from .write import check_report, write_report

DEFAULT_RATIO = 1.1
SHORTEST = 256  # tokens at which the growth of caches begins
UNBOUNDED = 32768  # tokens at which it ends where a model sets no bound
STEPS = 8  # tokens of a block that is timed
PROMPTS = 1  # that are timed of each model; the page is about decoding

_COMPARED = ("perplexity", "perplexity_ratio", "loss", "kl", "top1_agreement", "layer_errors")
_COMPARED += ("first_bad_layer", "passed", "reason")


def report(
    src: str | Path,
    outs: Sequence[str | Path],
    *,
    out: str | Path,
    text: Sequence[str] = (BUILTIN,),
    window: int | None = None,
    max_windows: int | None = None,
    batch_size: int = 1,
    speed: bool = True,
    contexts: Sequence[int] = (),
    max_ratio: float = DEFAULT_RATIO,
    runs: Sequence[str | Path] = (),
    title: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Stages = silent,
) -> Report:
    """Measure how results compare with their source and with one another, and write a page that shows it.

    Several processes share the comparison, and the first writes; speed is measured in a single process only.

    Args:
        src: directory, GGUF file or Hub id.
        outs: the same, of the results; at least one.
        out: the directory to create, with `index.html`, `report.json` and `charts/*.png`. Whole or not at all.
        text, window, max_windows, batch_size, dtype, device: see `eval.compare.compare`.
        speed: whether to measure decode speed too, for which all models are in memory at a time; where that cannot be,
            a warning says why.
        contexts: tokens cached where speed is measured; see `eval.speed`.
        max_ratio: the perplexity, as a multiple of the source's, up to which a result will do.
        runs: folders of uptrainings that are not beside their results as `OUT.run`.
        title: of the page; the source's name by default.
        revision: of `src`, if it is a Hub id.
        overwrite: replace an earlier report at `out`.
        progress: called with the name of each stage.

    Raises:
        UserError: a model, a text or a number does not fit, or `out` may not be written.
        EnvironmentFailure: see `common.loading.load_model`; or the disk is full.
    """
    models = [str(src), *map(str, outs)]
    if not 0 < max_ratio < float("inf"):
        raise UserError(f"a perplexity ratio of {max_ratio} bounds nothing; give a positive number such as 1.1")
    names = _names(models)
    check_report(Path(out), overwrite=overwrite)
    made = {name: recipes(model) for name, model in zip(names, models, strict=True)}
    curves, warnings = uptraining(dict(zip(names[1:], models[1:], strict=True)), made, runs)

    scoring: dict[str, Any] = {
        "text": tuple(text),
        "window": window,
        "max_windows": max_windows,
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
        "revision": revision,
    }
    with progress("comparing") as advance:
        compared = compare(src, outs, progress=advance, **scoring)
    with progress("sizing caches") as advance:
        sized = _sizes(models, device=device, revision=revision, progress=advance)
    timed = None
    if speed:
        try:
            with progress("timing") as advance:
                timed = _time(models, names, contexts, dtype=dtype, device=device, revision=revision, progress=advance)
        except (UserError, EnvironmentFailure) as error:  # all that was measured until now is of use without it
            warnings.append(f"decode speed was not measured: {error}")

    rows = [
        _result(name, size, sized[0], figures, [describe(recipe) for recipe in made[name]])
        for name, size, figures in zip(names, sized, _figures(compared), strict=True)
    ]
    results, verdict = judge(rows, max_ratio)
    if compared.tokens < FEW_TOKENS:
        warnings.append(f"only {compared.tokens:,} tokens were scored, of which a perplexity says little; score more")
    measured = Report(
        title=title or names[0],
        model=str(src),
        kvfold_version=__version__,
        verdict=verdict,
        protocol=compared.protocol,
        tokens=compared.tokens,
        windows=compared.windows,
        cache_context=sized[0].cache.context,
        results=results,
        cache_growth=_growth(names, sized),
        speed=timed,
        uptraining=curves,
        commands=command_lines(
            models,
            str(out),
            {**scoring, "max_ratio": max_ratio, "speed": speed, "contexts": contexts, "runs": runs, "title": title},
            cached=sized[0].cache.context,
            timed=list(dict.fromkeys(row.context for row in timed.results)) if timed else [],
            steps=STEPS,
        ),
        warnings=warnings,
    )
    if is_main_process():
        with progress("drawing"):
            write_report(measured, Path(out), overwrite=overwrite)
    return measured


def _names(models: Sequence[str]) -> list[str]:
    for number, model in enumerate(models):
        if model in models[:number]:
            raise UserError(f"{model} is named twice; name the source once and every result once")
    return short_names(models)


@dataclass(frozen=True)
class _Size:
    """What a model is and caches."""

    config: Any
    parameters: int
    cache: CacheReport


def _sizes(
    models: Sequence[str], *, device: str, revision: str | None, progress: Progress, context: int | None = None
) -> list[_Size]:
    """Run each model once, in its own dtype, for bytes are what is asked for; all at the same context."""
    sized = []
    for number, model in enumerate(models):
        loaded = load_model(model, dtype="checkpoint", device=device, revision=None if number else revision)
        cache = measure_cache(loaded, model=model, context=context)
        sized.append(_Size(loaded.config, loaded.num_parameters(), cache))
        progress(number + 1, len(models))
    shortest = min(size.cache.context for size in sized)
    if any(size.cache.context > shortest for size in sized):
        return _sizes(models, device=device, revision=revision, progress=progress, context=shortest)
    return sized


def _time(
    models: Sequence[str],
    names: Sequence[str],
    contexts: Sequence[int],
    *,
    dtype: str,
    device: str,
    revision: str | None,
    progress: Progress,
) -> SpeedReport:
    """Decode speed of all models side by side."""
    source = load_model(models[0], dtype=dtype, device=device, revision=revision)
    same = str(source.dtype).removeprefix("torch.")
    loaded = [source, *(load_model(model, dtype=same, device=device) for model in models[1:])]
    return measure_speed(
        dict(zip(names, loaded, strict=True)),
        contexts=contexts or _speed_contexts([model.config for model in loaded]),
        steps=STEPS,
        prefill_runs=PROMPTS,
        progress=progress,
    )


def _speed_contexts(configs: Sequence[Any]) -> list[int]:
    """The usual ones, or parts of the shortest context where not every model takes them all."""
    room = _shortest(configs) - STEPS
    return (
        list(DEFAULT_CONTEXTS)
        if room >= max(DEFAULT_CONTEXTS)
        else sorted({room // part or 1 for part in (8, 4, 2, 1)})
    )


def _shortest(configs: Sequence[Any]) -> int:
    return min(context_length(config) or UNBOUNDED for config in configs)


def _figures(compared: CompareReport) -> list[dict[str, Any]]:
    """What comparison says of each model, the source first."""
    source = {
        "perplexity": compared.perplexity,
        "perplexity_ratio": None if compared.perplexity is None else 1.0,
        "loss": compared.loss,
        "passed": compared.perplexity is not None,
    }
    return [source, *({name: getattr(row, name) for name in _COMPARED} for row in compared.results)]


def _result(name: str, size: _Size, source: _Size, figures: dict[str, Any], made_by: list[str]) -> Result:
    kind, cache = attention_kind(size.config), size.cache
    text_config = size.config.get_text_config(decoder=True)
    latent = kind == "MLA"
    elements = cache.kv_elements_per_token_per_layer
    return Result(
        model=cache.model,
        name=name,
        attention_kind=kind,
        num_key_value_heads=None if latent else num_key_value_heads(size.config),
        kv_lora_rank=text_config.kv_lora_rank if latent else None,
        qk_rope_head_dim=text_config.qk_rope_head_dim if latent else None,
        parameters=size.parameters,
        kv_elements_per_token_per_layer=elements,
        kv_bytes_per_token=cache.kv_bytes_per_token,
        kv_ratio=elements / source.cache.kv_elements_per_token_per_layer,
        kv_dtype=cache.dtype,
        kv_bytes=cache.kv_bytes,
        measured_kv_bytes=cache.measured_kv_bytes,
        made_by=made_by,
        **figures,
    )


def _growth(names: Sequence[str], sized: Sequence[_Size]) -> CacheGrowth:
    """Caches at powers of two, up to the shortest context of all, which is the last."""
    longest = _shortest([size.config for size in sized])
    contexts = [1 << power for power in range(longest.bit_length()) if SHORTEST <= 1 << power < longest]
    contexts.append(longest)
    return CacheGrowth(
        contexts,
        [
            Growth(name, [kv_bytes(size.config, context, ELEMENT_BYTES[size.cache.dtype]) for context in contexts])
            for name, size in zip(names, sized, strict=True)
        ],
    )
