"""Measure conversions of one model, and show how they compare on one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ... import __version__
from ...common.errors import EnvironmentFailure, KvfoldError, UserError, did_you_mean
from ...common.kvcache import (
    ELEMENT_BYTES,
    attention_kind,
    context_length,
    kv_bytes,
    num_key_value_heads,
)
from ...common.loading import DTYPES, load_model, resolve_device
from ...common.parallel import is_main_process
from ...common.progress import Progress, Stages, silent
from ...common.raw_config import read_raw_config
from ...common.sources import check_there, first_line
from ...common.text import BUILTIN
from ...common.windows import batches, split_windows
from ..cache import CacheReport, measure_cache
from ..compare import CompareReport, compare
from ..speed.measure import DEFAULT_CONTEXTS, measure_speed
from ..speed.record import SpeedReport
from .commands import command_lines, scoring_flags
from .names import short_names
from .plain import cleaned, plain_names
from .record import CacheGrowth, Growth, Report, Result
from .runs import describe, recipes, uptraining
from .verdict import FEW_TOKENS, judge
from .write import check_report, write_report

_MEMORY = Path("/proc/meminfo")
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
    context: Sequence[int] = (),
    max_ratio: float = DEFAULT_RATIO,
    run: Sequence[str | Path] = (),
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
        speed: whether to measure decode speed too, for which all models are in memory at a time; where that fails,
            a warning says why.
        context: tokens cached where speed is measured; see `eval.speed`.
        max_ratio: the perplexity, as a multiple of the source's, up to which a result will do.
        run: folders of uptrainings that are not beside their results as `OUT.run`.
        title: of the page; the source's name by default.
        revision: of `src`, if it is a Hub id.
        overwrite: replace an earlier report at `out`.
        progress: called with the name of each stage.

    Raises:
        UserError: a model, a text or a number does not fit, or `out` may not be written. What can be known without a
            model is said before one is loaded.
        EnvironmentFailure: see `common.loading.load_model`; or the disk is full.
    """
    models = [str(src), *map(str, outs)]
    _check_numbers(window, max_windows, batch_size, max_ratio)
    _check_timing(context, speed=speed)
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}{did_you_mean(dtype, DTYPES)}")
    names = _names(models)
    check_report(Path(out), overwrite=overwrite)
    check_there(*models, revision=revision)
    for folder in filter(Path.is_dir, map(Path, models)):
        read_raw_config(folder)
    resolve_device(device)
    made = {name: recipes(model) for name, model in zip(names, models, strict=True)}
    curves, warnings = uptraining(dict(zip(names[1:], models[1:], strict=True)), made, run)

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
            if resolve_device(device) == "cpu":
                _check_memory(sized, {"auto": "float32", "checkpoint": sized[0].cache.dtype}.get(dtype, dtype))
            with progress("timing") as advance:
                timed = _time(models, names, context, dtype=dtype, device=device, revision=revision, progress=advance)
        except Exception as error:  # whatever it is, all that was measured until now is of use without it
            warnings.append(f"decode speed was not measured: {_in_a_line(error)}")

    rows = [
        _result(name, size, sized[0], figures, [describe(recipe) for recipe in made[name]])
        for name, size, figures in zip(names, sized, _figures(compared), strict=True)
    ]
    results, verdict = judge(rows, max_ratio, tokens=compared.tokens, scoring=scoring_flags(scoring))
    if compared.tokens < FEW_TOKENS:
        warnings.append(f"only {compared.tokens:,} tokens were scored, of which a perplexity says little; score more")
    given = {**scoring, "max_ratio": max_ratio, "speed": speed, "context": context, "run": run, "title": title}
    measured = cleaned(
        Report(
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
                models, str(out), given, cached=sized[0].cache.context, timed=timed and _timing_of(timed)
            ),
            warnings=warnings,
        )
    )
    if is_main_process():
        with progress("drawing"):
            write_report(measured, Path(out), overwrite=overwrite)
    return measured


