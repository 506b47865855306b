"""MHA or GQA -> fewer KV heads: which tensors of the result are made of which of the source's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import UserError
from ..common.kvcache import cached_tokens, head_dim, num_key_value_heads
from ..common.parallel import is_main_process
from ..common.progress import Stages, silent
from ..common.text import NO_TEXT
from .calibration.reader import tensor_reader
from .calibration.text import CalibText
from .checks import account, check_convertible, check_method
from .directory import check_paths, lay_out, write_directory, written_figures
from .families import FAMILIES, Promise, Sizes
from .headers import FLOATS, ITEM_BYTES, TensorInfo, main_dtype
from .merge.apply import members, merge_stored
from .merge.layers import LayerMerges
from .merge.methods import find_method
from .merge.whole_heads import Knobs
from .request import asked_for, doubts, rehearse, request, said_of
from .source import Source, open_source
from .stream import Output, cast

if TYPE_CHECKING:
    import torch

WEIGHTS_ONLY = "merged by weights alone; on real models that can lose more than the mean, so leave --calib none out"


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did, or would do.

    `kv_elements_per_token_per_layer` and `kv_bytes_per_token` (over all layers, in the checkpoint's dtype)
    are of the result, the `source_` ones of the source. `bytes` counts the weights.

    `stats` is the file of statistics that was used, made of `calib_tokens` tokens; empty where none was. Where the
    result was refined, `layer_errors_before` and `layer_errors_after` say how far each layer was from the source, see
    `refine.Refined`.
    """

    model: str
    source: str
    family: str
    method: str
    grouping: str
    num_attention_heads: int
    source_num_key_value_heads: int
    num_key_value_heads: int
    source_kv_elements_per_token_per_layer: int
    kv_elements_per_token_per_layer: int
    source_kv_bytes_per_token: int
    kv_bytes_per_token: int
    kv_ratio: float
    dtype: str
    shards: int
    bytes: int
    tensors_merged: int
    tensors_copied: int
    tensors_dropped: list[str]
    files_left_out: list[str]
    dry_run: bool
    stats: str = ""
    calib_tokens: int = 0
    calib_kinds: dict[str, int] = field(default_factory=dict)
    refine_windows: int = 0
    refine_passes: int = 0
    refine_text: str = ""
    refine_kinds: dict[str, int] = field(default_factory=dict)
    layer_errors_before: list[float] = field(default_factory=list)
    layer_errors_after: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def convert_gqa(
    src: str | Path,
    out: str | Path,
    *,
    kv_heads: int,
    method: str = "svd",
    grouping: str = "contiguous",
    calib: Sequence[str] = (),
    calib_windows: int = CalibText.windows,
    calib_window: int | None = None,
    calib_builtin: bool = True,
    chat: bool = False,
    fisher: bool = True,
    offload: bool = False,
    stats: str | Path | None = None,
    refine: int = 0,
    refine_passes: int | None = None,
    device: str = "auto",
    calib_dtype: str = "auto",
    calib_batch_size: int = 1,
    seed: int = 0,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    hash: bool = True,
    revision: str | None = None,
    progress: Stages = silent,
) -> ConvertReport:
    """Convert a checkpoint to fewer KV heads by merging the heads of each group.

    Args:
        src: a checkpoint directory, a GGUF file, or a Hub id.
        out: the directory to create; it appears whole or not at all.
        kv_heads: KV heads of the result; 1 is MQA. Must divide the source's.
        method: one of `merge.methods.METHODS`.
        grouping: which heads form a group: neighbours (`contiguous`), or those that lose least together (`similar`).
        calib, calib_windows, calib_window, calib_builtin, chat: the text of calibration and refinement, see
            `calibration.text.CalibText`. `("none",)` merges by weights alone.
        fisher, offload, calib_dtype, calib_batch_size, device: see `calibration.knobs.Calibration`.
        stats: a file of `calibrate` to use; one in the cache if None, made at the first conversion.
        refine, refine_passes: windows of text to refine on, and passes over them (3); see `refine.refine_layers`.
        seed: for methods that draw random numbers.
        dtype: of the result's floating-point tensors; the source's own if None.
        max_shard_size: bytes a shard; the source's own sharding if None.
        overwrite: replace an existing checkpoint at `out`.
        dry_run: check and plan everything, write nothing.
        hash: record an xxh3 hash of every file written.
        revision: of a Hub repository.
        progress: opens a progress for each stage.

    Raises:
        UserError: the source cannot be converted, or `out` may not be written. Nothing was written.
        EnvironmentFailure: no room on the disk, or the Hub cannot be reached.
    """
    asked_of_user = asked_for(convert_gqa, locals())
    check_paths(str(src), str(out), overwrite=overwrite)
    src, out = str(src), Path(out)
    row = find_method(method)
    asked = request(
        calib=calib,
        calib_windows=calib_windows,
        calib_window=calib_window,
        calib_builtin=calib_builtin,
        chat=chat,
        fisher=fisher,
        offload=offload,
        stats=stats,
        refine=refine,
        refine_passes=refine_passes,
        device=device,
        calib_dtype=calib_dtype,
        calib_batch_size=calib_batch_size,
        dtype=dtype,
        max_shard_size=max_shard_size,
        compares=row.mixes_channels or grouping == "similar",
        method=f"--method {method}",
    )
    with ExitStack() as stack:
        source = stack.enter_context(open_source(src, revision=revision))
        check_convertible(source, kv_heads)
        check_method(source, method, row)
        changes = kv_heads != num_key_value_heads(source.config)
        if asked.refining and not changes:
            raise UserError(f"the source has {kv_heads} KV heads already, so --refine has nothing to do; leave it out")
        promised = account(source.family, source.config, source.checkpoint.tensors)
        config = edited_config(source, kv_heads, dtype)
        merging = partial(
            LayerMerges,
            source,
            row,
            tensor_reader(source.checkpoint, promised),
            kv_heads=kv_heads,
            grouping=grouping,
            knobs=Knobs(seed, source.config.initializer_range),
        )
        plan = partial(_plan, source, promised, kv_heads=kv_heads, dtype=dtype)
        outputs = plan(merging())
        report = _report(source, out, kv_heads, method, grouping, outputs, promised, max_shard_size, dry_run)
        asked = replace(asked, compares=changes and asked.compares)
        if asked.compares and asked.weights_only:
            report = replace(report, warnings=[WEIGHTS_ONLY])
        if dry_run:
            return rehearse(report, source, asked)
        about = learnt = None
        if asked.compares or asked.refining:
            from .calibration.calibrate import Runner, find_statistics

            runner, statistics = Runner(source, asked.how), None
            if asked.calibrates:
                statistics = find_statistics(runner, asked.stats, progress)
                about = statistics.about
                warnings = [*report.warnings, *doubts(asked, statistics)]
                report = replace(report, **said_of(statistics), warnings=warnings)
            outputs = plan(merging(statistics=statistics, device=runner.device))
            if asked.refining:
                from .refine import refine_layers

                outputs, refined = stack.enter_context(refine_layers(runner, outputs, config, asked.refining, progress))
                report = replace(report, **asdict(refined))
                learnt = asdict(asked.refining) | {"text": refined.refine_text, "kinds": refined.refine_kinds}
        if not is_main_process():
            return report
        with progress("writing") as advance:
            left_out = write_directory(
                source,
                out,
                lay_out(source, outputs, max_shard_size),
                config=config,
                recipe={
                    "command": "convert gqa",
                    "kv_heads": kv_heads,
                    "method": method,
                    "grouping": grouping,
                    "calibration": asdict(about) if about else NO_TEXT if asked.compares else None,
                    "refine": learnt,
                    "seed": seed,
                    "dtype": dtype,
                    "max_shard_size": max_shard_size,
                },
                dropped=report.tensors_dropped,
                overwrite=overwrite,
                hashing=hash,
                progress=advance,
                asked=asked_of_user,
            )
    return replace(report, files_left_out=left_out)


