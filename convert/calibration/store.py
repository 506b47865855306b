"""Statistics in a file: one safetensors file, written a layer at a time and read a layer at a time.

Kept in fp32: they are estimates from some ten thousand tokens, whose sums were made in fp64. The metadata says what
they were made of; its `key` is a hash of all that decides them, so that nothing is computed twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ...common.atomic import check_room, output_file
from ...common.errors import UserError
from ..checkpoint import bytes_of, is_finite
from ..headers import ITEM_BYTES, pack_header, read_header
from .recognise import METADATA, check_statistics
from .statistics import LayerStatistics

FORMAT_VERSION = 2


@dataclass(frozen=True)
class About:
    """What statistics were made of.

    Attributes:
        source: hash of the checkpoint's config and weights.
        text: hash of the token ids.
        tokens, windows: how many the model read.
        kinds: windows of each kind of text.
        fisher, still: whether gradients were taken, and those at keys without position.
        dtype: that the model ran in.
        hidden_size, kv_size, num_hidden_layers: D, G*d and L.
    """

    source: str
    text: str
    tokens: int
    windows: int
    kinds: dict[str, int]
    fisher: bool
    still: bool
    dtype: str
    hidden_size: int
    kv_size: int
    num_hidden_layers: int
    format_version: int = FORMAT_VERSION

    @property
    def names(self) -> list[str]:
        """The tensors of a layer, by their names in `LayerStatistics`."""
        fishers = ["key_fisher", "value_fisher"] if self.fisher else []
        return ["inputs", *fishers, *(["still_fisher", "still_cross"] if self.still else [])]

    @property
    def key(self) -> str:
        """The hash of all that decides the statistics, which is not how the texts are called."""
        return hashlib.sha256(json.dumps(asdict(self) | {"kinds": {}}, sort_keys=True).encode()).hexdigest()[:32]

    def tensors(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, dtype and shape of everything in the file, in its order."""
        sizes = {name: self.hidden_size + 1 if name == "inputs" else self.kv_size for name in self.names}
        table = [
            (f"layers.{layer}.{name}", "F32", (size, size))
            for layer in range(self.num_hidden_layers)
            for name, size in sizes.items()
        ]
        layers, hashed = (self.num_hidden_layers,), (len(table),)
        return [*table, ("hashes", "I64", hashed), ("effective_ranks", "I32", layers)]

    def is_sane(self, tensors: int) -> bool:
        """Whether this may be about a file of so many tensors; `tensors` lists what it promises, which has no bound."""
        types = {"str": str, "int": int, "bool": bool}
        typed = all(isinstance(getattr(self, field.name), types.get(str(field.type), dict)) for field in fields(self))
        return typed and self.num_hidden_layers <= tensors

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * ITEM_BYTES[dtype] for _, dtype, shape in self.tensors())


class StatisticsWriter:
    """Writes layers as they come, in any order."""

    def __init__(self, file: BinaryIO, about: About):
        self.file, self.about = file, about
        header = pack_header(about.tensors(), {METADATA: json.dumps(asdict(about))})
        self.order = {name: position for position, (name, _, _) in enumerate(about.tensors())}
        self.starts, at = {}, len(header)
        for name, dtype, shape in about.tensors():
            self.starts[name] = at
            at += prod(shape) * ITEM_BYTES[dtype]
        file.write(header)
        file.truncate(at)

    def __call__(self, layer: int, statistics: LayerStatistics) -> None:
        for name in self.about.names:
            if not is_finite(kept := getattr(statistics, name).float()):
                raise UserError(
                    f"layer {layer} has NaN or Inf in its activations or gradients ({name}); calibrate in a wider "
                    "dtype, or mend the source"
                )
            full, data = f"layers.{layer}.{name}", bytes_of(kept)
            self._write(full, data)
            self._write("hashes", bytes_of(torch.tensor([hash_of(data)])), skip=8 * self.order[full])
        rank = torch.tensor([effective_rank(statistics.inputs)], dtype=torch.int32)
        self._write("effective_ranks", bytes_of(rank), skip=4 * layer)

    def _write(self, name: str, data: memoryview, skip: int = 0) -> None:
        at = self.starts[name] + skip
        while data:
            count = os.pwrite(self.file.fileno(), data, at)
            at, data = at + count, data[count:]


def hash_of(data: memoryview) -> int:
    """xxh3-64 as a signed number, which is what an I64 tensor holds."""
    import xxhash

    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)


def effective_rank(moment: Tensor, floor: float = 1e-7) -> int:
    """How many directions of a second moment [n, n] are larger than `floor` times the largest."""
    values = torch.linalg.eigvalsh(moment)
    return int((values > floor * values[-1]).sum())


@contextmanager
def statistics_file(
    path: Path, about: About, *, overwrite: bool = False, wait: bool = False
) -> Iterator[StatisticsWriter]:
    """Yield a writer of a file that appears at `path` when the block ends without an error; see `output_file`.

    Raises:
        UserError: the file exists, or another process is writing it.
        EnvironmentFailure: no room on the disk.
    """
    check_room(path, about.nbytes)
    with output_file(path, overwrite=overwrite, wait=wait) as file:
        yield StatisticsWriter(file, about)


@dataclass(frozen=True)
class Statistics:
    """The statistics of a checkpoint, in a file."""

    path: Path
    about: About

    @classmethod
    def open(cls, path: Path) -> Statistics:
        """Open a file that `kvfold calibrate` wrote.

        Raises:
            UserError: it is none.
        """
        check_statistics(path)
        try:
            tensors, metadata = read_header(path)
            said = json.loads(metadata[METADATA])
            about = About(**{field.name: said[field.name] for field in fields(About)})
            found = [(info.name, info.dtype, info.shape) for info in tensors]
            whole = about.is_sane(len(found)) and found == about.tensors()
        except (UserError, KeyError, TypeError, ValueError, RecursionError):
            raise UserError(f"{path} holds no statistics of kvfold calibrate; make them again") from None
        if about.format_version != FORMAT_VERSION or not whole:
            raise UserError(f"{path} was written by another version of kvfold; calibrate again")
        return cls(path, about)

    def layer(self, number: int, device: str = "cpu") -> LayerStatistics:
        """One layer's statistics, in fp64.

        Raises:
            UserError: they are not what was written.
        """
        names = self.about.names
        return LayerStatistics(**{name: self._read(f"layers.{number}.{name}").to(device).double() for name in names})

    def is_whole(self) -> bool:
        """Whether the file still holds what was written."""
        try:
            return all(self.layer(number) for number in range(self.about.num_hidden_layers))
        except UserError:
            return False

    def effective_ranks(self) -> list[int]:
        """For every layer, how many directions of its inputs [x; 1] the text has shown."""
        return self._read("effective_ranks").tolist()

    def _read(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            tensor = file.get_tensor(name)
            order = [each for each, _, _ in self.about.tensors()]
            hashes = file.get_tensor("hashes")
        if (position := order.index(name)) < len(hashes) and hashes[position] != hash_of(bytes_of(tensor)):
            raise UserError(f"{self.path} is damaged ({name} is not what was written); calibrate again")
        return tensor