def _check_numbers(window: int | None, max_windows: int | None, batch_size: int, max_ratio: float) -> None:
    """Refuse what no text and no model can make good; the words are those of whoever would refuse it later."""
    if not 0 < max_ratio < float("inf"):
        raise UserError(f"a perplexity ratio of {max_ratio} bounds nothing; give a positive number such as 1.1")
    windows = split_windows(2, 2 if window is None else window, max_windows=max_windows)
    list(batches(windows, batch_size))


def _check_timing(context: Sequence[int], *, speed: bool) -> None:
    if context and not speed:
        raise UserError("--context says where speed is measured, and --no-speed that it is not; leave one out")
    if wrong := [number for number in context if number < 1]:
        raise UserError(f"context {wrong[0]} leaves nothing to time; give 1 or more")


def _names(models: Sequence[str]) -> list[str]:
    if len(models) < 2:
        raise UserError("there is nothing to compare the source with; name at least one result")
    found: dict[str, str] = {}
    for model in models:
        if (known := found.get(identity := _identity(model))) is not None:
            also = "" if known == model else f", also as {known}"
            raise UserError(f"{model} is named twice{also}; name the source once and every result once")
        found[identity] = model
    return plain_names(short_names(models))


def _identity(model: str) -> str:
    """What a name leads to; names that lead nowhere here are the Hub's."""
    return os.path.realpath(model) if Path(model).exists() else str(PurePath(model))


def _check_memory(sized: Sequence[_Size], dtype: str) -> None:
    """Refuse models that do not fit into memory together: the system would end the process, and what it has measured.

    Raises:
        EnvironmentFailure: they do not, where the system says what is free.
    """
    if not _MEMORY.exists():
        return
    (free,) = (int(line.split()[1]) << 10 for line in _MEMORY.read_text().splitlines() if "MemAvailable" in line)
    if (needed := sum(size.parameters for size in sized) * ELEMENT_BYTES[dtype]) > free:
        raise EnvironmentFailure(
            f"{len(sized)} models take {needed:,} bytes of memory together and {free:,} are free; time fewer of them "
            "with kvfold eval speed"
        )


def _in_a_line(error: Exception) -> str:
    """Our own errors say what is wrong; of others, the kind says more than the words."""
    return str(error) if isinstance(error, KvfoldError) else f"{type(error).__name__}: {first_line(error)}"


def _timing_of(timed: SpeedReport) -> dict[str, Any]:
    """What gives the same timing again; the dtype is said, as each model's own may not be the one they shared."""
    return {
        "context": list(dict.fromkeys(row.context for row in timed.results)),
        "steps": STEPS,
        "dtype": timed.protocol.dtype,
    }


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
    context: Sequence[int],
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
        contexts=context or _speed_contexts([model.config for model in loaded]),
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
    """What comparison says of each model, the source first, which is held to guessing as its results are."""
    loss, perplexity = compared.source_loss, compared.source_perplexity
    reason = _why_worse(loss, compared.max_loss)
    figures = {
        "perplexity": perplexity,
        "perplexity_ratio": None if loss is None else 1.0,
        "loss": loss,
        "passed": not reason,
        "reason": reason,
    }
    return [figures, *({name: getattr(row, name) for name in _COMPARED} for row in compared.results)]


def _why_worse(loss: float | None, most: float) -> str:
    if loss is None:
        return "the source's loss is not finite; look for non-finite weights, or try a wider --dtype"
    if loss > most:
        return (
            f"the source's loss is {loss:.4g} nats per token, above ln(vocabulary) = {most:.4g}, which guessing "
            "reaches; score text that it can predict"
        )
    return ""


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
        kv_ratio=cache.kv_bytes_per_token / source.cache.kv_bytes_per_token,
        kv_elements_ratio=elements / source.cache.kv_elements_per_token_per_layer,
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
