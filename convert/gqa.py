"""MHA or GQA -> fewer KV heads: which tensors of the result are made of which of the source's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..common.kvcache import cached_tokens, head_dim, num_key_value_heads
from ..common.progress import Progress
from .checks import account, check_convertible
from .directory import Layout, check_paths, lay_out, write_directory
from .families import FAMILIES, Promise, Sizes
from .headers import FLOATS, ITEM_BYTES, TensorInfo, main_dtype
from .merge import Knobs, find_method, holds_kv_heads, merge_stored
from .source import Source, open_source
from .stream import Output


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did, or would do.

    `kv_elements_per_token_per_layer` and `kv_bytes_per_token` (over all layers, in the checkpoint's dtype)
    are of the result, the `source_` ones of the source. `bytes` counts the weights.
    """

    model: str
    source: str
    family: str
    method: str
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


def convert_gqa(
    src: str | Path,
    out: str | Path,
    *,
    kv_heads: int,
    method: str = "mean",
    seed: int = 0,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    hash: bool = True,
    revision: str | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert a checkpoint to fewer KV heads by merging the heads of each group.

    Args:
        src: a checkpoint directory, a GGUF file, or a Hub id.
        out: the directory to create; it appears whole or not at all.
        kv_heads: KV heads of the result; 1 is MQA. Must divide the source's.
        method: one of `merge.METHODS`.
        seed: for methods that draw random numbers.
        dtype: of the result's floating-point tensors; the source's own if None.
        max_shard_size: bytes a shard; the source's own sharding if None.
        overwrite: replace an existing checkpoint at `out`.
        dry_run: check and plan everything, write nothing.
        hash: record an xxh3 hash of every file written.
        revision: of a Hub repository.
        progress: called with bytes done and bytes in all.

    Raises:
        UserError: the source cannot be converted, or `out` may not be written. Nothing was written.
        EnvironmentFailure: no room on the disk, or the Hub cannot be reached.
    """
    check_paths(str(src), str(out), overwrite=overwrite)
    src, out = str(src), Path(out)
    find_method(method)
    if dtype is not None and dtype not in FLOATS.values():
        raise UserError(f"dtype {dtype} cannot be written; choose one of {', '.join(FLOATS.values())}")
    if max_shard_size is not None and max_shard_size < 1:
        raise UserError(f"a shard of {max_shard_size} bytes holds nothing; give a positive size such as 5GB")
    with open_source(src, revision=revision) as source:
        check_convertible(source, kv_heads)
        outputs, dropped = _plan(source, kv_heads, method, seed, dtype)
        layout = lay_out(source, outputs, max_shard_size)
        report = _report(source, out, kv_heads, method, layout, dropped, dry_run)
        if dry_run:
            return report
        left_out = write_directory(
            source,
            out,
            layout,
            config=edited_config(source, kv_heads, dtype),
            recipe={
                "command": "convert gqa",
                "kv_heads": kv_heads,
                "method": method,
                "seed": seed,
                "dtype": dtype,
                "max_shard_size": max_shard_size,
            },
            dropped=dropped,
            overwrite=overwrite,
            hashing=hash,
            progress=progress,
        )
    return replace(report, files_left_out=left_out)


def _plan(source: Source, kv_heads: int, method: str, seed: int, dtype: str | None) -> tuple[list[Output], list[str]]:
    """Every tensor of the result, in the source's order, and the names that have no successor."""
    stored = source.checkpoint.tensors
    origins = account(source.family, source.config, stored)
    target = FAMILIES[source.family.becomes or source.family.name]
    sizes = Sizes(source.config)
    knobs = Knobs(seed, source.config.initializer_range)
    merge = find_method(method)
    outputs = {}
    for promise in target.promises(source.config, stored, kv_heads).values():
        infos = _origins(promise, stored, sizes["G"] // kv_heads)
        if promise.weight.rule == "drop" or not infos:
            continue
        axes = origins[infos[0].name].weight.shape
        transpose = axes != promise.weight.shape
        make: Callable[..., Any] | None = None
        if transpose or len(infos) > 1 or (kv_heads != sizes["G"] and holds_kv_heads(axes)):
            fold = partial(merge, name=promise.name, knobs=knobs)
            if bad := next((info for info in infos if info.dtype not in FLOATS), None):
                raise UserError(f"tensor {bad.name} is {bad.dtype}; only {', '.join(FLOATS)} can be computed with")
            make = partial(merge_stored, shape=axes, sizes=sizes, groups=kv_heads, fold=fold, transpose=transpose)
        outputs[infos[0].name] = Output(promise.name, _cast(infos[0].dtype, dtype), promise.shape, infos, make)
    dropped = [name for name, origin in origins.items() if origin.weight.rule == "drop"]
    return [outputs[name] for name in stored if name in outputs], dropped


def _origins(promise: Promise, stored: dict[str, TensorInfo], group: int) -> tuple[TensorInfo, ...]:
    """The stored tensors behind a promised one: itself, or a group's heads where each is stored apart."""
    slots = [promise.slots]
    if "kv_head" in promise.slots:
        first = promise.slots["kv_head"] * group
        slots = [{**promise.slots, "kv_head": first + i} for i in range(group)]
    names = [promise.template.format(**numbers) for numbers in slots]
    return tuple(stored[name] for name in names if name in stored)


def _cast(stored: str, wanted: str | None) -> str:
    if wanted is None or stored not in FLOATS:
        return stored
    return next(header for header, name in FLOATS.items() if name == wanted)


def _report(
    source: Source, out: Path, kv_heads: int, method: str, layout: Layout, dropped: list[str], dry_run: bool
) -> ConvertReport:
    outputs = [output for _, shard, _ in layout for output in shard]
    heads, caching = num_key_value_heads(source.config), sum(cached_tokens(source.config, 1))
    before, after = (2 * n * head_dim(source.config) for n in (heads, kv_heads))
    source_dtype = main_dtype(info for output in outputs for info in output.sources)
    dtype = next(output.dtype for output in outputs if output.sources[0].dtype == source_dtype)
    return ConvertReport(
        model=str(out),
        source=source.name,
        family=source.family.name,
        method=method,
        num_attention_heads=source.config.num_attention_heads,
        source_num_key_value_heads=heads,
        num_key_value_heads=kv_heads,
        source_kv_elements_per_token_per_layer=before,
        kv_elements_per_token_per_layer=after,
        source_kv_bytes_per_token=before * caching * ITEM_BYTES[source_dtype],
        kv_bytes_per_token=after * caching * ITEM_BYTES[dtype],
        kv_ratio=after / before,
        dtype=FLOATS.get(dtype, dtype),
        shards=len(layout),
        bytes=sum(output.nbytes for output in outputs),
        tensors_merged=sum(output.make is not None for output in outputs),
        tensors_copied=sum(output.make is None for output in outputs),
        tensors_dropped=dropped,
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
