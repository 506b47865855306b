"""Bytes that are lost or turn over on a disk."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from random import Random


@dataclass(frozen=True)
class Damage:
    """What was done to a file, and how to take it back.

    Attributes:
        said: in words.
    """

    path: Path
    whole: bytes
    said: str

    def mend(self) -> None:
        self.path.write_bytes(self.whole)


def truncate(path: Path, draw: Random, *, quietly: bool = False) -> Damage:
    """Cut a file short; `quietly` keeps its time."""
    whole = path.read_bytes()
    length = draw.choice([0, 7, draw.randrange(len(whole)), len(whole) - 1])
    _write(path, whole[:length], quietly)
    return Damage(path, whole, f"{path.name} cut to {length} of {len(whole)} bytes")


def flip(path: Path, draw: Random, *, quietly: bool = False) -> Damage:
    """Turn one bit of a file over: of the header in one of three, where it has one; `quietly` keeps its time."""
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0] + 8 if path.suffix == ".safetensors" else 0
    at = draw.randrange(header) if header and draw.random() < 1 / 3 else draw.randrange(header, len(whole))
    bit = draw.randrange(8)
    _write(path, whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :], quietly)
    return Damage(path, whole, f"bit {bit} of byte {at} of {path.name}{' (header)' * (at < header)}")


def _write(path: Path, content: bytes, quietly: bool) -> None:
    before = path.stat()
    path.write_bytes(content)
    if quietly:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
