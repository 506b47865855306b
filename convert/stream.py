"""Writing a checkpoint tensor by tensor: one tensor of a shard in memory, untouched bytes never decoded."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from ..common.errors import UserError
from ..common.progress import Progress
from .checkpoint import CHUNK, INDEX, Checkpoint, bytes_of, is_finite, torch_dtype
from .headers import FLOATS, ITEM_BYTES, TensorInfo, pack_header

if TYPE_CHECKING:
    import torch


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
    def stored_bytes(self) -> int:
        """The same, as `TensorInfo` has it."""
        return self.nbytes

    @property
    def nbytes(self) -> int:
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


class _Shard:
    """One safetensors file being written, front to back, in two stages that different threads may take.

    `begin` writes the header and the tensors that are only copied, as far as they lead; `finish` computes the
    rest. So bytes move while torch is still being imported.
    """

    def __init__(
        self,
        path: Path,
        outputs: Sequence[Output],
        metadata: dict[str, str],
        checkpoint: Checkpoint,
        hashing: bool,
        advance: Callable[[int], None],
    ):
        import xxhash

        self.path, self.outputs, self.metadata, self.checkpoint = path, outputs, metadata, checkpoint
        self.advance = advance
        self.digest = xxhash.xxh3_128() if hashing else None
        self.leading = next((i for i, out in enumerate(outputs) if not out.is_copy), len(outputs))
        self.begun = Event()

    def begin(self) -> None:
        try:
            with self.path.open("xb", buffering=0) as file:
                header = [(out.name, out.dtype, out.shape) for out in self.outputs]
                self._write(file, pack_header(header, self.metadata))
                for out in self.outputs[: self.leading]:
                    self._copy(file, out.sources[0])
                    self.advance(out.nbytes)
        finally:
            self.begun.set()

    def finish(self) -> None:
        self.begun.wait()
        rest = self.outputs[self.leading :]
        needed = (sum(info.nbytes for info in out.sources) for out in rest if not out.is_copy)
        buffer = memoryview(bytearray(max(needed, default=0)))
        with self.path.open("ab", buffering=0) as file:
            for out in rest:
                if out.is_copy:
                    self._copy(file, out.sources[0])
                else:
                    self._write(file, bytes_of(compute(out, self.checkpoint, buffer)))
                self.advance(out.nbytes)

    def _write(self, file: FileIO, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            # Small pieces, hashed and written while the cache holds them.
            piece = view[: file.write(view[:CHUNK])]
            if self.digest:
                self.digest.update(piece)
            view = view[len(piece) :]

    def _copy(self, file: FileIO, info: TensorInfo) -> None:
        for piece in self.checkpoint.pieces(info):
            self._write(file, piece)


@contextmanager
def _quick_switches() -> Iterator[None]:
    """Let threads change places ten times as often: a copying one asks for the interpreter at every piece, and
    one that imports holds on to it for as long as it may."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 10)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def compute(out: Output, checkpoint: Checkpoint, buffer: memoryview | None = None) -> torch.Tensor:
    """The tensor to be written; `buffer` holds its sources, which may be the result itself."""
    sources = []
    for info in out.sources:
        sources.append(checkpoint.tensor(info, buffer))
        buffer = buffer[info.nbytes :] if buffer is not None else None
    result = out.make(sources) if out.make else sources[0]
    assert tuple(result.shape) == out.shape, (out.name, result.shape, out.shape)
    cast = result.to(torch_dtype(out.dtype)).contiguous()
    if not is_finite(cast):
        raise UserError(f"tensor {out.name} overflows {cast.dtype}; choose another --dtype".replace("torch.", ""))
    return cast


def cast(stored: str, wanted: str | None) -> str:
    """The dtype in the header of a tensor that is stored in one; `wanted` is torch's word for that of floats."""
    if wanted is None or stored not in FLOATS:
        return stored
    return next(header for header, name in FLOATS.items() if name == wanted)


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

    shards = [
        _Shard(folder / name, outputs, metadata, checkpoint, hashing, advance) for name, outputs, metadata in layout
    ]
    stages = deque([shard.begin for shard in shards] + [shard.finish for shard in shards])

    def fail() -> None:
        failed.set()
        for shard in shards:
            shard.begun.set()  # nobody shall wait for a stage that never comes

    def work() -> None:
        try:
            while stages:
                try:
                    stage = stages.popleft()
                except IndexError:  # the other thread was faster
                    return
                stage()
        except BaseException:
            fail()
            raise

    # Two threads: one copies while the other one imports torch, then both take what is left.
    with _quick_switches(), ThreadPoolExecutor(max_workers=1) as pool:
        other = pool.submit(work)
        try:
            if any(out.make or not out.is_copy for _, outputs, _ in layout for out in outputs):
                import torch  # noqa: F401
            work()
        except CancelledError:  # the other one's error is the one to tell
            other.result()
            raise
        except BaseException:
            fail()
            raise
        other.result()
    hashes = {shard.path.name: shard.digest.hexdigest() if shard.digest else None for shard in shards}
    if len(layout) > 1:
        weight_map = {out.name: name for name, outputs, _ in layout for out in outputs}
        index: dict[str, Any] = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return hashes
