"""What a checkpoint holds, read from headers alone: names, dtypes, shapes and byte ranges.

The safetensors header is parsed here rather than by the library because conversion copies byte ranges, and
the library does not tell where in the file a tensor lies. Layout of a file: 8 bytes little-endian header
length, a JSON header, then the tensors without holes.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

from ..common.errors import UserError
from ..common.raw_config import Twice, read_json, unique
from ..common.typed import quoted

# Name in the header -> bytes per element.
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
    "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HEADER_LIMIT = 100_000_000  # the library's own limit
_LARGEST_FILE = 2**63 - 1
_MOST_SIZES = 64  # of a shape; torch has no tensor of more, and the product of a million is long in coming


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: ``start`` and ``stop`` are byte offsets from the beginning of the file ``shard``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int = 0
    stop: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def stored_bytes(self) -> int:
        """Bytes on disk, which of a GGUF tensor only its offsets tell; a pickled one has none."""
        return self.stop - self.start or self.nbytes


class Stored(Protocol):
    """What `main_dtype` counts: a tensor that is stored, or will be."""

    @property
    def dtype(self) -> str: ...

    @property
    def stored_bytes(self) -> int: ...


def main_dtype(tensors: Iterable[Stored]) -> str:
    """The dtype that most of the weights' bytes are in."""
    count: Counter[str] = Counter()
    for info in tensors:
        count[info.dtype] += info.stored_bytes
    return count.most_common(1)[0][0] if count else "none"


def parse_header(raw: bytes, *, shard: str, file_bytes: int) -> tuple[list[TensorInfo], dict[str, str]]:
    """Parse and check a safetensors header; ``raw`` is the JSON without its length prefix.

    Returns:
        The tensors in file order, and the file's metadata.

    Raises:
        UserError: the header is damaged or disagrees with the length of the file.
    """

    def broken(why: str) -> UserError:
        return UserError(f"{shard}: {why}; the file is damaged, fetch it again")

    try:
        table = json.loads(raw, object_pairs_hook=unique)
        metadata = table.pop("__metadata__", {})
        entries = sorted((_entry(name, row) for name, row in table.items()), key=lambda entry: entry[3:])
        if not all(isinstance(text, str) for text in metadata.values()):
            raise TypeError
    except Twice as twice:
        raise broken(f"the header says {quoted(twice.args[0])} twice") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise broken("the safetensors header is not readable") from None
    base, end, tensors = 8 + len(raw), 0, []
    for name, dtype, shape, start, stop in entries:
        if dtype not in ITEM_BYTES:
            raise UserError(f"{shard}: tensor {name} has dtype {dtype}, which kvfold does not read")
        info = TensorInfo(name, dtype, shape, shard, base + start, base + stop)
        if start != end or stop - start != info.nbytes:
            belongs = end + info.nbytes if info.nbytes <= _LARGEST_FILE else "more than any file holds"
            raise broken(f"tensor {name} has offsets {start}..{stop} where {end}..{belongs} belong")
        end = stop
        tensors.append(info)
    if base + end != file_bytes:
        raise broken(f"the header promises {base + end} bytes, the file has {file_bytes}")
    return tensors, metadata


def _entry(name: str, row: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    dtype, shape, (start, stop) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
    if (
        not isinstance(dtype, str)
        or len(shape) > _MOST_SIZES
        or not all(type(number) is int and number >= 0 for number in (*shape, start, stop))
    ):
        raise TypeError
    return name, dtype, shape, start, stop


def read_header(path: Path) -> tuple[list[TensorInfo], dict[str, str]]:
    """Read the header of one safetensors file; see `parse_header`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, size - 8):
            raise UserError(f"{path.name}: no safetensors header in {size} bytes; the file is damaged, fetch it again")
        return parse_header(file.read(length), shard=path.name, file_bytes=size)


def pack_header(tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The bytes that open a safetensors file holding ``(name, dtype, shape)`` in this order."""
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # tensors begin aligned to 8 bytes
    return struct.pack("<Q", len(raw)) + raw


def read_index(path: Path) -> dict[str, str]:
    """Read ``*.index.json``: tensor name -> file name, every file inside the checkpoint's own folder.

    Raises:
        UserError: no weight map, or a file name that leads elsewhere.
    """
    weight_map = read_json(path, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path.name} has no weight_map; fetch the index again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or PurePath(shard).name != shard or "\\" in shard or shard in ("", ".", ".."):
            raise UserError(f"{path.name} puts tensor {name} into {shard!r}, outside the checkpoint's folder; refused")
    return weight_map
