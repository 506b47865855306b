"""The weights of a checkpoint directory: which tensors there are, and their bytes one tensor at a time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import UserError
from ..common.sources import first_line
from .headers import FLOATS, TensorInfo, read_header, read_index
from .sidefiles import is_there

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
CHUNK = 1 << 20  # bytes moved at a time: as fast as a copy inside the kernel, and 4 MiB is five times slower
_LFS = b"version https://git-lfs"
# In the order in which transformers looks; the second of each pair is the index of a sharded checkpoint.
_FORMATS = (("model.safetensors", INDEX), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
_BIN_DTYPES = {f"torch.{name}": dtype for dtype, name in FLOATS.items()} | {
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.bool": "BOOL",
}  # fmt: skip


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype for a safetensors dtype name of `FLOATS`."""
    import torch

    return getattr(torch, FLOATS[dtype])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements as they stand in a file."""
    import torch

    return memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or Inf. Extremes carry both and take a tenth of the time of `isfinite`."""
    import torch

    return tensor.numel() == 0 or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))


@dataclass(frozen=True)
class Checkpoint:
    """Weights on disk.

    Attributes:
        folder: the checkpoint's directory.
        tensors: every tensor, in the order of the files.
        shards: the files, in order; a `.bin` file counts as one.
        metadata: each shard's safetensors metadata.
        files: the names of all files that this class reads, index included.
    """

    folder: Path
    tensors: dict[str, TensorInfo]
    shards: tuple[str, ...]
    metadata: dict[str, dict[str, str]] = field(repr=False)
    files: frozenset[str]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the headers of a checkpoint directory.

        Raises:
            UserError: no weights, a shard is missing or damaged, or index and shards disagree.
        """
        single, index = _format_of(folder)
        if (folder / single).exists():
            return cls._read(folder, (single,), None, frozenset({single}))
        weight_map = read_index(folder / index)
        shards = tuple(sorted(set(weight_map.values())))
        return cls._read(folder, shards, weight_map, frozenset({index, *shards}))

    @classmethod
    def _read(
        cls, folder: Path, shards: tuple[str, ...], weight_map: dict[str, str] | None, files: frozenset[str]
    ) -> Checkpoint:
        if missing := [shard for shard in shards if not is_there(folder / shard)]:
            first = ", ".join(missing[:3])
            raise UserError(f"{folder}: {len(missing)} of {len(shards)} shards missing: {first}; fetch them again")
        tensors: dict[str, TensorInfo] = {}
        metadata = {}
        for shard in shards:
            infos, metadata[shard] = _read_shard(folder / shard)
            for info in infos:
                if info.name in tensors:
                    raise UserError(f"tensor {info.name} is in both {tensors[info.name].shard} and {shard}")
                tensors[info.name] = info
        for name, shard in (weight_map or {}).items():
            if name not in tensors or tensors[name].shard != shard:
                raise UserError(
                    f"the index promises tensor {name} in {shard}, which does not hold it; fetch both again"
                )
        if extra := [name for name in tensors if weight_map and name not in weight_map]:
            raise UserError(
                f"{tensors[extra[0]].shard} holds tensor {extra[0]}, which the index does not name; fetch both again"
            )
        return cls(folder, tensors, shards, metadata, files)

    def pieces(self, info: TensorInfo) -> Iterator[memoryview]:
        """The tensor's bytes in chunks; a chunk is valid until the next one is asked for."""
        if info.shard.endswith(".bin"):
            whole = bytes_of(self._stored(info))
            yield from (whole[at : at + CHUNK] for at in range(0, len(whole), CHUNK))
            return
        buffer = memoryview(bytearray(min(CHUNK, info.nbytes)))
        with (self.folder / info.shard).open("rb", buffering=0) as file:
            for at in range(info.start, info.stop, CHUNK):
                chunk = buffer[: min(CHUNK, info.stop - at)]
                _read_exactly(file, at, chunk)
                yield chunk

    def tensor(self, info: TensorInfo, buffer: memoryview | None = None) -> torch.Tensor:
        """The tensor in memory, in its own dtype and shape.

        Args:
            buffer: at least the tensor's bytes, to hold it instead of fresh memory; the caller's to use again.

        Raises:
            UserError: it is not floating point, or holds NaN or Inf.
        """
        import torch

        if info.dtype not in FLOATS:
            raise UserError(f"tensor {info.name} is {info.dtype}; only {', '.join(FLOATS)} can be computed with")
        if info.shard.endswith(".bin"):
            tensor = self._stored(info)
        else:
            raw = memoryview(bytearray(info.nbytes)) if buffer is None else buffer[: info.nbytes]
            with (self.folder / info.shard).open("rb", buffering=0) as file:
                _read_exactly(file, info.start, raw)
            dtype = torch_dtype(info.dtype)
            tensor = (
                torch.frombuffer(raw, dtype=dtype).view(info.shape) if raw else torch.empty(info.shape, dtype=dtype)
            )
        if not is_finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise UserError(f"tensor {info.name} holds {bad} NaN or Inf values; mend the source")
        return tensor

    def _stored(self, info: TensorInfo) -> torch.Tensor:
        return _load_bin(self.folder / info.shard)[info.name]


