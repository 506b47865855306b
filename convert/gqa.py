"""MHA or GQA -> fewer KV heads: the checks, the plan, and the new checkpoint directory."""

from __future__ import annotations

import difflib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import __version__
from ..common.atomic import check_output, output_directory
from ..common.errors import EnvironmentFailure, UserError, divisors
from ..common.kvcache import cached_tokens, head_dim, num_key_value_heads
from ..common.progress import Progress
from .checkpoint import INDEX
from .families import FAMILIES, Family, Promise, dimensions
from .headers import FLOATS, ITEM_BYTES, TensorInfo
from .merge import Knobs, find_method, holds_kv_heads, merge_stored
from .sidefiles import copy_side_files, hash_files
from .source import Source, open_source
from .stream import Output, shard_names, split_by_size, write_weights

RECORD = "kvfold.json"
FORMAT_VERSION = 1
_MARKER = "config.json"  # what an existing directory must hold before --overwrite replaces it
_SIDE_FILE_ROOM = 64 << 20

Layout = list[tuple[str, list[Output], dict[str, str]]]
"""File name, tensors and safetensors metadata of each shard to be written."""


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
    src, out = str(src), Path(out)
    find_method(method)
    if dtype is not None and dtype not in FLOATS.values():
        raise UserError(f"dtype {dtype} cannot be written; choose one of {', '.join(FLOATS.values())}")
    if max_shard_size is not None and max_shard_size < 1:
        raise UserError(f"a shard of {max_shard_size} bytes holds nothing; give a positive size such as 5GB")
    check_output(out, overwrite=overwrite, marker=_MARKER)
    _check_apart(Path(src), out)
    with open_source(src, revision=revision) as source:
        check_convertible(source, kv_heads)
        outputs, dropped = _plan(source, kv_heads, method, seed, dtype)
        layout = _lay_out(source, outputs, max_shard_size)
        report = _report(source, out, kv_heads, method, layout, dropped, dry_run)
        if dry_run:
            return report
        _check_room(out, report.bytes)
        with output_directory(out, overwrite=overwrite, marker=_MARKER) as staging:
            hashes = write_weights(staging, layout, source.checkpoint, hashing=hash, progress=progress)
            skip = {*source.checkpoint.files, "config.json", RECORD}
            side_hashes, left_out = copy_side_files(source.folder, staging, skip=skip, hashing=hash)
            report = replace(report, files_left_out=left_out)
            _write_json(staging / "config.json", edited_config(source, kv_heads, dtype))
            hashes |= side_hashes | hash_files(staging, ("config.json", INDEX), hashing=hash)
            recipe = {
                "command": "convert gqa",
                "kv_heads": kv_heads,
                "method": method,
                "seed": seed,
                "dtype": dtype,
            }
            _write_json(staging / RECORD, _record(source, recipe, outputs, report, hashes))
    return report


def obstacle(config: Any) -> str | None:
    """Why a model cannot be converted to fewer KV heads at all, or None."""
    if getattr(config, "kv_lora_rank", None):
        return "its attention is MLA already: it caches one latent a token and has no KV heads to merge"
    if config.model_type not in FAMILIES:
        near = difflib.get_close_matches(config.model_type, FAMILIES, n=1)
        hint = f"the nearest name is {near[0]}" if near else f"known are {', '.join(sorted(FAMILIES))}"
        return f"family {config.model_type!r} is not supported; {hint}"
    if quantization := getattr(config, "quantization_config", None):
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        return f"its weights are quantised ({kind}); convert the unquantised checkpoint"
    for attribute, reason in FAMILIES[config.model_type].refuses.items():
        if getattr(config, attribute, False):
            return f"{attribute} is true: {reason}"
    if config.model_type == "gpt_bigcode" and not config.multi_query:
        return "multi_query is false: gpt_bigcode then interleaves query, key and value rows"
    return None


def kv_head_choices(config: Any, family: Family) -> list[int]:
    """The KV head counts that a model can be converted to, its own included where the target can hold it."""
    choices = divisors(num_key_value_heads(config))
    return [n for n in choices if not family.only_kv_heads or n in family.only_kv_heads]


def check_convertible(source: Source, kv_heads: int) -> None:
    """Check family, features and head counts, before a tensor is looked at.

    Raises:
        UserError: with the numbers that are possible.
    """
    if reason := obstacle(source.config):
        raise UserError(f"{source.name} cannot be converted: {reason}")
    choices = kv_head_choices(source.config, source.family)
    if kv_heads not in choices:
        heads = num_key_value_heads(source.config)
        raise UserError(f"{heads} KV heads cannot form {kv_heads} groups; try {', '.join(map(str, choices))}")


