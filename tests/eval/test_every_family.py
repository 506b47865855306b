"""Every family that kvfold knows: what the closed forms say of a model is what is found in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.attention.plain import SOURCES, plain_config
from kvfold.common.kvcache import kv_bytes
from kvfold.convert.latent_families import KNOWN
from kvfold.eval.cache import measure_cache
from kvfold.eval.flops import flops_of
from kvfold.eval.memory import memory_of
from kvfold.eval.shape import shape_of

from ..convert import tiny
from .counted import prompt

LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
CONTEXT = 80  # more than the windows of 64


def like(config: Any, kind: str, **settings: Any) -> Any:
    """The config of another model type with the same sizes, but for those of heads."""
    said = {name: value for name, value in config.to_dict().items() if name != "head_dim"}
    return AutoConfig.for_model(**{**said, **settings, "model_type": kind})


def deepseek(kind: str = "deepseek_v3", **settings: Any) -> Any:
    return like(tiny.make_config("llama"), kind, **{**LATENT, **EXPERTS, **settings})


def plain(case: str, biased: bool) -> Any:
    source = tiny.make_config(case, 2).to_dict()
    return AutoConfig.for_model(**plain_config(source, **LATENT, mla_bias=biased, rope_frequencies=[[0, 1], [0, 1]]))


CASES: dict[str, Callable[[], Any]] = {
    **{case: partial(tiny.make_config, case, 2) for case in tiny.CASES},
    "gpt2": tiny.make_gpt2,
    "gpt2-inner": partial(tiny.make_gpt2, n_inner=80),
    "gpt_bigcode": lambda: like(tiny.make_gpt2(), "gpt_bigcode", multi_query=True),
    **{f"plain-{case}": partial(plain, case, case == "qwen2") for case in SOURCES},
    "plain-tied": partial(plain, "llama-tied", False),
    "deepseek_v3": partial(deepseek, q_lora_rank=None, first_k_dense_replace=2),
    "deepseek_v3-q-rank": partial(deepseek, q_lora_rank=10, attention_bias=True, first_k_dense_replace=2),
    "deepseek_v3-experts": partial(deepseek, q_lora_rank=None),
    "deepseek_v2-experts": partial(deepseek, "deepseek_v2", q_lora_rank=10),
}


def test_every_family_has_a_case():
    assert {make().model_type for make in CASES.values()} >= set(KNOWN)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_bytes_weights_and_operations_are_those_of_the_model(make):
    model = tiny.make_model(make())
    shape = shape_of(model.config, {})

    found = measure_cache(model, model="m", context=CONTEXT)
    said = memory_of(shape, context=CONTEXT, dtype=found.dtype)
    assert said.kv_bytes == found.kv_bytes == found.measured_kv_bytes
    assert said.kv_bytes_per_token == found.kv_bytes_per_token
    assert said.kv_elements_per_token_per_layer == found.measured_kv_elements_per_token_per_layer
    assert said.parameters == sum(parameter.numel() for parameter in model.parameters())

    model.set_attn_implementation("eager")
    counted = flops_of(shape, context=11, batch_size=2)
    assert prompt(model, 2, 11)[""] == 2 * 11 * counted.linear_flops_per_token + counted.attention_flops
    assert said.missing == counted.missing == ""


# What a user gives -> a value that no case has. Whether a head is the embedding is turned around.
GIVEN = {
    "hidden_size": 80, "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 40, "vocab_size": 50, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
    "v_head_dim": 11, "q_lora_rank": 14, "num_experts_per_tok": 3, "tie_word_embeddings": None,
}  # fmt: skip
PER_LAYER = ("layer_types", "no_rope_layers", "rope_frequencies")
MORE: dict[str, Callable[[], Any]] = {
    "gemma3_text-pattern": lambda: like(
        tiny.make_config("gemma3_text", 2), "gemma3_text", num_hidden_layers=14, layer_types=None
    ),
    "qwen3_moe-step": lambda: like(tiny.make_config("qwen3_moe", 2), "qwen3_moe", decoder_sparse_step=2),
    "gpt_bigcode-heads": lambda: like(tiny.make_gpt2(), "gpt_bigcode", multi_query=False),
}
# What these have is in other cases too; the time is saved.
LIKE_OTHERS = {"llama", "llama-tied", "llama-head-dim", "qwen3_moe", "starcoder2-plain", "plain-tied", "deepseek_v3"}
BUILT = {case: make() for case, make in {**CASES, **MORE}.items()}


def takes(config: Any, name: str) -> bool:
    """Whether the class of a config can hold another size of this name."""
    kind, latent = config.model_type, bool(getattr(config, "kv_lora_rank", None))
    if name in LATENT:
        return latent
    return {
        "num_key_value_heads": not latent and kind != "gpt2",
        "head_dim": not latent
        and kind not in ("gpt2", "gpt_bigcode", "stablelm")
        and not getattr(config, "qk_layernorm", False),  # of phi: its norms would not fit its heads
        "q_lora_rank": kind.startswith("deepseek"),
        "num_experts_per_tok": shape_of(config, {}).num_experts > 0,
    }.get(name, True)


def changed(config: Any, name: str, value: Any) -> Any:
    """What the class of a config makes of another value."""
    said = config.to_dict()
    if name == "num_hidden_layers":
        said |= {key: [said[key][i % len(said[key])] for i in range(value)] for key in PER_LAYER if said.get(key)}
    if config.model_type in ("gpt2", "gpt_bigcode"):
        name = {"intermediate_size": "n_inner", **KNOWN["gpt2"].spelling}.get(name, name)
        said |= {"multi_query": True} if name == "num_key_value_heads" else {}
        said.pop("num_key_value_heads", None)  # made of the flag
    return AutoConfig.for_model(**{**said, name: value})


def check(source: Any, given: dict[str, Any], config: Any) -> None:
    """That what is given to a source makes the shape of a config, and of the model that it makes."""
    shape = shape_of(source, given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters() == sum(parameter.numel() for parameter in model.parameters())
    expected = shape_of(config, {})
    assert replace(shape, windows=()) == replace(expected, windows=())
    assert shape.layer_windows() == expected.layer_windows()
    assert shape.kv_elements() * shape.cached_tokens(CONTEXT) * 2 == kv_bytes(config, CONTEXT, 2)


@pytest.mark.parametrize("case", sorted(set(BUILT) - LIKE_OTHERS))
def test_a_size_that_is_given_makes_the_model_of_that_size(case):
    config = BUILT[case]
    for name in filter(partial(takes, config), GIVEN):
        value = GIVEN[name] or not config.tie_word_embeddings
        check(config, {name: value}, changed(config, name, value))


def test_a_pattern_of_windows_goes_on():
    config = BUILT["gemma3_text-pattern"]  # 14 layers, of which every sixth sees all
    more = like(config, "gemma3_text", num_hidden_layers=18, layer_types=None)
    assert more.layer_types[17] == "full_attention" != config.layer_types[3]
    check(config, {"num_hidden_layers": 18}, more)


@pytest.mark.parametrize(
    ("case", "kv_heads", "becomes"), [("gpt2", 1, "gpt_bigcode"), ("gpt_bigcode", tiny.HEADS, "gpt_bigcode-heads")]
)
def test_kv_heads_that_another_class_or_a_flag_says(case, kv_heads, becomes):
    check(BUILT[case], {"num_key_value_heads": kv_heads}, BUILT[becomes])


@pytest.mark.parametrize("case", [*SOURCES, "llama-bias"])
def test_a_latent_rank_that_is_given_makes_the_plain_form(case):
    config = tiny.make_config(case, 2)
    sizes = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 16, "v_head_dim": 16}
    biased = case in ("qwen2", "stablelm", "llama-bias")
    more = plain_config(config.to_dict(), **sizes, mla_bias=biased, rope_frequencies=[[0, 1], [0, 1]])
    check(config, {"kv_lora_rank": 12, "qk_rope_head_dim": 4}, AutoConfig.for_model(**more))


@pytest.mark.parametrize("case", ["gemma", "mixtral", "gpt2"])
def test_where_there_is_no_plain_form_only_the_cache_is_known(case):
    report = memory_of(shape_of(BUILT[case], {"kv_lora_rank": 12, "qk_rope_head_dim": 4}), context=CONTEXT)
    assert report.kv_bytes == 2 * 2 * CONTEXT * (12 + 4)
    assert report.parameters is report.total_bytes is None
    assert f"no latent form of {case} models" in report.missing


@pytest.mark.parametrize("case", BUILT)
def test_work_does_not_grow_with_the_sizes(case):
    """Layer by layer, or head by head, it would take years."""
    heads = {"num_attention_heads": 9 * 10**15} | (
        {} if getattr(BUILT[case], "kv_lora_rank", None) else {"num_key_value_heads": 9 * 10**15, "head_dim": 2}
    )
    shape = shape_of(BUILT[case], {"num_hidden_layers": 9 * 10**15, **heads})
    assert memory_of(shape, context=CONTEXT).missing == flops_of(shape, context=CONTEXT).missing == ""
