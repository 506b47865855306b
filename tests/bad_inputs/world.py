"""What a case is run in: a folder with two whole checkpoints, a text and recipes, all of which a case may spoil."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvfold.recipes.tiny import MODEL_DIR

Spoil = Callable[[Path], object]
"""Damages the folder that it is given."""

LAYERS, HIDDEN, HEADS, KV_HEADS, WIDE, WORDS = 2, 16, 4, 2, 24, 2048
K1 = "model.layers.1.self_attn.k_proj.weight"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS, "intermediate_size": WIDE, "vocab_size": WORDS, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": True, "initializer_range": 0.02, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_LAYER = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (WORDS, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in _LAYER.items()},
}
RECIPE = "source:\n  model: src\nconvert:\n  to: gqa\n  kv_heads: 1\n  method: mean\n"


def header_of(names: list[str]) -> dict[str, Any]:
    """A right header of BF16 tensors in this order."""
    table, end = {}, 0
    for name in names:
        start, end = end, end + 2 * math.prod(SHAPES[name])
        table[name] = {"dtype": "BF16", "shape": list(SHAPES[name]), "data_offsets": [start, end]}
    return table


def safetensors(header: dict[str, Any] | bytes, size: int | None = None, length: int | None = None) -> bytes:
    """A file of zeros with a header, which may say what it likes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    if size is None:
        size = max((row["data_offsets"][1] for row in json.loads(raw).values()), default=0)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(size)


def build(folder: Path) -> None:
    """The folder of every case, before it is spoilt."""
    for name in ("src", "other"):
        checkpoint = folder / name
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text(json.dumps(CONFIG))
        (checkpoint / "model.safetensors").write_bytes(safetensors(header_of(list(SHAPES))))
        for tokens in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL_DIR / tokens, checkpoint / tokens)
    (folder / "text.txt").write_text("The cache holds keys and values. " * 200)
    (folder / "recipe.yaml").write_text(RECIPE)


def state_of(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below a folder, so that any change shows."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content: Any = None
        if stat.S_ISLNK(status.st_mode):
            content = path.readlink()
        elif stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found


def both(*spoils: Spoil) -> Spoil:
    """One after the other."""
    return lambda folder: [spoil(folder) for spoil in spoils]


def whole(folder: Path) -> None:
    """Nothing is spoilt; what is asked for is wrong."""


def config(**changes: Any) -> Spoil:
    """Change what config.json says; `...` removes."""

    def spoil(folder: Path) -> None:
        table = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
        (folder / "src/config.json").write_text(json.dumps(table))

    return spoil


def put(name: str, content: str | bytes) -> Spoil:
    """A file of this content, with the folders that it is in."""

    def spoil(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return spoil


def drop(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def link(name: str, target: str) -> Spoil:
    """A symbolic link, in the place of what is there."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def instead(name: str, make: Callable[[Path], object]) -> Spoil:
    """Something else in the place of a file."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return spoil


def fifo(path: Path) -> None:
    os.mkfifo(path)


def header(change: Callable[[dict[str, Any]], object], size: int | None = None) -> Spoil:
    """Change the header of the weights; the data stay as they were."""

    def spoil(folder: Path) -> None:
        table = header_of(list(SHAPES))
        end = max(row["data_offsets"][1] for row in table.values())
        change(table)
        (folder / "src/model.safetensors").write_bytes(safetensors(table, end if size is None else size))

    return spoil


def sharded(change: Callable[[dict[str, Any]], object] = lambda index: None) -> Spoil:
    """Deal the weights to two shards, and change their index."""

    def spoil(folder: Path) -> None:
        src = folder / "src"
        (src / "model.safetensors").unlink()
        shards = {"a.safetensors": list(SHAPES)[:5], "b.safetensors": list(SHAPES)[5:]}
        for name, held in shards.items():
            (src / name).write_bytes(safetensors(header_of(held)))
        index = {"metadata": {}, "weight_map": {tensor: name for name, held in shards.items() for tensor in held}}
        change(index)
        (src / "model.safetensors.index.json").write_text(json.dumps(index))

    return spoil
