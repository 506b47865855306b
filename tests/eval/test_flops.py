from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from transformers import AutoConfig

from kvfold.attention.absorb import absorb
from kvfold.attention.plain import plain_config
from kvfold.common.errors import UserError
from kvfold.eval.flops import flops, flops_of
from kvfold.eval.shape import Shape, shape_of

from .conftest import LLAMA_LIKE, make_model
from .counted import prompt, step, training
from .test_cache import MLA

EAGER = {"attn_implementation": "eager"}
PLAIN = plain_config(
    AutoConfig.for_model("llama", **LLAMA_LIKE).to_dict(),
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    rope_frequencies=[[0, 1], [0, 1]],
)
MODELS = {
    "llama": ("llama", EAGER),
    "mqa": ("llama", {"num_key_value_heads": 1, **EAGER}),
    "mistral-window": ("mistral", {"sliding_window": 8, **EAGER}),
    "deepseek_v3": ("deepseek_v3", {**MLA, **EAGER}),
    "deepseek_v3-q-rank": ("deepseek_v3", {**MLA, "q_lora_rank": 10, **EAGER}),
    "plain": ("mla_llama", {**PLAIN, **EAGER}),
}


def model_and_shape(case):
    kind, settings = MODELS[case]
    model = make_model(kind, **{name: value for name, value in settings.items() if name != "model_type"})
    return model, shape_of(model.config, {})


def test_the_figure_of_the_books():
    report = flops(context=4096, head_dim=64, num_attention_heads=32, num_hidden_layers=2)
    assert f"{report.attention_flops_per_layer / 1e9:.2f}" == "137.44"
    assert report.attention_flops == 2 * report.attention_flops_per_layer == 2 * report.causal_attention_flops
    assert report.linear_flops_per_token is None
    assert report.missing == "give --hidden-size, --intermediate-size, --vocab-size"


