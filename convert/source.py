"""Where a checkpoint comes from: a directory, a GGUF file, or the Hub, in that order."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import EnvironmentFailure, UserError
from .checkpoint import Checkpoint
from .families import Family, find_family
from .headers import load_json

# What conversion needs of a Hub repository: one kind of weights and everything small.
_HUB_IGNORE = ["*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.pth", "*.pt", "original/*"]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """An opened source.

    Attributes:
        name: as the user gave it, with the Hub revision if there is one.
        is_local: whether that is a path.
        folder: the local directory.
        config: the transformers config, defaults filled in.
        raw_config: config.json as it stands, to be edited and written again.
        checkpoint: its weights.
    """

    name: str
    is_local: bool
    folder: Path
    config: Any
    raw_config: dict[str, Any]
    checkpoint: Checkpoint

    @property
    def family(self) -> Family:
        return find_family(self.config.model_type)


def read_config(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The transformers config of a local checkpoint, and its config.json as it stands.

    Raises:
        UserError: there is none, or transformers does not accept it.
    """
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UserError(f"{folder} is a PEFT adapter, not a model; merge it into its base model first")
    raw = load_json(folder / "config.json", "model's config")
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise UserError(f"{folder / 'config.json'} has no model_type; is this a transformers checkpoint?")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False), raw
    except Exception as error:  # transformers raises many kinds for a config that it does not accept
        reason = " ".join(str(error).split())
        raise UserError(f"{folder / 'config.json'} is not accepted by transformers: {reason[:300]}") from None


def is_hub_id(source: str) -> bool:
    """Whether a SOURCE that is not on the disk can be a Hub id at all."""
    return _HUB_ID.fullmatch(source) is not None


@contextmanager
def hub_errors(source: str) -> Iterator[None]:
    """Turn huggingface_hub's errors into ours."""
    import httpx
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise UserError(
            f"{source} is gated; ask for access on its page and log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{source} is neither a local path nor a repository that you can see on the Hub"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"{source} has no such revision on the Hub") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, httpx.HTTPError, ConnectionError):
        raise EnvironmentFailure(
            f"{source} is not on this disk and the Hub cannot be reached; give a local path, or check the network"
        ) from None


def fetch(source: str, revision: str | None) -> Path:
    """Download a Hub repository's checkpoint into the Hub cache, and return its folder there."""
    from huggingface_hub import snapshot_download

    with hub_errors(source):
        return Path(snapshot_download(source, revision=revision, ignore_patterns=_HUB_IGNORE))


@contextmanager
def open_source(source: str, *, revision: str | None = None, scratch: Path | None = None) -> Iterator[Source]:
    """Open a SOURCE for conversion.

    Args:
        source: a directory, a GGUF file (dequantised to fp32 through transformers), or a Hub id.
        revision: of the Hub repository.
        scratch: where a GGUF file may be dequantised; the system's temporary folder if None.

    Raises:
        UserError: nothing is there, or it is not a checkpoint that can be read.
        EnvironmentFailure: the Hub cannot be reached.
    """
    path = Path(source)
    if path.is_dir():
        yield _open_folder(source, path, is_local=True)
    elif path.is_file():
        with dequantised(path, scratch) as folder:
            yield _open_folder(source, folder, is_local=True)
    elif not path.exists() and is_hub_id(source):
        name = f"{source}@{revision}" if revision else source
        yield _open_folder(name, fetch(source, revision), is_local=False)
    else:
        raise UserError(f"{source} does not exist; give a checkpoint directory, a GGUF file, or a Hub id")


def _open_folder(name: str, folder: Path, *, is_local: bool) -> Source:
    config, raw = read_config(folder)
    return Source(name, is_local, folder, config, raw, Checkpoint.open(folder))


@contextmanager
def dequantised(path: Path, scratch: Path | None) -> Iterator[Path]:
    """A GGUF file as a normal checkpoint in a temporary folder."""
    from .gguf import dequantise

    folder = Path(tempfile.mkdtemp(prefix=".kvfold-gguf-", dir=scratch))
    try:
        dequantise(path, folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
