"""Hostile files made of good ones: fields at their extremes, of the wrong type, doubled or gone, and lengths that lie.

Every format has a function ``(file, random) -> file``; a file that it cannot take apart is changed byte by byte. All
that is drawn comes from ``random``, be it hypothesis's, a fuzzer's or one's own.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

Mutate = Callable[[bytes, Random], bytes]

_EDGES = (0, 15, 16, 31, 32, 53, 62, 63, 64)
NUMBERS = (-1, 2, 3, 7, 255, 10**9, 10**40, *(2**bits for bits in _EDGES), *(2**bits - 1 for bits in _EDGES))
FLOATS = (0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "", " ", "\0", "\n", "\x1b[31m", "\u202e", "\ud800", "a\tb\r\nc", "%s%n{0}", "\\", "$(id)",
    "x" * 5000, "a " * 3000, "é" * 300, "..", ".", "../../x", "/etc/passwd", "/dev/zero", "~", "~nobody",
    "null", "true", "nan", "inf", "-1", "1e999", "1e9", "0x10", "1_0", "9" * 5000,
    "[", "[a, [b]]", "[]", "{}", "'", '"', '"a', "&a [*a]",
    "F32", "BF16", "I64", "gpt2", "mamba", "deepseek_v3", "qwen3_moe", "embedded", "builtin", "source",
)  # fmt: skip
_RAW = (
    "1e999",
    "-1e999",
    "NaN",
    "1" * 5000,
    "[" * 3000,
    "[" * 500 + "]" * 500,
    '{"a":' * 3000,
    "01",
    "'a'",
    '"\\ud800"',
    "",
)


def data(file: bytes, random: Random) -> bytes:
    """Bytes changed, cut, doubled or put in, without a thought of what they mean."""
    found = bytearray(file)
    for _ in range(random.randint(1, 4)):
        at, size = random.randint(0, len(found)), random.choice((1, 1, 2, 4, 8, 16, 64))
        how = random.randint(0, 5)
        if how == 0 and found:
            found[at - 1] ^= 1 << random.randint(0, 7)
        elif how == 1:
            del found[at : at + size]
        elif how == 2:
            del found[at:]
        elif how == 3:
            found[at:at] = found[at : at + size]
        elif how == 4:
            found[at : at + 8] = struct.pack("<Q", random.choice(NUMBERS) % 2**64)
        else:
            found[at : at + size] = bytes(random.choice((0, 1, 10, 32, 127, 128, 255)) for _ in range(size))
    return bytes(found)


def json_text(file: bytes, random: Random) -> bytes:
    """A JSON file whose values, keys and structure are changed; seldom its text."""
    try:
        tree = json.loads(file)
    except (ValueError, RecursionError):
        return data(file, random)
    if random.randint(0, 9) == 0:
        return data(file, random)
    try:
        return _dump(changed(tree, random), random)
    except (ValueError, RecursionError):  # it has grown too deep, or a number too long
        return data(file, random)


def yaml_text(file: bytes, random: Random) -> bytes:
    """A YAML file with values, keys or lines changed."""
    try:
        lines = file.decode().splitlines()
    except UnicodeDecodeError:
        return data(file, random)
    for _ in range(random.randint(1, 3)):
        at, how = random.randint(0, max(len(lines) - 1, 0)), random.randint(0, 6)
        line = lines[at] if lines else ""
        key = line.partition(":")[0]
        if how == 0:
            del lines[at : at + 1]
        elif how == 1:
            lines.insert(random.randint(0, len(lines)), line)
        elif how == 2:
            lines[at : at + 1] = [line.replace("  ", random.choice(("", " ", "\t", "      ")), 1)]
        elif how == 3:
            lines[at : at + 1] = [f"{key}: {random.choice(_YAML)}"]
        elif how == 4:
            lines[at : at + 1] = [f"{key}: {_dump(scalar(random), random).decode(errors='replace')}"]
        elif how == 5:
            lines[at : at + 1] = [random.choice(_YAML) + line[len(key) :]]
        else:
            return data("\n".join(lines).encode(errors="replace"), random)
    return "\n".join(lines).encode("utf-8", errors="surrogatepass")


_LAUGHS = "&a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 8)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
_YAML = (
    *TEXTS, _LAUGHS, "&x [*x]", "&x {a: *x}", "*x", "*none", "&x {*x : 1}", "<<: *x", "? [a]", "? {a: b}", "- a", "---",
    "!!python/object/apply:os.system [id]", "!!binary x", "!<" + "x" * 100, "!!map []", "!!seq a", "%YAML 9.9", "...",
    "|", ">", "@", "`", "[a", "{a: b", "a: b: c", "a #", "[" * 3000, "{a: " * 3000, "- " * 3000,
    "\ufeff", '"\\x', "1:30", "0o7", "[~, null]",
)  # fmt: skip


def lines_text(file: bytes, random: Random) -> bytes:
    """A file of a JSON object a line, with lines changed as JSON, doubled, moved or gone."""
    lines = file.split(b"\n")
    for _ in range(random.randint(1, 3)):
        at = random.randint(0, len(lines) - 1)
        how = random.randint(0, 5)
        if how == 0:
            lines.insert(at, random.choice(lines))
        elif how == 1 and len(lines) > 1:
            del lines[at]
        else:
            lines[at] = json_text(lines[at], random)
    return b"\n".join(lines)


def pairs_text(file: bytes, random: Random) -> bytes:
    """Lines of ``key=value``, each part changed as text."""
    lines = file.decode(errors="replace").split("\n")
    for _ in range(random.randint(1, 3)):
        at, text = random.randint(0, len(lines) - 1), str(random.choice((*_YAML, *NUMBERS, *FLOATS)))
        key, _, value = lines[at].partition("=")
        lines[at] = random.choice(
            (f"{key}={text}", f"{text}={value}", f"{key}{text}", lines[at] + text, f"x.{lines[at]}")
        )
    return "\n".join(lines).encode(errors="surrogatepass")


def safetensors(file: bytes, random: Random) -> bytes:
    """A header changed as JSON, with a length before it that fits or lies, and data of any size behind."""
    length = int.from_bytes(file[:8], "little")
    head, rest = file[8 : 8 + length], file[8 + length :]
    try:
        table = json.loads(head)
    except (ValueError, RecursionError):
        return data(file, random)
    metadata = table.get("__metadata__") if isinstance(table, dict) else None
    if isinstance(metadata, dict) and isinstance(metadata.get("kvfold"), str) and random.randint(0, 1):
        metadata["kvfold"] = json_text(metadata["kvfold"].encode(), random).decode(errors="replace")
        head = json.dumps(table).encode()
    else:
        head = json_text(head, random)
    if random.randint(0, 7) == 0:
        rest = data(rest, random)
    said = random.choice(NUMBERS) % 2**64 if random.randint(0, 9) == 0 else len(head)
    return struct.pack("<Q", said) + head + rest


def changed(tree: Any, random: Random) -> Any:
    """Plain data with one to four places of it changed."""
    tree = copy.deepcopy(tree)
    for _ in range(random.randint(1, 4)):
        places = list(_places(tree))
        if not places or random.randint(0, 30) == 0:
            return scalar(random)
        holder, key = random.choice(places)
        how, value = random.randint(0, 8), holder[key]
        if how <= 2:
            holder[key] = scalar(random)
        elif how == 3:
            del holder[key]
        elif how == 4:
            holder[key] = copy.deepcopy(random.choice(places)[0])
        elif how == 5:
            holder[key] = [value] if random.randint(0, 1) else {"x": value}
        elif how == 6:
            holder[key] = str(value) if random.randint(0, 1) else _other_number(value, random)
        elif isinstance(holder, dict):
            holder[random.choice((*TEXTS, *holder))] = copy.deepcopy(value)
            if how == 7:
                holder.pop(key, None)
        else:
            holder.insert(key, copy.deepcopy(value))
    return tree


def scalar(random: Random) -> Any:
    return random.choice(random.choice((NUMBERS, FLOATS, TEXTS, (None, True, False, [], {}, [[]], {"": None}))))


def _other_number(value: Any, random: Random) -> Any:
    if not isinstance(value, int | float):
        return random.choice(NUMBERS)
    return random.choice((value + 1, value - 1, -value, value * 2, float(value), value * 10**6))


def _places(tree: Any, depth: int = 0) -> Any:
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        if depth < 50:
            yield from _places(tree[key], depth + 1)


def _dump(tree: Any, random: Random) -> bytes:
    """JSON; at times with a key twice, or with what is none in the place of a value."""
    text = json.dumps(tree, ensure_ascii=bool(random.randint(0, 3)))
    how = random.randint(0, 19)
    if how == 0 and isinstance(tree, dict) and tree:
        key = random.choice(list(tree))
        text = f"{{{json.dumps(key)}: {json.dumps(scalar(random))}, {text[1:]}"
    elif how == 1:
        parts = text.split(": ")
        at = random.randint(0, len(parts) - 1)
        parts[at] = random.choice(_RAW) + parts[at].lstrip("0123456789")
        text = ": ".join(parts)
    return text.encode("utf-8", errors="surrogatepass")