@pytest.mark.parametrize("case", ["llama", "mqa", "deepseek_v3", "deepseek_v3-q-rank"])
def test_each_part_is_what_torch_counts(case):
    model, shape = model_and_shape(case)
    counted, report = prompt(model, 2, 9), flops_of(shape, context=9)

    def of(*ends):
        return sum(n for name, n in counted.items() if name.endswith(ends)) / (2 * 9)

    assert report.q_flops_per_token == of("q_proj", "q_a_proj", "q_b_proj")
    assert report.kv_flops_per_token == of("k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    assert report.o_flops_per_token == of("o_proj")
    assert report.mlp_flops_per_token == of("mlp")
    assert report.head_flops_per_token == of("lm_head")


@pytest.mark.parametrize("case", MODELS)
def test_a_step_is_what_torch_counts(case):
    model, shape = model_and_shape(case)
    report = flops_of(shape, context=20, batch_size=2)
    expected = report.expanded_decode_flops if shape.is_latent else report.decode_flops
    assert step(model, 2, 20) == expected
    if not shape.is_latent:
        assert report.expanded_decode_flops is None


@pytest.mark.parametrize("case", ["deepseek_v3", "plain"])
def test_an_absorbed_step_is_what_torch_counts(case):
    model, shape = model_and_shape(case)
    if case == "plain":
        model.set_attn_implementation("sdpa")  # absorbs where that is less work
    else:
        absorb(model)
    report = flops_of(shape, context=20, batch_size=2)
    assert step(model, 2, 20) == report.decode_flops < report.expanded_decode_flops


@pytest.mark.parametrize("case", ["llama", "plain"])
def test_a_training_step_is_three_prompts(case):
    model, shape = model_and_shape(case)
    report = flops_of(shape, context=10, batch_size=2)
    masked = report.attention_flops - report.causal_attention_flops  # which is computed all the same
    assert training(model, 2, 10) == report.training_flops + 3 * masked


@pytest.mark.parametrize("window", [None, 8, 20, 50])
def test_causal_attention_counts_the_pairs_that_are_seen(window):
    shape = Shape(num_hidden_layers=3, num_attention_heads=4, head_dim=8, windows=(window, None))
    report = flops_of(shape, context=20)

    def pairs(sees):
        return sum(min(i + 1, sees) for i in range(20)) - sees / 2  # half of a token sees itself

    expected = 2 * pairs(min(window or 20, 20)) + pairs(20)  # layers 0 and 2, and layer 1
    assert report.causal_attention_flops == expected * 2 * 4 * (8 + 8)
    assert report.causal_attention_flops_per_layer == pairs(20) * 2 * 4 * (8 + 8)
    assert report.prompt_flops is None
    narrow = flops_of(replace(shape, num_hidden_layers=1), context=20)
    assert narrow.causal_attention_flops == narrow.causal_attention_flops_per_layer


def test_one_layer_is_known_without_their_number():
    report = flops(context=4096, head_dim=64, num_attention_heads=32)
    assert report.attention_flops is report.causal_attention_flops is None
    assert report.attention_flops_per_layer == 2 * report.causal_attention_flops_per_layer


def test_deepseek_v3_as_published():
    """Of 671 billion parameters, 37 billion are at work for a token (arXiv 2412.19437)."""
    shape = shape_of(AutoConfig.for_model("deepseek_v3"), {})
    assert f"{shape.parameters() / 1e9:.0f}" == "671"
    report = flops_of(shape, context=4096)
    assert f"{report.linear_flops_per_token / 2e9:.0f}" == "37"
    assert report.decode_flops < report.expanded_decode_flops / 20


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_sizes_given_count_in_place_of_the_configs(kind):
    config = AutoConfig.for_model(kind, **LLAMA_LIKE)
    given = {"num_key_value_heads": 1, "intermediate_size": 50, "num_hidden_layers": None}
    changed = AutoConfig.for_model(kind, **{**LLAMA_LIKE, "num_key_value_heads": 1, "intermediate_size": 50})
    assert shape_of(config, given) == shape_of(changed, {}) != shape_of(config, {})


def test_a_latent_given_to_a_model_without_one_is_the_plain_form():
    config = AutoConfig.for_model("llama", **LLAMA_LIKE)
    plain = AutoConfig.for_model(**{**PLAIN, "qk_nope_head_dim": 8, "v_head_dim": 8})
    converted = flops_of(shape_of(config, {"kv_lora_rank": 12, "qk_rope_head_dim": 4}), context=50)
    assert converted == flops_of(shape_of(plain, {}), context=50)
    assert (converted.attention_kind, converted.missing) == ("MLA", "")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "--num-attention-heads, --intermediate-size, --vocab-size, or a MODEL"),
        ({"hidden_size": 0}, "--hidden-size is 0"),
        ({"hidden_size": 10, "num_attention_heads": 4}, "10 does not divide among 4 heads; give --head-dim"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "give a --num-key-value-heads that divides 4"),
        ({"v_head_dim": 4}, "--v-head-dim is a size of latent attention; give --kv-lora-rank too"),
        ({"kv_lora_rank": 4, "head_dim": 8}, "--head-dim 8 says nothing of a model that caches latents"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"context": 0}, "--context is 0"),
    ],
)
def test_sizes_that_cannot_be(sizes, message):
    with pytest.raises(UserError, match=message):
        flops(**{"context": 10, **sizes})


def test_a_size_that_is_none_of_ours_is_a_mistake_of_the_caller():
    with pytest.raises(TypeError, match="unknown size windows"):
        flops(context=10, windows=(4,))


def test_what_is_not_known_is_not_counted(save):
    falcon = save(make_model("falcon"), tokenizer=False)
    with pytest.raises(UserError, match="no table of falcon models"):
        flops(falcon, context=10)
    with pytest.raises(UserError, match="a vit model is not a decoder of text"):
        shape_of(AutoConfig.for_model("vit"), {})
    lost = shape_of(AutoConfig.for_model("deepseek_v2", num_experts_per_tok=None), {})
    assert flops_of(lost, context=10).missing == "give --num-experts-per-tok"


def test_the_report_is_flat(llama, save):
    report = json.loads(json.dumps(asdict(flops(save(llama, tokenizer=False), context=10))))
    assert all(isinstance(value, int | str | None) for value in report.values())


def test_sizes_alone_need_neither_torch_nor_transformers():
    code = """
import sys, click
sys.modules["torch"] = sys.modules["transformers"] = None
from kvfold.cli.eval.calculators import flops, memory
for command in (flops, memory):
    sizes = "--hidden-size 64 --num-hidden-layers 2 --num-attention-heads 4 --vocab-size 9 --intermediate-size 9"
    command.main(["--context", "8192", "--json", *sizes.split()], standalone_mode=False)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    counted, sized = map(json.loads, result.stdout.splitlines())
    assert counted["missing"] == sized["missing"] == ""
    assert sized["kv_bytes"] == 2 * 2 * 2 * 64 * 8192