def account(source: Source) -> dict[str, Promise]:
    """Match what is stored against what the family's table promises: each tensor once, none missing.

    Returns:
        The promise for every stored tensor, by name.

    Raises:
        UserError: names the first tensor that is missing, unknown, or of another shape.
    """
    stored = source.checkpoint.tensors
    promised = source.family.promises(source.config, stored)
    model = f"a {source.family.name} model with this config"
    for name, info in stored.items():
        if name not in promised:
            near = difflib.get_close_matches(name, promised, n=1)
            hint = f" (the nearest is {near[0]})" if near else ""
            raise UserError(f"tensor {name} has no place in {model}{hint}; remove it, or mend the config")
        promise = promised[name]
        if promise.weight.rule != "drop" and info.shape != promise.shape:
            raise UserError(f"tensor {name} has shape {list(info.shape)}; the config says {list(promise.shape)}")
    for name, promise in promised.items():
        if name not in stored and not promise.optional:
            raise UserError(f"tensor {name} is missing; {model} needs it")
    return {name: promised[name] for name in stored}


def _plan(source: Source, kv_heads: int, method: str, seed: int, dtype: str | None) -> tuple[list[Output], list[str]]:
    """Every tensor of the result, in the source's order, and the names that have no successor."""
    stored, origins = source.checkpoint.tensors, account(source)
    target = FAMILIES[source.family.becomes or source.family.name]
    sizes = dimensions(source.config)
    knobs = Knobs(seed, getattr(source.config, "initializer_range", 0.02))
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


def _lay_out(source: Source, outputs: Sequence[Output], max_shard_size: int | None) -> Layout:
    """Deal the outputs to files: as in the source, or anew by size."""
    # Wider elements first keeps every tensor aligned; it changes nothing in a file that the library wrote.
    if max_shard_size is not None:
        shards = split_by_size(outputs, max_shard_size)
        names = shard_names(len(shards))
        metadata = [source.checkpoint.metadata[shard[0].sources[0].shard] for shard in shards]
    else:
        by_shard: dict[str, list[Output]] = {}
        for out in outputs:
            by_shard.setdefault(out.sources[0].shard, []).append(out)
        shards = list(by_shard.values())
        names = [name.replace("pytorch_model", "model").replace(".bin", ".safetensors") for name in by_shard]
        metadata = [source.checkpoint.metadata[shard] for shard in by_shard]
    aligned = [sorted(shard, key=lambda out: -ITEM_BYTES[out.dtype]) for shard in shards]
    return list(zip(names, aligned, metadata, strict=True))


def _report(
    source: Source, out: Path, kv_heads: int, method: str, layout: Layout, dropped: list[str], dry_run: bool
) -> ConvertReport:
    outputs = [output for _, shard, _ in layout for output in shard]
    heads, d, caching = (
        num_key_value_heads(source.config),
        head_dim(source.config),
        cached_tokens(source.config, 1),
    )
    before, after = (2 * n * d for n in (heads, kv_heads))
    stored = Counter[str]()
    for output in outputs:
        stored[output.sources[0].dtype] += output.nbytes
    source_dtype = stored.most_common(1)[0][0]
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
        source_kv_bytes_per_token=before * sum(caching) * ITEM_BYTES[source_dtype],
        kv_bytes_per_token=after * sum(caching) * ITEM_BYTES[dtype],
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
    config = dict(source.raw_config)
    if source.family.becomes:  # the new architecture has other defaults, so every value is spelled out
        config = {**source.config.to_dict(), **config, **source.family.config}
    elif not source.family.only_kv_heads:
        config["num_key_value_heads"] = kv_heads
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    return config


def _record(
    source: Source,
    recipe: dict[str, Any],
    outputs: Sequence[Output],
    report: ConvertReport,
    hashes: dict[str, str | None],
) -> dict[str, Any]:
    """kvfold.json: how this checkpoint was made, and what its files hash to."""
    import torch
    import transformers

    record: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "recipe": recipe,
        "versions": {
            "kvfold": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "source": {
            **{key: value for key, value in asdict(source.origin).items() if value},
            "num_key_value_heads": report.source_num_key_value_heads,
        },
        "merged": [output.name for output in outputs if output.make is not None],
        "dropped": report.tensors_dropped,
        "left_out": report.files_left_out,
        "files": {name: {"xxh3_128": digest} if digest else {} for name, digest in sorted(hashes.items())},
    }
    earlier = source.folder / RECORD
    if earlier.is_file():  # converted before: the whole history stays
        record["source"]["record"] = json.loads(earlier.read_text())
    return record


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_apart(src: Path, out: Path) -> None:
    src, out = src.resolve(), out.resolve()
    if src.exists() and (src == out or src in out.parents or out in src.parents):
        raise UserError(f"{out} and the source {src} lie inside one another; choose an OUT elsewhere")


def _check_room(out: Path, needed: int) -> None:
    folder = next(parent for parent in out.resolve().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed + _SIDE_FILE_ROOM:
        raise EnvironmentFailure(f"{folder} has {free:,} bytes free, the result needs {needed:,}; make room first")
