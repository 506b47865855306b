"""Everything in a checkpoint directory that is not its weights: copied byte by byte, or named."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

# Weights in other formats and training state: stale beside the new weights, so left out and named.
_STALE_SUFFIXES = frozenset(
    [
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".gguf",
        ".h5",
        ".msgpack",
        ".onnx",
        ".onnx_data",
        ".ot",
        ".npz",
        ".ckpt",
        ".distcp",
    ]
)
_STALE_NAMES = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "flax_model.msgpack.index.json",
)
_SKIPPED_FOLDERS = (".git", ".cache", "__pycache__")


def copy_side_files(
    folder: Path, target: Path, *, skip: Collection[str], hashing: bool
) -> tuple[dict[str, str | None], list[str]]:
    """Copy tokenizer, templates, generation config, code and every other side file.

    Args:
        skip: names in `folder` that the caller writes itself or has read as weights.
        hashing: whether to hash what passes.

    Returns:
        Relative name -> xxh3-128 (None without hashing), and the names that were left out.
    """
    copied, left_out = [], []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        parents = [parent.name for parent in path.relative_to(folder).parents]
        if name in skip or any(parent in _SKIPPED_FOLDERS for parent in parents):
            continue
        if path.is_dir() and not path.is_symlink() and path.name not in _SKIPPED_FOLDERS:
            continue
        if path.suffix in _STALE_SUFFIXES or path.name in _STALE_NAMES or not path.is_file():
            left_out.append(name)
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / name)  # follows links: the Hub cache is made of them
        copied.append(name)
    return hash_files(target, copied, hashing=hashing), left_out


def hash_files(folder: Path, names: Iterable[str], *, hashing: bool) -> dict[str, str | None]:
    """The xxh3-128 of those files that exist, as hex; None for each without hashing."""
    import xxhash

    hashes: dict[str, str | None] = {}
    for name in names:
        if (folder / name).exists():
            hashes[name] = None
            if hashing:
                digest = xxhash.xxh3_128()
                with (folder / name).open("rb") as file:
                    while piece := file.read(1 << 20):
                        digest.update(piece)
                hashes[name] = digest.hexdigest()
    return hashes
