"""What the headers and the index of the weights can say wrong, and weights that are not whole."""

# ruff: noqa: E501  a row a case, as of any table
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .case import CHECK, COMMANDS, COPY, FETCH, GQA, INSPECT, MLA, NO_WEIGHTS, PPL, Case
from .world import K1, SHAPES, Spoil, both, config, drop, header, header_of, put, safetensors, sharded


def _tensor(**changes: Any) -> Spoil:
    """Change what the header says of one tensor."""
    return header(lambda table: table[K1].update(changes))


def _rename(table: dict[str, Any]) -> None:
    table["model.layers.1.self_attn.k_proj.weightt"] = table.pop(K1)


def _twice(folder: Path) -> None:
    raw = json.dumps(header_of(list(SHAPES)))
    row = raw[raw.index(f'"{K1}"') : raw.index("}", raw.index(f'"{K1}"')) + 1]
    put("src/model.safetensors", safetensors(f"{raw[:-1]}, {row}}}".encode(), 80_000))(folder)


def _point(target: str) -> Spoil:
    return sharded(lambda index: index["weight_map"].update({K1: target}))


def _shorten(folder: Path) -> None:
    path = folder / "src/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
SHARD = "model.safetensors"
HEADERS = [
    *(
        Case(f"the weights are cut off, {name}", _shorten, command, SHARD, FETCH)
        for name, command in COMMANDS.items()
        if name not in NO_WEIGHTS
    ),
    Case("overlapping tensors", header(lambda t: t[K1].update(data_offsets=[n - 8 for n in t[K1]["data_offsets"]])), INSPECT, K1, FETCH),
    Case("a hole between tensors", put("src/model.safetensors", safetensors({**ONE, "b": {**ONE["a"], "data_offsets": [12, 20]}})), GQA, "tensor b", FETCH),
    Case("offsets turned round", _tensor(data_offsets=[256, 0]), GQA, SHARD, FETCH),
    Case("a header of 2^63 bytes", put("src/model.safetensors", safetensors(ONE, length=2**63)), INSPECT, SHARD, FETCH),
    Case("a header of 90 MB in a small file", put("src/model.safetensors", safetensors(ONE, length=90_000_000)), GQA, SHARD, FETCH),
    Case("a header of no length", put("src/model.safetensors", safetensors(ONE, length=0)), MLA, SHARD, FETCH),
    Case("the weights are empty", put("src/model.safetensors", b""), GQA, SHARD, FETCH),
    Case("a header that is no JSON", put("src/model.safetensors", safetensors(b"{" * 64, 8)), INSPECT, SHARD, FETCH),
    Case("a header nested 50,000 deep", put("src/model.safetensors", safetensors(b'{"a":' * 50_000, 8)), CHECK, SHARD, FETCH),
    Case("a header that is a list", put("src/model.safetensors", safetensors(b"[]", 8)), GQA, SHARD, FETCH),
    Case("NaN for an offset", put("src/model.safetensors", safetensors(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[NaN,8]}}', 8)), GQA, SHARD, FETCH),
    Case("Infinity in a shape", put("src/model.safetensors", safetensors(b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}', 8)), MLA, SHARD, FETCH),
    Case("true for a size", _tensor(shape=[True, 128]), GQA, SHARD, FETCH),
    Case("text for a size", _tensor(shape=["8", 16]), INSPECT, SHARD, FETCH),
    Case("a negative size", _tensor(shape=[-8, -16]), GQA, SHARD, FETCH),
    Case("a shape whose product overflows", _tensor(shape=[2**62, 2**62, 2**62]), INSPECT, SHARD, FETCH),
    Case("a shape of 10,000 sizes", _tensor(shape=[2**63] * 10_000), GQA, SHARD, FETCH),
    Case("another dtype than the bytes", _tensor(dtype="F32"), GQA, K1, FETCH),
    Case("a dtype that there is not", _tensor(dtype="F4_WHATEVER"), MLA, "F4_WHATEVER", "does not read"),
    Case("a dtype that is a number", _tensor(dtype=16), GQA, SHARD, FETCH),
    Case("a tensor twice", _twice, GQA, K1, FETCH),
    Case("metadata that is no text", put("src/model.safetensors", safetensors(b'{"__metadata__":{"a":1}}', 0)), GQA, SHARD, FETCH),
    Case("more bytes than the header says", header(lambda t: None, 90_000), GQA, SHARD, FETCH),
    Case("a git-lfs pointer", put("src/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), PPL, "git-lfs pointer", "git lfs pull"),
    Case("a tensor of another shape", header(lambda t: t[K1].update(shape=[4, 32])), GQA, K1, "mend it, or fetch both again"),
    Case("a tensor of another name", header(_rename), GQA, "k_proj.weightt", "the nearest is"),
    Case("a layer too few", config(num_hidden_layers=3), GQA, "model.layers.2.", "mend the config, or fetch the weights again"),
    Case("a layer too many", config(num_hidden_layers=1), GQA, "model.layers.1.", "mend the config"),
    Case("an index that leads up", _point("../other/model.safetensors"), GQA, "'../other/model.safetensors'", "outside the checkpoint's folder"),
    Case("an index that leads up, ppl", _point("../other/model.safetensors"), PPL, "'../other/model.safetensors'", "outside the checkpoint's folder"),
    Case("an index with an absolute path", _point("/etc/passwd"), INSPECT, "'/etc/passwd'", "outside the checkpoint's folder"),
    Case("an index with a folder", _point("sub/a.safetensors"), MLA, "'sub/a.safetensors'", "outside the checkpoint's folder"),
    Case("an index with a number", sharded(lambda i: i["weight_map"].update({K1: 3})), GQA, "into 3", "outside the checkpoint's folder"),
    Case("an index with a NUL", _point("a\0b"), GQA, "a\\x00b", "fetch them again"),
    Case("an index with a name of 10,000 signs", _point("x" * 10_000), GQA, "xxx", "fetch them again"),
    Case("an index to a shard that is not there", _point("c.safetensors"), GQA, "c.safetensors", "fetch"),
    Case("an index to the wrong shard", _point("a.safetensors"), INSPECT, K1, "fetch"),
    Case("an index without a map", sharded(lambda i: i.pop("weight_map")), GQA, "no weight_map", "fetch the index again"),
    Case("an index that is cut off", both(sharded(), put("src/model.safetensors.index.json", '{"weight_map": {"a"')), GQA, "index", COPY),
    Case("an index that is empty", both(sharded(), put("src/model.safetensors.index.json", "")), CHECK, "index", COPY),
    Case("a tensor that the index does not name", sharded(lambda i: i["weight_map"].pop(K1)), GQA, K1, "fetch"),
    Case("a shard is missing", both(sharded(), drop("src/b.safetensors")), MLA, "b.safetensors", "fetch"),
    Case("a shard is empty", both(sharded(), put("src/b.safetensors", b"")), GQA, "b.safetensors", FETCH),
    Case("no weights", drop("src/model.safetensors"), GQA, "src holds no weights", "give the folder that does"),
]  # fmt: skip
