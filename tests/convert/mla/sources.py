"""Tiny sources of every family that becomes MLA, in fp64, and what they are calibrated on."""

from __future__ import annotations

import torch
from transformers import AutoConfig

from ...eval.conftest import VOCABULARY, make_tokenizer
from ..test_channels import times
from ..tiny import HEADS, make_config, make_model, repeat_heads

_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

# Name of the case -> case of `tiny`, and what its config says beside.
SOURCES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama-bias", {}),
    "llama-head-dim": ("llama-head-dim", {}),
    "llama-tied": ("llama-tied", {}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "smollm3": ("smollm3", {}),  # its second layer has no positions
    "phi3": ("phi3", {}),
    "phi3-part": ("phi3", {"partial_rotary_factor": 0.5}),
    "stablelm": ("stablelm", {}),
}
BIASED = ("llama-bias", "qwen2", "stablelm")


def source_config(case: str, kv_heads: int, **extra):
    """The config of a case, with the vocabulary of the byte tokenizer."""
    kind, own = SOURCES[case]
    said = {**make_config(kind, kv_heads).to_dict(), **own, "vocab_size": VOCABULARY, **extra}
    if "partial_rotary_factor" in said:  # rope_parameters repeat the one that they were made with
        said.pop("rope_parameters", None)
    return AutoConfig.for_model(said.pop("model_type"), **said)


def make_source(case: str, kv_heads: int, seed: int = 0, **extra):
    return make_model(source_config(case, kv_heads, **extra), seed)


def save_source(model, folder):
    """Write a model and the byte tokenizer; returns the folder."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def equal_heads(case: str, kv_heads: int):
    """A model whose KV heads are all the same."""
    return repeat_heads(make_source(case, 1, seed=1), source_config(case, kv_heads))


def twins(case: str, kv_heads: int, seed: int = 0):
    """A model whose KV heads are equal up to what commutes: a complex factor for each pair of key coordinates, and an
    invertible map of the values. Queries and output projection undo them."""
    wide = equal_heads(case, kv_heads)
    d, each = wide.model.layers[0].self_attn.head_dim, HEADS // kv_heads
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in wide.model.layers:
            attention = layer.self_attn
            for head in range(kv_heads):
                rows = slice(head * d, (head + 1) * d)
                factor = torch.randn(d // 2, generator=generator, dtype=torch.complex128)
                times(attention.k_proj, rows, factor)
                change = torch.randn(d, d, generator=generator, dtype=torch.float64)
                for tensor in (attention.v_proj.weight, attention.v_proj.bias):
                    if tensor is not None:
                        tensor[rows] = change @ tensor[rows]
                for query in range(head * each, (head + 1) * each):
                    rows = slice(query * d, (query + 1) * d)
                    times(attention.q_proj, rows, 1 / factor.conj())
                    attention.o_proj.weight[:, rows] = attention.o_proj.weight[:, rows] @ change.inverse()
    return wide


# Few windows of a short text.
WINDOW = 48


def knobs(text: str) -> dict:
    return {"calib": [text], "calib_builtin": False, "calib_windows": 4, "calib_window": WINDOW}
