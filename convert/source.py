"""Where a checkpoint comes from: a directory, a GGUF file, or the Hub, in that order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..common.atomic import check_room, scratch_folder
from ..common.embedded import last_part
from ..common.errors import UserError
from ..common.raw_config import read_raw_config
from ..common.sources import one_line_errors, quiet, source_kind
from .checkpoint import Checkpoint, check_headers
from .config import StoredConfig
from .families import Family
from .latent_families import KNOWN
from .sidefiles import RECORD, hash_files, recorded_hashes, side_files

# What conversion needs of a Hub repository: one kind of weights and everything small.
_HUB_IGNORE = ["*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.pth", "*.pt", "original/*"]


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint came from, in words fit for publication: no local path but its last part."""

    name: str
    revision: str | None = None


@dataclass(frozen=True)
class Source:
    """An opened source.

    Attributes:
        name: as the user gave it.
        origin: what may be published of it.
        folder: the local directory.
        config: answers like transformers' config.
        checkpoint: its weights.
    """

    name: str
    origin: Origin
    folder: Path
    config: StoredConfig
    checkpoint: Checkpoint

    @property
    def family(self) -> Family:
        return KNOWN[self.config.model_type]

    def digest(self) -> str:
        """A hash of config and weights as they stand in their files.

        Raises:
            UserError: kvfold wrote them, and they are not what it wrote.
        """
        hashes = hash_files(self.folder, sorted({"config.json", *self.checkpoint.files}), hashing=True)
        said = recorded_hashes(self.folder)
        if changed := [name for name, digest in hashes.items() if said.get(name, digest) != digest]:
            raise UserError(
                f"{self.folder / changed[0]} is not as kvfold wrote it: its hash is another than in {RECORD}; make it "
                f"again, or remove {RECORD} if it was changed on purpose"
            )
        return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:32]


def check_source(source: str, revision: str | None = None, *, weights: bool = True) -> Literal["folder", "gguf", "hub"]:
    """Refuse a SOURCE for what its path, its config and its headers say, and return what it is.

    Needs neither torch nor transformers, nor the network, and reads no weights: what is wrong is told at once.

    Args:
        weights: whether they are needed, beside the config.

    Raises:
        UserError: it cannot be what it has to be.
    """
    kind = source_kind(source, revision)
    if kind == "folder":
        folder = Path(source)
        read_raw_config(folder)
        # transformers and its tokenizers open what they find by its name.
        if odd := [path.name for path in folder.iterdir() if path.exists() and not (path.is_file() or path.is_dir())]:
            raise UserError(f"{folder / min(odd)} is a pipe or a device, not a file; copy it again from its source")
        if weights:
            check_headers(folder)
    return kind


def fetch(source: str, revision: str | None) -> Path:
    """Download a Hub repository's checkpoint into the Hub cache, and return its folder there.

    Raises:
        UserError: there is no such repository, or it cannot be seen.
        EnvironmentFailure: the Hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    with one_line_errors(source), quiet():
        return Path(snapshot_download(source, revision=revision, ignore_patterns=_HUB_IGNORE))


@contextmanager
def open_source(source: str, *, revision: str | None = None) -> Iterator[Source]:
    """Open a SOURCE for conversion.

    Args:
        source: a directory, a GGUF file (dequantised to fp32 through transformers), or a Hub id.
        revision: of the Hub repository.

    Raises:
        UserError: nothing is there, or it is not a checkpoint that can be read.
        EnvironmentFailure: the Hub cannot be reached.
    """
    kind = source_kind(source, revision)
    if kind == "folder":
        yield _open(source, Path(source), Origin(last_part(source)))
    elif kind == "gguf":
        with dequantised(Path(source)) as folder:
            yield _open(source, folder, Origin(Path(source).name))
    else:
        folder = fetch(source, revision)
        yield _open(source, folder, Origin(source, folder.name))  # the Hub cache names a snapshot by its commit


def _open(name: str, folder: Path, origin: Origin) -> Source:
    source = Source(name, origin, folder, StoredConfig(folder), Checkpoint.open(folder))
    side_files(folder, skip={*source.checkpoint.files, "config.json"})  # that none leads elsewhere
    return source


@contextmanager
def dequantised(path: Path) -> Iterator[Path]:
    """A GGUF file as a normal fp32 checkpoint, in a temporary folder (TMPDIR says where).

    Raises:
        EnvironmentFailure: there is no room for it.
    """
    from .gguf import dequantise
    from .gguf_header import read_gguf_headers

    with scratch_folder("kvfold-gguf-") as folder:
        check_room(folder, 4 * sum(info.numel for info in read_gguf_headers(path)))
        dequantise(path, folder)
        yield folder
