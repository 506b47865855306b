"""A GGUF header, walked through before anybody else reads the file.

The readers of the gguf package and of transformers take lengths and counts as they stand, and make several objects of
every value: a file of a few bytes can say that it holds 2^60 of them. What is refused here costs nothing, and what is
not is small. Layout: magic, version, counts of tensors and pairs; the pairs of key, type and value; name, sizes, type
and offset of each tensor; from the next multiple of the alignment on, the tensors.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..common.errors import UserError
from ..common.raw_config import MOST_LAYERS
from .headers import TensorInfo

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = ("general.alignment", 32)
# Type of a value -> its letter in `struct`; strings and arrays are the other two.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_NAME = 65_535  # bytes, by the format
_LONGEST_TEXT = 1 << 25  # bytes; a whole tokenizer may be one
_MOST_VALUES = 1 << 21  # in all arrays together; the largest vocabularies make 1.3 million
_MOST_AXES = 4  # by the format


@dataclass(frozen=True)
class _Walk:
    """A file that is read from front to end, and never beyond."""

    file: BinaryIO
    size: int
    order: str

    def number(self, letter: str) -> Any:
        (value,) = struct.unpack(self.order + letter, self.take(struct.calcsize(f"={letter}")))
        return value

    def take(self, count: int) -> bytes:
        raw = self.file.read(count)
        if len(raw) < count:
            raise ValueError("it ends within its header")
        return raw

    def skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise ValueError("it ends within its header")
        self.file.seek(count, 1)

    def name(self) -> str:
        if (length := self.number("Q")) > _LONGEST_NAME:
            raise ValueError(f"it has a name of {length} bytes")
        return self.take(length).decode()

    def skip_text(self) -> None:
        if (length := self.number("Q")) > _LONGEST_TEXT:
            raise ValueError(f"it has a text of {length} bytes")
        self.skip(length)

    def skip_array(self, left: int) -> int:
        """Returns how many of the values that were left it takes."""
        kind, count = self.number("I"), self.number("Q")
        if count > left:
            raise ValueError(f"it has an array of {count} values")
        if kind == _STRING:
            for _ in range(count):
                self.skip_text()
        elif kind in _SCALARS:
            self.skip(count * struct.calcsize(f"={_SCALARS[kind]}"))
        else:
            raise ValueError(f"it has an array of type {kind}")
        return count


def read_gguf_headers(path: Path) -> list[TensorInfo]:
    """The tensors of a GGUF file: names and dtypes as GGUF says them, shapes in torch's order.

    Raises:
        UserError: the file is damaged, or larger than any model's.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError("it does not begin as one")
            little = int.from_bytes(file.read(4), "little")
            order, version = ("<", little) if little & 0xFFFF else (">", int.from_bytes(little.to_bytes(4), "little"))
            if version not in _VERSIONS:
                raise ValueError(f"it is of version {version}")
            return _tensors(_Walk(file, size, order), path.name)
    except ValueError as error:  # UnicodeDecodeError too
        if isinstance(error, UserError):
            raise
        said = "it has a name that is not UTF-8" if isinstance(error, UnicodeError) else error
        raise UserError(f"{path} cannot be read as GGUF: {said}; fetch it again") from None


def _tensors(walk: _Walk, shard: str) -> list[TensorInfo]:
    count, pairs = walk.number("Q"), walk.number("Q")
    numbers = _numbers(walk, pairs)
    name, usual = _ALIGNMENT
    alignment = numbers.get(name, usual)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment}")
    for key, value in numbers.items():
        if key.endswith(".block_count") and value > MOST_LAYERS:
            raise ValueError(f"it says {key} = {value}, more than any model has")
    for needed in ("block_count", "embedding_length"):  # or transformers takes those of the family's largest model
        if not any(key.endswith(f".{needed}") for key in numbers):
            raise ValueError(f"it says no {needed}")
    rows = [_row(walk) for _ in range(count)]
    base = walk.file.tell() + -walk.file.tell() % alignment
    found = {row[0]: _info(*row, base, walk.size, shard) for row in rows}
    if len(found) < len(rows):
        raise ValueError("it names a tensor twice")
    return list(found.values())


def _numbers(walk: _Walk, pairs: int) -> dict[str, Any]:
    """The pairs whose values are numbers."""
    numbers: dict[str, Any] = {}
    keys, left = set(), _MOST_VALUES
    for _ in range(pairs):
        key, kind = walk.name(), walk.number("I")
        if key in keys:
            raise ValueError(f"it says {key} twice")
        keys.add(key)
        if kind == _STRING:
            walk.skip_text()
        elif kind == _ARRAY:
            left -= walk.skip_array(left)
        elif kind in _SCALARS:
            numbers[key] = walk.number(_SCALARS[kind])
        else:
            raise ValueError(f"{key} is of type {kind}")
    return numbers


def _row(walk: _Walk) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's name, sizes as they stand there, type and offset."""
    name = walk.name()
    if (axes := walk.number("I")) > _MOST_AXES:
        raise ValueError(f"tensor {name} has {axes} axes")
    return name, tuple(walk.number("Q") for _ in range(axes)), walk.number("I"), walk.number("Q")


def _info(name: str, sizes: tuple[int, ...], kind: int, offset: int, base: int, end: int, shard: str) -> TensorInfo:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    dtype = GGMLQuantizationType(kind)  # a ValueError of its own says what is no type
    block, block_bytes = GGML_QUANT_SIZES[dtype]
    if sizes and sizes[0] % block:
        raise ValueError(f"tensor {name} has rows of {sizes[0]}, which blocks of {block} do not make")
    nbytes = math.prod(sizes) * block_bytes // block
    if not nbytes:
        raise ValueError(f"tensor {name} is empty")
    if base + offset + nbytes > end:
        raise ValueError(f"tensor {name} has {nbytes} bytes at {base + offset}, and the file has {end}")
    return TensorInfo(name, dtype.name, sizes[::-1], shard, 0, nbytes)
