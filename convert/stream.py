"""Writing a checkpoint tensor by tensor: one tensor of a shard in memory, untouched bytes never decoded."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from ..common.errors import UserError
from ..common.progress import Progress
from .checkpoint import INDEX, Checkpoint, is_finite, torch_dtype
from .headers import ITEM_BYTES, TensorInfo, pack_header

if TYPE_CHECKING:
    import torch

_CANNOT_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}


@dataclass(frozen=True)
class Output:
    """One tensor to be written.

    Attributes:
        name, dtype, shape: as they will stand in the header; `dtype` in safetensors' words.
        sources: the stored tensors that it is made of, usually one.
        make: computes it from the sources' tensors; None if only bytes (or at most the dtype) change.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[TensorInfo, ...]
    make: Callable[[list[torch.Tensor]], torch.Tensor] | None = None

    @property
    def is_copy(self) -> bool:
        return self.make is None and self.dtype == self.sources[0].dtype

    @property
    def nbytes(self) -> int:
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


class _Sink:
    """An open file that hashes what passes, if that is wanted; then what passes must come in order."""

    def __init__(self, file: FileIO, hashing: bool):
        import xxhash

        self.file = file
        self.digest = xxhash.xxh3_128() if hashing else None

    def write(self, piece: bytes | memoryview) -> None:
        if self.digest:
            self.digest.update(piece)
        view = memoryview(piece)
        while len(view):
            view = view[self.file.write(view) :]

    def copy(self, checkpoint: Checkpoint, info: TensorInfo) -> None:
        """Copy a tensor's bytes; inside the kernel when nobody needs to see them."""
        start = info.start
        if not self.digest and not info.shard.endswith(".bin") and hasattr(os, "copy_file_range"):
            start = self._copy_in_kernel(checkpoint.folder / info.shard, start, info.stop)
        if start == info.start:
            for piece in checkpoint.pieces(info):
                self.write(piece)

    def _copy_in_kernel(self, path: Path, start: int, stop: int) -> int:
        with path.open("rb", buffering=0) as source:
            while start < stop:
                try:
                    count = os.copy_file_range(source.fileno(), self.file.fileno(), stop - start, start)
                except OSError as error:
                    if error.errno in _CANNOT_COPY:  # known before the first byte
                        return start
                    raise
                if count == 0:
                    raise OSError(f"{path.name} ended while it was copied")
                start += count
        return start


def write_shard(
    path: Path,
    outputs: Sequence[Output],
    metadata: dict[str, str],
    checkpoint: Checkpoint,
    *,
    hashing: bool,
    advance: Callable[[int], None],
) -> str | None:
    """Write one safetensors file.

    Returns:
        The file's xxh3-128 as hex, or None without hashing.

    Raises:
        UserError: a computed tensor is not finite, or came out in another shape than announced.
        OSError: the disk failed.
    """
    header = pack_header([(out.name, out.dtype, out.shape) for out in outputs], metadata)
    starts = accumulate((out.nbytes for out in outputs), initial=len(header))
    places = list(zip(outputs, starts, strict=False))  # one more start than outputs: the end of the file
    needed = (sum(info.nbytes for info in out.sources) for out in outputs if not out.is_copy)
    buffer = memoryview(bytearray(max(needed, default=0)))
    if not hashing:  # then order is free, and copying need not wait until torch is imported
        places.sort(key=lambda place: not place[0].is_copy)
    with path.open("wb", buffering=0) as file:
        sink = _Sink(file, hashing)
        sink.write(header)
        for out, start in places:
            file.seek(start)
            if out.is_copy:
                sink.copy(checkpoint, out.sources[0])
            else:
                sink.write(_bytes_of(_compute(out, checkpoint, buffer)))
            advance(out.nbytes)
    return sink.digest.hexdigest() if sink.digest else None


def _compute(out: Output, checkpoint: Checkpoint, buffer: memoryview) -> torch.Tensor:
    """The tensor to be written; `buffer` holds its sources, which may be the result itself."""
    sources = []
    for info in out.sources:
        sources.append(checkpoint.tensor(info, buffer))
        buffer = buffer[info.nbytes :]
    result = out.make(sources) if out.make else sources[0]
    assert tuple(result.shape) == out.shape, (out.name, result.shape, out.shape)
    cast = result.to(torch_dtype(out.dtype)).contiguous()
    if not is_finite(cast):
        raise UserError(f"tensor {out.name} overflows {cast.dtype}; choose another --dtype".replace("torch.", ""))
    return cast


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def split_by_size(outputs: Iterable[Output], limit: int) -> list[list[Output]]:
    """Deal outputs, in order, to shards of at most `limit` bytes (one larger tensor fills a shard alone)."""
    shards: list[list[Output]] = [[]]
    room = limit
    for out in outputs:
        if shards[-1] and out.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(out)
        room -= out.nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """The file names that transformers gives to `count` shards."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_weights(
    folder: Path,
    layout: Sequence[tuple[str, Sequence[Output], dict[str, str]]],
    checkpoint: Checkpoint,
    *,
    hashing: bool = True,
    progress: Progress | None = None,
) -> dict[str, str | None]:
    """Write all shards and, if there are several, their index.

    Args:
        layout: file name, tensors and metadata of each shard.

    Returns:
        File name -> hash (None without hashing).
    """
    total = sum(out.nbytes for _, outputs, _ in layout for out in outputs)
    done, lock, failed = 0, Lock(), Event()

    def advance(count: int) -> None:
        nonlocal done
        if failed.is_set():
            raise CancelledError
        with lock:
            done += count
            if progress:
                progress(done, total)

    def write(name: str, outputs: Sequence[Output], metadata: dict[str, str]) -> str | None:
        return write_shard(folder / name, outputs, metadata, checkpoint, hashing=hashing, advance=advance)

    # Two shards at a time: while one computes or hashes, the other one's bytes move.
    with ThreadPoolExecutor(max_workers=2) as pool:
        tasks = {name: pool.submit(write, name, outputs, metadata) for name, outputs, metadata in layout}
        try:
            import torch  # noqa: F401  (a second, during which the bytes of copied tensors move already)

            for task in as_completed(tasks.values()):
                task.result()
        except BaseException:
            failed.set()  # an interrupt reaches only this thread
            raise
    hashes = {name: task.result() for name, task in tasks.items()}
    if len(layout) > 1:
        weight_map = {out.name: name for name, outputs, _ in layout for out in outputs}
        index: dict[str, Any] = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return hashes
