from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from kvfold.common.errors import UserError
from kvfold.convert.mla.convert import convert_mla
from kvfold.eval.cache import cache_size, measure_cache

from .conftest import CONTEXT, make_model

MLA = {
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,  # no layer has experts
}

# Family, settings, and elements a token and layer as counted by hand.
FAMILIES = {
    "llama-mha": ("llama", {"num_key_value_heads": 4}, 64),
    "llama-gqa": ("llama", {"num_key_value_heads": 2}, 32),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}, 16),
    "llama-head_dim": ("llama", {"head_dim": 24}, 96),
    "mistral": ("mistral", {"sliding_window": None}, 32),
    "gpt2": ("gpt2", {}, 64),
    "gpt_bigcode-mqa": ("gpt_bigcode", {"multi_query": True}, 16),
    "gpt_bigcode-mha": ("gpt_bigcode", {"multi_query": False}, 64),
    "falcon-mqa": ("falcon", {"multi_query": True}, 16),
    "falcon-mha": ("falcon", {"multi_query": False, "num_key_value_heads": None}, 64),
    "phi": ("phi", {}, 32),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}, 64),
    "deepseek_v3": ("deepseek_v3", MLA, 32),
    "deepseek_v2": ("deepseek_v2", MLA, 32),
}

# Family, settings, and tokens that each layer still holds after 40 tokens.
WINDOWED = {
    "mistral": ("mistral", {"sliding_window": 16}, [15, 15]),
    "mistral-wide": ("mistral", {"sliding_window": 41}, [40, 40]),
    "gemma2": ("gemma2", {"sliding_window": 16, "head_dim": 8}, [15, 40]),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 16, "head_dim": 8, "layer_types": ["full_attention", "sliding_attention"]},
        [40, 15],
    ),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, [40, 7]),
}


@pytest.mark.parametrize(("model_type", "settings", "elements"), FAMILIES.values(), ids=FAMILIES)
def test_what_the_config_says_is_what_the_cache_holds(model_type, settings, elements):
    report = measure_cache(make_model(model_type, **settings), model="m", context=40)
    assert report.kv_elements_per_token_per_layer == elements
    assert report.measured_kv_elements_per_token_per_layer == elements
    assert report.kv_bytes_per_token == 2 * 4 * elements
    assert report.kv_bytes == report.measured_kv_bytes == 40 * 2 * 4 * elements
    assert report.measured_storage_bytes == report.measured_kv_bytes


@pytest.mark.parametrize(("model_type", "settings", "held"), WINDOWED.values(), ids=WINDOWED)
def test_windowed_layers_hold_their_window_less_one(model_type, settings, held):
    report = measure_cache(make_model(model_type, **settings), model="m", context=40)
    assert report.kv_elements_per_token_per_layer == report.measured_kv_elements_per_token_per_layer == 32
    assert report.kv_bytes == report.measured_kv_bytes == sum(held) * 32 * 4
    assert report.kv_bytes_per_token == 2 * 32 * 4


def test_storage_that_a_view_keeps_alive_is_reported():
    report = measure_cache(make_model("mistral", sliding_window=16), model="m", context=40)
    assert report.measured_kv_bytes == 2 * 15 * 32 * 4
    assert report.measured_storage_bytes == 2 * 40 * 32 * 4


def test_measured_is_found_and_not_computed():
    """A class that caches its heads repeated is caught: falcon's new decoder, 2 KV heads held as 4."""
    model = make_model("falcon", new_decoder_architecture=True, num_kv_heads=2)
    report = measure_cache(model, model="m", context=10)
    assert report.kv_elements_per_token_per_layer == 32
    assert report.measured_kv_elements_per_token_per_layer == 64
    assert report.measured_kv_bytes == 2 * report.kv_bytes


def test_auto_dtype_is_the_checkpoints_own(llama, save):
    path = save(llama.bfloat16(), tokenizer=False)
    report, wide = cache_size(path), cache_size(path, dtype="float32")
    assert (report.dtype, wide.dtype) == ("bfloat16", "float32")
    assert report.measured_kv_bytes == report.kv_bytes == CONTEXT * 2 * 2 * 32
    assert wide.measured_kv_bytes == wide.kv_bytes == 2 * report.kv_bytes


def test_the_report_is_plain_json(llama, save):
    path = save(llama, tokenizer=False)
    report = json.loads(json.dumps(asdict(cache_size(path, context=10))))
    assert (report["model"], report["context"], report["num_hidden_layers"]) == (path, 10, 2)


def test_the_default_context_is_bounded(llama):
    assert measure_cache(llama, model="m").context == CONTEXT
    long = make_model("llama", max_position_embeddings=4096)
    assert measure_cache(long, model="m").context == 512


@pytest.mark.parametrize(("context", "message"), [(65, "longer than the model's context 64"), (0, "nothing")])
def test_contexts_that_do_not_fit(context, message, llama):
    with pytest.raises(UserError, match=message):
        measure_cache(llama, model="m", context=context)


@pytest.mark.parametrize("form", ["deepseek_v3", "plain"])
def test_a_latent_is_what_is_held(form, llama, save, tmp_path):
    src, out = save(llama, tokenizer=False), tmp_path / "out"
    convert_mla(src, out, form=form, kv_rank=10, rope_dim=4, rope_select="high", calib=["none"])
    before, after = cache_size(src), cache_size(out)
    assert before.measured_kv_elements_per_token_per_layer == 32
    assert after.kv_elements_per_token_per_layer == after.measured_kv_elements_per_token_per_layer == 14
    assert after.kv_bytes == after.measured_kv_bytes == after.measured_storage_bytes == CONTEXT * 2 * 14 * 4


def test_padding_is_held_too(llama, save, tmp_path):
    llama.config.rope_parameters = {"rope_type": "default", "rope_theta": 10.0}
    src, out = save(llama, tokenizer=False), tmp_path / "out"
    sizes = {"kv_rank": 10, "rope_dim": 8, "rope_select": "high", "calib": ["none"]}
    convert_mla(src, out, pad_to_engine=True, **sizes)
    assert cache_size(out, context=8).measured_kv_elements_per_token_per_layer == 576