def _format_of(folder: Path) -> tuple[str, str]:
    """The pair of `_FORMATS` that a directory's weights are named by.

    Raises:
        UserError: there are none.
    """
    for names in _FORMATS:
        if any((folder / name).exists() for name in names):
            return names
    raise UserError(f"{folder} holds no weights (looked for {', '.join(sum(_FORMATS, ()))}); give the folder that does")


def check_headers(folder: Path) -> None:
    """Refuse a checkpoint by its headers alone, without torch; pickled weights tell nothing before they are read.

    Raises:
        UserError: see `Checkpoint.open`.
    """
    if _format_of(folder) == _FORMATS[0]:
        Checkpoint.open(folder)


def _read_exactly(file: FileIO, start: int, buffer: memoryview) -> None:
    """Fill a buffer from a file. Not mapped: a read error is an exception here, and a killed process there."""
    while buffer:
        count = os.preadv(file.fileno(), [buffer], start)
        if count == 0:
            raise OSError(f"{file.name} ended while it was read")
        start, buffer = start + count, buffer[count:]


def _read_shard(path: Path) -> tuple[list[TensorInfo], dict[str, str]]:
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise UserError(f"{path.name} is a git-lfs pointer, not the weights; run `git lfs pull` there")
    if path.suffix != ".bin":
        return read_header(path)
    infos = []
    for name, tensor in _load_bin(path).items():
        if str(tensor.dtype) not in _BIN_DTYPES:
            raise UserError(f"{path.name}: tensor {name} has dtype {tensor.dtype}, which kvfold does not read")
        infos.append(TensorInfo(name, _BIN_DTYPES[str(tensor.dtype)], tuple(tensor.shape), path.name))
    return infos, {"format": "pt"}


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    status = path.stat()
    return _load_this_bin(path, status.st_mtime_ns, status.st_size)  # a file written anew is another file


@lru_cache(maxsize=1)
def _load_this_bin(path: Path, mtime_ns: int, size: int) -> dict[str, torch.Tensor]:
    """One pickled shard; its pages are mapped from the file where its format allows that."""
    import torch

    load = partial(torch.load, path, map_location="cpu", weights_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters becomes an error, in one line
            try:
                state = load(mmap=True)
            except RuntimeError:  # files of before torch 1.6 are no zip archives, which mapping needs
                state = load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        said = first_line(error).partition(". ")[0] or type(error).__name__
        raise UserError(
            f"{path.name} cannot be read as plain weights ({said}); save the model's state_dict as safetensors"
        ) from None
    if not isinstance(state, dict) or not all(_is_plain(name, value) for name, value in state.items()):
        raise UserError(f"{path.name} is not a plain table of dense tensors; save the model's state_dict")
    return state


def _is_plain(name: object, value: object) -> bool:
    import torch

    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        return False
    return value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu"
