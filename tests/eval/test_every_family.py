"""Every family that kvfold knows: what the closed forms say of a model is what is found in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from transformers import AutoConfig

from kvfold.attention.plain import SOURCES, plain_config
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
