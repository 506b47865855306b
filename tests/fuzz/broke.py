"""Files that once broke a reader, one of each kind, as the fuzzer found them but smaller."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from .targets import TARGETS, signed

_LONG, _ESCAPE = "x" * 5000, "\x1b[31m"
_DEEP = b'{"a":' * 3000


def _with(name: str, change: Callable[[Any], object], seed: int = 0) -> bytes:
    """A JSON file that a target takes, after a change in place."""
    tree = json.loads(TARGETS[name].seeds()[seed])
    change(tree)
    return json.dumps(tree).encode()


def _config(**said: Any) -> bytes:
    return _with("config", lambda config: config.update(said))


def _marker(**said: Any) -> bytes:
    return signed(_with("marker", lambda marker: marker.update(said)))


def _tokens(**said: Any) -> bytes:
    return _with("tokens", lambda table: table.update(said))


def _statistics(**said: Any) -> bytes:
    """With another description of itself."""
    file = TARGETS["statistics"].seeds()[0]
    length = int.from_bytes(file[:8], "little")
    table = json.loads(file[8 : 8 + length])
    table["__metadata__"]["kvfold"] = json.dumps(json.loads(table["__metadata__"]["kvfold"]) | said)
    head = json.dumps(table).encode()
    return struct.pack("<Q", len(head)) + head + file[8 + length :]


def _gguf(tensors: int, pairs: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest + bytes(64)


def _key(name: str, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind)


_PART = json.loads(TARGETS["tokens"].seeds()[0])["train"][0]
_HUGE_ARRAY = _key("a", 9) + struct.pack("<IQ", 4, 2**60)
_COUNT = b"llama.block_count" + struct.pack("<I", 4)
_LLAMA = TARGETS["gguf-config"].seeds()[0]
_MANY_LAYERS = _LLAMA.replace(_COUNT + struct.pack("<I", 1), _COUNT + struct.pack("<I", 2**30))
_ODD_ALIGNMENT = _key("general.alignment", 6) + struct.pack("<f", 32)
_EMPTY_TENSOR = _gguf(1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 0, 2, 0))

BROKE: Mapping[str, tuple[bytes, ...]] = {
    # Names from the file made messages of any length, with what steers a terminal.
    "index": tuple(
        json.dumps({"weight_map": {name: shard}}).encode()
        for name, shard in ((_LONG, "a.safetensors"), (_ESCAPE, "a.safetensors"), ("b", "x" * 300), ("b", [_LONG]))
    ),
    # Counts and lengths were taken as they stand.
    "gguf-headers": (_gguf(0, 1, _HUGE_ARRAY), _gguf(0, 1, _ODD_ALIGNMENT), _EMPTY_TENSOR),
    "gguf-config": (_MANY_LAYERS,),
    "config": (
        _config(num_hidden_layers=10**9, model_type="qwen2"),
        _config(num_experts=3 * 10**6, model_type="qwen3_moe"),
    ),
    "inspect": (_config(num_hidden_layers=10**8),),
    "raw-config": (_config(hidden_size={"a": _LONG}),),
    "statistics": (_statistics(num_hidden_layers=10**9),),
    "uptraining": (b"..: 1\n", b"tokens: " + b"9" * 400),
    "pairs": (b"x" * 5000 + b"=1", b"model=a\nout=b\ntokens=1e6\ndata=" + b"x" * 300),
    # JSON of the right form with values of the wrong type; NaN, which cannot be written again; nesting without end.
    "run": (
        _with("run", lambda run: run["steps"]["convert"].update(seconds=float("nan"))),
        TARGETS["run"].seeds()[0].replace(b'{"kv_heads": 2}', b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}"),
    ),
    "metrics": (b'{"step": 1, "more": NaN}', b'{"step": 1, "more": 1e999}'),
    "marker": (
        _DEEP,
        *(_marker(step=step) for step in ([], 2.0, None)),
        *(_marker(files=files) for files in (7, {_LONG: "a"}, {"": "a"}, {"/dev/zero": "a"})),
        *(_marker(**{name: []}) for name in ("kind", "identity")),
    ),
    "tokens": (
        _DEEP,
        *(_tokens(hashes=hashes) for hashes in (7, {_LONG: "a"}, {"": "a"}, {"/dev/zero": "a"})),
        *(_tokens(train=train) for train in ("abc", 7, [{}])),
        *(_tokens(train=[_PART | {key: {}}]) for key in ("stored", "file")),
        _with("tokens", lambda table: table.pop("digest")),
    ),
}