def _plan(
    source: Source, promised: dict[str, Promise], merges: LayerMerges, *, kv_heads: int, dtype: str | None
) -> list[Output]:
    """Every tensor of the result, in the source's order."""
    stored = source.checkpoint.tensors
    target = FAMILIES[source.family.becomes or source.family.name]
    sizes, terms = Sizes(source.config), merges.terms
    outputs = []
    for promise in target.promises(source.config, stored, kv_heads).values():
        infos = _origins(promise, stored, sizes, merges)
        if promise.weight.rule == "drop" or not infos:
            continue
        axes = promised[infos[0].name].weight.shape
        transpose = axes != promise.weight.shape
        make: Callable[[list[torch.Tensor]], torch.Tensor] | None = None
        if len(infos) > 1 or any(term in terms for axis in axes for term in axis):
            make = partial(
                _merge,
                merges=merges,
                layer=promise.slots["layer"],
                group=promise.slots.get("kv_head"),
                name=promise.name,
                shape=axes,
                sizes=sizes,
                transpose=transpose,
            )
        elif transpose:
            make = _transpose
        if make and (bad := next((info for info in infos if info.dtype not in FLOATS), None)):
            raise UserError(f"tensor {bad.name} is {bad.dtype}; only {', '.join(FLOATS)} can be computed with")
        outputs.append(Output(promise.name, cast(infos[0].dtype, dtype), promise.shape, infos, make))
    order = {name: position for position, name in enumerate(stored)}
    return sorted(outputs, key=lambda output: order[output.sources[0].name])


