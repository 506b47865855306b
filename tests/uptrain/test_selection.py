"""What is trained: exactly what was asked for, in every family."""

from __future__ import annotations

import builtins

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.common.errors import UserError
from kvfold.convert.latent_families import KNOWN
from kvfold.uptrain.selection import attention_modules, merge_adapters, select

from ..common.tiny import make_model
from ..convert.mla.plain_models import make_plain
from ..convert.tiny import CASES as CONVERT_CASES
from ..convert.tiny import make_config

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(0))
PLAIN_CASES = ["llama", "mistral", "qwen2", "smollm3", "phi3", "stablelm"]
COMMON_CASES = ["gpt2", "gpt_bigcode", "deepseek_v3"]
ALL_CASES = [*CONVERT_CASES, *COMMON_CASES, *(f"mla_{case}" for case in PLAIN_CASES)]


@pytest.fixture
def make(tmp_path):
    def make_case(case):
        if case in COMMON_CASES:
            return make_model(case)
        if case.startswith("mla_"):
            extra = {"qk_rope_head_dim": 2, "rope_frequencies": [[0], [0]]} if case == "mla_stablelm" else {}
            return AutoModelForCausalLM.from_pretrained(make_plain(tmp_path, case[4:], **extra), dtype="auto")
        return AutoModelForCausalLM.from_config(make_config(case))

    return make_case


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_every_family_has_a_case(make):
    """No model type that can be converted is one that cannot be healed."""
    assert {make(case).config.model_type for case in ALL_CASES} == set(KNOWN)


@pytest.mark.parametrize("case", ALL_CASES)
def test_attention(case, make):
    model = make(case)
    chosen = select(model)
    module = ".attn." if "gpt" in case else ".self_attn."
    expected = {name for name, _ in model.named_parameters() if module in name}
    assert trained(model) == set(chosen.parameters) == expected
    assert len(chosen.attention) == model.config.num_hidden_layers
    layers = {type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in chosen.attention}
    assert layers == {chosen.layer}
    assert chosen.layer in model._no_split_modules


NORMS = {
    "llama": {"input_layernorm", "post_attention_layernorm", "norm"},
    "gemma2": {
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    },
    "phi": {"input_layernorm", "final_layernorm"},
    "gpt2": {"ln_1", "ln_2", "ln_f"},
    "mla_llama": {"input_layernorm", "post_attention_layernorm", "norm"},
    "olmo": set(),
}


@pytest.mark.parametrize("case", NORMS)
def test_norms(case, make):
    model = make(case)
    attention = set(select(model).parameters)
    more = set(select(model, "attention+norms").parameters) - attention
    assert {name.split(".")[-2] for name in more} == NORMS[case]
    assert trained(model) == attention | more


def test_all(make):
    model = make("llama-tied").requires_grad_(False)
    assert select(model, "all").parameters == tuple(name for name, _ in model.named_parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def step(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # an adapter's first factor moves once its second is no longer zero
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        optimizer.step()


LINEAR = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "phi3": {"qkv_proj", "o_proj"},
    "gpt2": {"c_attn", "c_proj"},
    "deepseek_v3": {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "mla_llama": {"q_proj", "kv_a_proj_with_mqa", "o_proj"},
}


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("case", LINEAR)
def test_adapters(case, norms, make):
    model = make(case).eval()
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        before, weights = model(IDS).logits, {k: v.clone() for k, v in model.state_dict().items()}
    chosen = select(model, "attention+norms" if norms else "attention", lora_rank=2)
    adapters = {name for name in chosen.parameters if ".lora_" in name}
    assert {name.split(".lora_")[0].split(".")[-1] for name in adapters} == LINEAR[case]
    rest = set(chosen.parameters) - adapters
    assert bool(rest) == norms
    assert not [name for name in rest if "attn." in name]
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before), "adapters start as nothing"
    step(model)
    with torch.no_grad():
        adapted = model(IDS).logits
    assert (adapted - before).abs().max() > 1e-4
    merge_adapters(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert not hasattr(model, "peft_config")
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, adapted, rtol=1e-4, atol=1e-4)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])}
    assert {name.split(".")[-2] for name in changed if "attn." in name} == LINEAR[case]
    assert all("norm" in name or "ln_" in name or "attn." in name for name in changed)


def test_the_scale_of_adapters(make):
    model = make("llama")
    select(model, lora_rank=4)
    assert model.model.layers[0].self_attn.q_proj.scaling == {"default": 2.0}
    model = make("llama")
    select(model, lora_rank=4, lora_alpha=2.0)
    assert model.model.layers[0].self_attn.q_proj.scaling == {"default": 0.5}


def test_merging_without_adapters_changes_nothing(make):
    model = make("llama")
    modules = dict(model.named_modules())
    merge_adapters(model)
    assert dict(model.named_modules()) == modules


def test_refusals(make, monkeypatch):
    model = make("llama")
    with pytest.raises(UserError, match=r"unknown train 'atention'; did you mean attention\?"):
        select(model, "atention")
    with pytest.raises(UserError, match="lora_rank=8 goes with train=attention or attention"):
        select(model, "all", lora_rank=8)
    load = builtins.__import__

    def without_peft(name, *rest):
        if name == "peft":
            raise ImportError
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(UserError, match=r"pip install 'kvfold\[lora\]'"):
        select(model, lora_rank=8)
    monkeypatch.undo()
    model.config.model_type = "lama"
    with pytest.raises(UserError, match=r"does not know model type 'lama'; did you mean"):
        attention_modules(model)
