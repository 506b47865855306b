"""What shows when a file is read: pickles, texts, tables and tokenizers."""

# ruff: noqa: E501  a row a case, as of any table
from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .case import CALIBRATE, GQA, INSPECT, PPL, Case
from .world import Spoil, both, config, drop, put, whole


class Code:
    """What a pickle runs when it is loaded without care."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch pwned",)


def pickled(value: Any) -> Spoil:
    return both(drop("src/model.safetensors"), put("src/pytorch_model.bin", pickle.dumps(value)))


BIN = "pytorch_model.bin"
PICKLES = [
    Case("a pickle with code", pickled({"a": Code()}), GQA, BIN, "as safetensors"),
    Case("a pickle with code, ppl", pickled(Code()), PPL, "the pickled weights of src", "as safetensors"),
    Case("a pickle with code, inspect", pickled([Code()]), INSPECT, BIN, "as safetensors"),
    Case("a pickle that is cut off", both(drop("src/model.safetensors"), put("src/pytorch_model.bin", b"\x80\x02}q\x00")), GQA, BIN, "as safetensors"),
    Case("a pickle that is empty", both(drop("src/model.safetensors"), put("src/pytorch_model.bin", b"")), GQA, BIN, "as safetensors"),
    Case("a pickle of other things", pickled({"a": 3}), GQA, BIN, "as safetensors"),
]  # fmt: skip

CHECKPOINTS = [
    Case("its own code", config(model_type="evil", auto_map={"AutoConfig": "evil.Config"}), INSPECT, "brings its own code", "stock transformers models only"),
    Case("no head count", config(num_attention_heads=...), GQA, "number of attention heads", "mend it, or fetch it again"),
    Case("no hidden size", config(hidden_size=...), GQA, "the config says [2048, 4096]", "mend it, or fetch both again"),
    Case("an unknown activation", config(hidden_act="zelu"), f"{GQA} --calib text.txt --no-calib-builtin", "zelu", "mend it, or fetch it again"),
    Case("an unknown RoPE", config(rope_parameters={"rope_type": "magic", "rope_theta": 1e4}), f"{GQA} --calib text.txt --no-calib-builtin", "magic", "mend it, or fetch it again"),
    Case("GGUF without sizes", put("m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 0)), "convert gqa m.gguf out --kv-heads 1", "says no block_count", "fetch it again"),
    Case("GGUF that is cut off", put("m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 1, 1)), "inspect m.gguf", "m.gguf", "fetch"),
]  # fmt: skip


def parquet(name: str, **columns: list[Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), folder / name)

    return spoil


TEXTS = [
    Case("not UTF-8", put("t", "äöü".encode("latin-1")), "eval ppl src --text t", "t is not UTF-8", "convert it first"),
    Case("binary", put("t", bytes(range(256))), f"{GQA} --calib t --no-calib-builtin", "t is not UTF-8", "convert it first"),
    Case("blank", put("t", " \n\n\t "), "eval compare src other --text t", "t holds no text", "give another file"),
    Case("shorter than a window", put("t", "one"), "eval ppl src --text t", "the text has 1 token", "give more text"),
    Case("lines without the column", put("t.jsonl", '{"body": "x"}\n'), "eval ppl src --text t.jsonl", "no column 'text'", "body"),
    Case("lines without the column, calibrate", put("t.jsonl", '{"body": "x"}\n'), f"{CALIBRATE} --calib t.jsonl", "no column 'text'", "body"),
    Case("a table without the column", put("t.csv", "a,b\n1,2\n"), "eval long src --text t.csv", "no column 'text'", "a, b"),
    Case("parquet without the column", parquet("t.parquet", body=["x"]), "verify src other --text t.parquet", "no column 'text'", "body"),
    Case("numbers in the column", put("t.jsonl", '{"text": 3}\n'), "eval ppl src --text t.jsonl", "holds int", "must be strings"),
    Case("lines that are no JSON", put("t.jsonl", "{{{\n"), "eval ppl src --text t.jsonl", "cannot load t.jsonl", "mend it, or fetch it again"),
    Case("parquet that is none", put("t.parquet", "PAR0"), "eval ppl src --text t.parquet", "cannot load t.parquet", "mend it, or fetch it again"),
    Case("no rows", put("t.csv", "text\n"), "eval ppl src --text t.csv", "t.csv holds no text", "give another file"),
]  # fmt: skip


def tokens(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Change the tokenizer."""

    def spoil(folder: Path) -> None:
        path = folder / "src/tokenizer.json"
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    return spoil


def far_token(table: dict[str, Any]) -> None:
    """An id beyond the vocabulary, for a word that the text has."""
    table["added_tokens"].append(
        {"id": 50_000, "content": "cache", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    )  # fmt: skip


FAR = "lies beyond the model's vocabulary of 2048"
OWN = "use the model's own tokenizer"
TOKENIZERS = [
    Case("ids beyond the vocabulary, ppl", tokens(far_token), PPL, FAR, OWN),
    Case("ids beyond the vocabulary, calibrate", tokens(far_token), f"{CALIBRATE} --calib text.txt", FAR, OWN),
    Case("ids beyond the vocabulary, gqa", tokens(far_token), f"{GQA} --calib text.txt", FAR, OWN),
    Case("no tokenizer", both(drop("src/tokenizer.json"), drop("src/tokenizer_config.json")), PPL, "src has no tokenizer", "copy the source's tokenizer files"),
    Case("no tokenizer, gqa", both(drop("src/tokenizer.json"), drop("src/tokenizer_config.json")), GQA, "src has no tokenizer", "copy the source's tokenizer files"),
    Case("a tokenizer that is empty", put("src/tokenizer.json", ""), PPL, "cannot load the tokenizer of src", "mend it, or fetch it again"),
    Case("a tokenizer that is no JSON", put("src/tokenizer.json", "{{{"), CALIBRATE, "cannot load the tokenizer of src", "mend it, or fetch it again"),
    Case("a tokenizer config that is a list", put("src/tokenizer_config.json", "[]"), PPL, "cannot load the tokenizer of src", "mend it, or fetch it again"),
    Case("a tokenizer with its own code", both(drop("src/tokenizer.json"), put("src/tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["evil.T", null]}, "tokenizer_class": "T"}'), put("src/evil.py", "open('pwned', 'w')")), PPL, "src has no tokenizer", "copy the source's tokenizer files"),
    Case("no chat template", whole, f"{CALIBRATE} --chat", "no chat template", "leave --chat out"),
]  # fmt: skip
