"""A GGUF file as the fields that it is made of, which are changed one by one; see `mutate`."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

from .mutate import NUMBERS, TEXTS, data

Field = tuple[str, Any]
"""A letter of `struct`, or `s` for bytes, and the value."""

_SCALARS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Parts:
    """The fields of a file, in order."""

    def __init__(self, file: bytes):
        self.file, self.at, self.fields = file, 0, []

    def take(self, letter: str) -> Any:
        (value,) = struct.unpack_from(f"<{letter}", self.file, self.at)
        self.at += struct.calcsize(f"<{letter}")
        self.fields.append((letter, value))
        return value

    def take_bytes(self, count: int) -> None:
        if count > len(self.file) - self.at:
            raise struct.error
        self.fields.append(("s", self.file[self.at : self.at + count]))
        self.at += count

    def take_string(self) -> None:
        self.take_bytes(self.take("Q"))

    def take_value(self, kind: int, depth: int = 0) -> None:
        if kind == _STRING:
            self.take_string()
        elif kind == _ARRAY and depth < 9:
            inner, count = self.take("I"), self.take("Q")
            for _ in range(min(count, len(self.file))):
                self.take_value(inner, depth + 1)
        elif kind in _SCALARS:
            self.take(_SCALARS[kind])
        else:
            raise struct.error


def _taken_apart(file: bytes) -> list[Field]:
    parts = _Parts(file)
    parts.take_bytes(4)
    parts.take("I")
    tensors, pairs = parts.take("Q"), parts.take("Q")
    for _ in range(pairs):
        parts.take_string()
        parts.take_value(parts.take("I"))
    for _ in range(tensors):
        parts.take_string()
        for _ in range(parts.take("I")):
            parts.take("Q")
        parts.take("I")
        parts.take("Q")
    parts.take_bytes(len(file) - parts.at)
    return parts.fields


def gguf(file: bytes, random: Random) -> bytes:
    """Counts, lengths, types, names, sizes and offsets at their extremes; fields doubled or gone; arrays in arrays."""
    try:
        fields = _taken_apart(file)
    except struct.error:
        return data(file, random)
    for _ in range(random.randint(1, 4)):
        at, how = random.randint(0, len(fields) - 1), random.randint(0, 9)
        letter, value = fields[at]
        if how <= 3:
            fields[at] = (letter, _other(letter, value, random))
        elif how == 4:
            fields[at : at + random.randint(1, 3)] = []
        elif how == 5:
            span = fields[at : at + random.randint(1, 6)]
            fields[at:at] = span * random.choice((1, 1, 2, 1000))
        elif how == 6:
            fields[at:at] = [("I", _ARRAY), ("Q", 1)] * random.choice((1, 3, 200, 3000))
        elif how == 7 and letter == "s" and at and fields[at - 1][0] == "Q":  # a string with the length that it has
            said = random.choice((*TEXTS, "llama.block_count", "general.alignment")).encode(errors="surrogatepass")
            fields[at - 1 : at + 1] = [("Q", len(said)), ("s", said)]
        elif how == 8:
            return _packed(fields)[: random.randint(0, len(file))]
        else:
            fields[at] = (letter, _other(letter, value, random, near=True))
        if not fields:
            return b""
    return _packed(fields)


def _other(letter: str, value: Any, random: Random, *, near: bool = False) -> Any:
    if letter == "s":
        return data(value, random) if near else random.choice(TEXTS).encode(errors="surrogatepass")
    if letter in "fd":
        return random.choice((0.0, -1.0, 1e30, float("nan"), float("inf"), 0.5))
    if near:
        return random.choice((value + 1, value - 1, value * 2, random.randint(0, 12)))
    return random.choice(NUMBERS)


def _packed(fields: list[Field]) -> bytes:
    return b"".join(value if letter == "s" else _pack(letter, value) for letter, value in fields)


def _pack(letter: str, value: Any) -> bytes:
    if letter in "fd?":
        return struct.pack(f"<{letter}", value)
    size = struct.calcsize(f"<{letter}")
    return (int(value) % 256**size).to_bytes(size, "little")