def _merge(tensors: list[torch.Tensor], *, merges: LayerMerges, layer: int, **where: Any) -> torch.Tensor:
    return merge_stored(tensors, merge=merges.merge(layer), **where)


def _transpose(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].mT


def _origins(
    promise: Promise, stored: dict[str, TensorInfo], sizes: Sizes, merges: LayerMerges
) -> tuple[TensorInfo, ...]:
    """The stored tensors behind a promised one: itself, or the right heads where each is stored apart."""
    slots = [promise.slots]
    if "kv_head" in promise.slots:
        groups = merges.groups(promise.slots["layer"])
        slots = [{**promise.slots, "kv_head": head} for head in groups[promise.slots["kv_head"]]]
    elif "head" in promise.slots:
        groups = members(merges.groups(promise.slots["layer"]), "H", sizes)
        heads = list(chain.from_iterable(groups))
        slots = [{**promise.slots, "head": heads[promise.slots["head"]]}]
    names = [promise.template.format(**numbers) for numbers in slots]
    return tuple(stored[name] for name in names if name in stored)


def _report(
    source: Source,
    out: Path,
    kv_heads: int,
    method: str,
    grouping: str,
    outputs: Sequence[Output],
    promised: dict[str, Promise],
    max_shard_size: int | None,
    dry_run: bool,
) -> ConvertReport:
    heads, caching = num_key_value_heads(source.config), sum(cached_tokens(source.config, 1))
    before, after = (2 * n * head_dim(source.config) for n in (heads, kv_heads))
    source_dtype = main_dtype(info for output in outputs for info in output.sources)
    return ConvertReport(
        model=str(out),
        source=source.name,
        family=source.family.name,
        method=method,
        grouping=grouping,
        num_attention_heads=source.config.num_attention_heads,
        source_num_key_value_heads=heads,
        num_key_value_heads=kv_heads,
        source_kv_elements_per_token_per_layer=before,
        kv_elements_per_token_per_layer=after,
        source_kv_bytes_per_token=before * caching * ITEM_BYTES[source_dtype],
        kv_bytes_per_token=after * caching * ITEM_BYTES[main_dtype(outputs)],
        kv_ratio=after / before,
        **written_figures(source, outputs, max_shard_size),
        tensors_merged=sum(output.make is not None for output in outputs),
        tensors_dropped=[name for name, promise in promised.items() if promise.weight.rule == "drop"],
        files_left_out=[],
        dry_run=dry_run,
    )


def edited_config(source: Source, kv_heads: int, dtype: str | None) -> dict[str, Any]:
    """The result's config.json: the source's own words, and only what conversion changes."""
    config = dict(source.config.raw)
    if source.family.becomes:  # the new architecture has other defaults, so every value is spelled out
        config = {**source.config.full.to_dict(), **config, **source.family.config}
    elif not source.family.only_kv_heads:
        config["num_key_value_heads"] = kv_heads
    if dtype is not None:
        config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config} or {"dtype": dtype}
    return config
