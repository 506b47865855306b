from __future__ import annotations

import pytest
from transformers import AutoConfig

from kvfold.common import kvcache
from kvfold.common.errors import UserError

GIB = 2**30
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}


def config(model_type: str, **settings):
    return AutoConfig.for_model(model_type, **settings)


@pytest.mark.parametrize(("kv_heads", "gib"), [(32, 4.0), (4, 0.5), (1, 0.125)])
def test_closed_forms_in_fp16(kv_heads, gib):
    llama = config(
        "llama",
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
    )
    assert kvcache.kv_bytes(llama, 8192, kvcache.ELEMENT_BYTES["float16"]) == gib * GIB
    assert kvcache.kv_bytes_per_token(llama, 2) * 8192 == gib * GIB


def test_deepseek_v3_as_published():
    deepseek = config("deepseek_v3")
    assert kvcache.attention_kind(deepseek) == "MLA"
    assert kvcache.kv_elements(deepseek) == 512 + 64
    assert kvcache.kv_bytes_per_token(deepseek, 2) == 61 * 576 * 2


@pytest.mark.parametrize(
    ("model_type", "settings", "kv_heads", "kind"),
    [
        ("llama", {**HEADS, "num_key_value_heads": 4}, 4, "MHA"),
        ("llama", {**HEADS, "num_key_value_heads": 2}, 2, "GQA"),
        ("llama", {**HEADS, "num_key_value_heads": 1}, 1, "MQA"),
        ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, 1, "MHA"),
        ("gpt2", {"n_head": 4}, 4, "MHA"),
        ("gpt_bigcode", {"n_head": 4}, 1, "MQA"),
        ("gpt_bigcode", {"n_head": 4, "multi_query": False}, 4, "MHA"),
        ("falcon", HEADS, 1, "MQA"),
        ("falcon", {**HEADS, "multi_query": False}, 4, "MHA"),
        ("falcon", {**HEADS, "new_decoder_architecture": True, "num_kv_heads": 2}, 2, "GQA"),
        ("gpt_neox", HEADS, 4, "MHA"),
        ("mpt", {"d_model": 64, "n_heads": 4}, 4, "MHA"),
    ],
)
def test_heads_by_family(model_type, settings, kv_heads, kind):
    family = config(model_type, **settings)
    assert kvcache.num_key_value_heads(family) == kv_heads
    assert kvcache.attention_kind(family) == kind
    assert kvcache.kv_elements(family) == 2 * kv_heads * kvcache.head_dim(family)


def test_an_explicit_head_dim_counts():
    assert kvcache.head_dim(config("llama", **HEADS)) == 16
    assert kvcache.head_dim(config("llama", **HEADS, head_dim=24)) == 24
    assert kvcache.head_dim(config("mpt", d_model=64, n_heads=4)) == 16


@pytest.mark.parametrize(
    ("model_type", "settings", "held"),
    [
        ("llama", HEADS, [50, 50, 50]),
        ("mistral", {**HEADS, "sliding_window": 10}, [9, 9, 9]),
        ("mistral", {**HEADS, "sliding_window": 51}, [50, 50, 50]),
        ("gemma2", {**HEADS, "sliding_window": 10}, [9, 50, 9]),
        ("qwen2", {**HEADS, "sliding_window": 10}, [50, 50, 50]),  # unless use_sliding_window
        ("llama4_text", {**HEADS, "attention_chunk_size": 10, "no_rope_layers": [1, 1, 0]}, [9, 9, 50]),
        ("lfm2", {**HEADS, "layer_types": ["conv", "full_attention", "conv"]}, [0, 50, 0]),
    ],
)
def test_tokens_that_layers_hold(model_type, settings, held):
    family = config(model_type, **settings)
    assert kvcache.cached_tokens(family, 50) == held
    elements = kvcache.kv_elements(family)
    assert kvcache.kv_bytes(family, 50, 2) == 2 * elements * sum(held)
    assert kvcache.kv_bytes_per_token(family, 2) == 2 * elements * sum(tokens > 0 for tokens in held)


def test_what_it_does_not_know_it_says():
    unknown = config("llama", **HEADS)
    unknown.layer_types = ["window_attention"] * 3
    with pytest.raises(UserError, match="window_attention"):
        kvcache.cached_tokens(unknown, 50)
    with pytest.raises(UserError, match="mamba has no attention heads"):
        kvcache.kv_elements(config("mamba"))


def test_the_text_part_of_a_larger_model_counts():
    gemma = config("gemma3", text_config={**HEADS, "num_key_value_heads": 2, "head_dim": 8})
    assert kvcache.attention_kind(gemma) == "GQA"
    assert kvcache.kv_elements(gemma) == 2 * 2 * 8


@pytest.mark.parametrize(
    ("model_type", "settings", "context"),
    [
        ("llama", {"max_position_embeddings": 77}, 77),
        ("gpt2", {"n_positions": 77}, 77),
        ("mpt", {"max_seq_len": 77}, 77),
        ("bloom", {}, None),
    ],
)
def test_context(model_type, settings, context):
    family = config(model_type, **settings)
    assert kvcache.context_length(family) == context
    assert kvcache.fit_context(family, "window", None, 2048) == (context or 2048)
    assert kvcache.fit_context(family, "window", None, 50) == 50
    assert kvcache.fit_context(family, "window", 77, 50) == 77
    if context:
        with pytest.raises(UserError, match="window 78 is longer than the model's context 77"):
            kvcache.fit_context(family, "window", 78, 50)
