"""Everything in a checkpoint directory that is not its weights: copied byte by byte, or named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from ..common.errors import UserError

RECORD = "kvfold.json"

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
_BLOBS, _REPOSITORY = "blobs", "models--"  # how the Hub's cache names the folder of its files, and what that is in


def copy_side_files(
    folder: Path, target: Path, *, skip: Collection[str], hashing: bool
) -> tuple[dict[str, str | None], list[str]]:
    """Copy tokenizer, templates, generation config, code and every other side file.

    Args:
        skip: names in `folder` that the caller writes itself or has read as weights.
        hashing: whether to hash what passes.

    Returns:
        Relative name -> xxh3-128 (None without hashing), and the names that were left out.

    Raises:
        UserError: see `side_files`.
    """
    copied, left_out = side_files(folder, skip=skip)
    for name in copied:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, target / name)  # follows links: the Hub cache is made of them
    return hash_files(target, copied, hashing=hashing), left_out


def side_files(folder: Path, *, skip: Collection[str]) -> tuple[list[str], list[str]]:
    """The names of the files that go along, and of those that are left out.

    A link is followed inside the checkpoint, and into the Hub's cache, whose snapshots are made of links. One that
    leads elsewhere is refused: whoever made the checkpoint may have pointed it at anything of the user's, which would
    be copied, and published with the result. Config and weights may be links to anywhere; they are read as what they
    are, and not copied as they stand.

    Raises:
        UserError: a link leads elsewhere.
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
        check_link(folder, path)
        copied.append(name)
    return copied, left_out


def check_link(folder: Path, path: Path) -> None:
    """Refuse a path in a checkpoint that is a link out of it, but for one into the Hub's cache.

    Raises:
        UserError: so it is.
    """
    leads = path.resolve()
    in_cache = leads.parent.name == _BLOBS and leads.parent.parent.name.startswith(_REPOSITORY)
    if not in_cache and not leads.is_relative_to(folder.resolve()):
        raise UserError(f"{path} is a link to {leads}, outside the checkpoint; put the file itself there, or remove it")


def recorded_hashes(folder: Path) -> dict[str, str]:
    """The xxh3-128 that the kvfold.json of a folder has of its files; none where it has none."""
    try:
        files = json.loads((folder / RECORD).read_bytes())["files"]
        return {name: row["xxh3_128"] for name, row in files.items() if "xxh3_128" in row}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def is_there(path: Path) -> bool:
    """Whether a path is a file: no folder, pipe or device, which have no end, and no name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def hash_files(folder: Path, names: Iterable[str], *, hashing: bool) -> dict[str, str | None]:
    """The xxh3-128 of those files that exist, as hex; None for each without hashing. Names may be anybody's."""
    import xxhash

    hashes: dict[str, str | None] = {}
    for name in names:
        if is_there(folder / name):
            hashes[name] = None
            if hashing:
                digest = xxhash.xxh3_128()
                with (folder / name).open("rb") as file:
                    while piece := file.read(1 << 20):
                        digest.update(piece)
                hashes[name] = digest.hexdigest()
    return hashes
