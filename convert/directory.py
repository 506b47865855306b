"""The new checkpoint directory, whatever the conversion: weights, side files, config and record, or nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..common.atomic import check_output, check_room, output_directory, real_path, siblings
from ..common.errors import UserError
from ..common.kvcache import attention_kind, kv_bytes_per_token, kv_elements
from ..common.progress import Progress
from ..common.raw_config import read_json
from .checkpoint import INDEX
from .headers import FLOATS, ITEM_BYTES, main_dtype
from .sidefiles import RECORD, copy_side_files, hash_files
from .source import Source
from .stream import Output, shard_names, split_by_size, write_weights

FORMAT_VERSION = 1

Layout = list[tuple[str, list[Output], dict[str, str]]]
"""File name, tensors and safetensors metadata of each shard to be written."""


def check_paths(src: str, out: str | Path, *, overwrite: bool) -> None:
    """Refuse an OUT that may not be written, before any work is done.

    Raises:
        UserError: it exists, or it and the source lie inside one another.
    """
    if not src or not str(out):
        raise UserError("SRC or OUT is empty; is a shell variable unset?")
    out = Path(out)
    check_output(out, overwrite=overwrite)
    source, target = real_path(Path(src)), real_path(out)
    for path in (target, *siblings(target)):
        if source.exists() and (source.is_relative_to(path) or path.is_relative_to(source)):
            raise UserError(f"{out} and the source {src} lie inside one another; choose an OUT elsewhere")


def lay_out(source: Source, outputs: Sequence[Output], max_shard_size: int | None) -> Layout:
    """Deal the outputs to files: as in the source, or anew by size (bytes a shard)."""
    if max_shard_size is not None:
        shards = split_by_size(outputs, max_shard_size)
        names = shard_names(len(shards))
        metadata = [source.checkpoint.metadata[shard[0].sources[0].shard] for shard in shards]
    else:
        by_shard: dict[str, list[Output]] = {}
        for out in outputs:
            by_shard.setdefault(out.sources[0].shard, []).append(out)
        shards = list(by_shard.values())
        names = list(by_shard)
        if names != shard_names(len(source.checkpoint.shards)):  # .bin files, odd names, or a shard that vanished
            names = shard_names(len(shards))
        metadata = [source.checkpoint.metadata[shard] for shard in by_shard]
    # Wider elements first keeps every tensor aligned; copies before what is computed lets them start at once.
    aligned = [sorted(shard, key=lambda out: (-ITEM_BYTES[out.dtype], not out.is_copy)) for shard in shards]
    return list(zip(names, aligned, metadata, strict=True))


def written_figures(source: Source, outputs: Sequence[Output], max_shard_size: int | None) -> dict[str, Any]:
    """What every report of a conversion says of the checkpoint that is written, by its fields."""
    dtype = main_dtype(outputs)
    return {
        "dtype": FLOATS.get(dtype, dtype),
        "shards": len(lay_out(source, outputs, max_shard_size)),
        "bytes": sum(output.nbytes for output in outputs),
        "tensors_copied": sum(output.make is None for output in outputs),
    }


def write_directory(
    source: Source,
    out: Path,
    layout: Layout,
    *,
    config: dict[str, Any],
    recipe: dict[str, Any],
    dropped: Sequence[str],
    overwrite: bool,
    hashing: bool,
    progress: Progress | None,
    asked: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write a checkpoint directory; it appears whole or not at all.

    Args:
        config: the new config.json.
        recipe: how the weights were made, for the record.
        dropped: the source's tensors that have no successor.
        asked: what the user asked for, see `request.asked_for`; a recipe says what it came to.

    Returns:
        The source's files that were left out, because they would be stale beside the new weights.

    Raises:
        UserError: a tensor cannot be computed, or `out` may not be written.
        EnvironmentFailure: no room on the disk.
    """
    check_room(out, sum(output.nbytes for _, outputs, _ in layout for output in outputs))
    with output_directory(out, overwrite=overwrite) as staging:
        hashes = write_weights(staging, layout, source.checkpoint, hashing=hashing, progress=progress)
        skip = {*source.checkpoint.files, "config.json", RECORD}
        side_hashes, left_out = copy_side_files(source.folder, staging, skip=skip, hashing=hashing)
        stock = {key: value for key, value in config.items() if key != "auto_map"}  # which would load the source's code
        _write_json(staging / "config.json", stock)
        hashes |= side_hashes | hash_files(staging, ("config.json", INDEX), hashing=hashing)
        record = {
            "format_version": FORMAT_VERSION,
            "recipe": recipe,
            **({} if asked is None else {"asked": dict(asked)}),
            "versions": _versions(),
            "source": _source_record(source),
            "computed": [out.name for _, outputs, _ in layout for out in outputs if out.make],
            "dropped": list(dropped),
            "left_out": left_out,
            "files": {name: {"xxh3_128": digest} if digest else {} for name, digest in sorted(hashes.items())},
        }
        _write_json(staging / RECORD, record)
    return left_out


def _versions() -> dict[str, str]:
    return {"kvfold": __version__, **{name: version(name) for name in ("torch", "transformers")}}


def _source_record(source: Source) -> dict[str, Any]:
    record: dict[str, Any] = {key: value for key, value in asdict(source.origin).items() if value}
    record["cache"] = _cache_of(source)
    if (source.folder / RECORD).is_file():  # converted before: the whole history stays
        record["record"] = read_json(source.folder / RECORD, "record of an earlier conversion")
    return record


def _cache_of(source: Source) -> dict[str, Any]:
    """What the source caches: whoever has only the result cannot know."""
    config, stored = source.config, main_dtype(source.checkpoint.tensors.values())
    return {
        "attention_kind": attention_kind(config),
        "kv_elements_per_token_per_layer": kv_elements(config),
        "kv_bytes_per_token": kv_bytes_per_token(config, ITEM_BYTES[stored]),
        "dtype": FLOATS.get(stored, stored),
    }


def records(record: Any) -> Iterator[Mapping[str, Any]]:
    """The record of a result, then that of what it was made from, and so on, as long as they are tables."""
    while isinstance(record, Mapping):
        yield record
        source = record.get("source")
        record = source.get("record") if isinstance(source, Mapping) else None


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
