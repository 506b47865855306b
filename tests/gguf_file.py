"""A tiny Llama as a GGUF file, with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<s>", "</s>", *ALPHABET, "ab", "abc"])
    writer.add_token_types([3, 3] + [1] * 258)
    writer.add_token_merges(["a b", "ab c"])  # one alone is read back as a string, not a list
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (260, 32), "output": (260, 32), "output_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
