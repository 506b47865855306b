"""Stock DeepSeek models that decode in latent space: the same logits, and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

from kvfold.attention.absorb import absorb, restore
from kvfold.common.errors import UserError

ROUNDING = {"rtol": 1e-4, "atol": 2e-5}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "vocab_size": 97,
    "first_k_dense_replace": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "initializer_range": 0.3,  # so that greedy tokens depend on what is attended to
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1.0}
MODELS = {
    "v2": (DeepseekV2ForCausalLM, DeepseekV2Config, {"q_lora_rank": None}),
    "v2-lora": (DeepseekV2ForCausalLM, DeepseekV2Config, {"q_lora_rank": 12, "attention_bias": True}),
    "v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {"q_lora_rank": None, "rope_interleave": False}),
    "v3-lora": (DeepseekV3ForCausalLM, DeepseekV3Config, {"q_lora_rank": 12, "rope_parameters": YARN}),
}


def make(name="v3", attn="sdpa"):
    model, config, options = MODELS[name]
    torch.manual_seed(0)
    return model(config(**SIZES, **options, attn_implementation=attn)).eval()


@pytest.fixture
def ids():
    return torch.randint(2, 97, (2, 24), generator=torch.Generator().manual_seed(1))


def expansions(model):
    """Counts, from now on, how many tokens each layer expands at each step."""
    counts = []
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda *call: counts.append(call[1][0].shape[-2]))
    return counts


def steps(model, ids, sizes, cache=None, mask=None):
    """Logits of `ids` [B, T], read in pieces of these sizes."""
    cache, parts, done = DynamicCache() if cache is None else cache, [], 0
    with torch.no_grad():
        for size in sizes:
            seen = None if mask is None else mask[:, : done + size]
            parts.append(model(ids[:, done : done + size], seen, None, cache).logits)
            done += size
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_of_prompt_steps_and_chunks_are_the_stock_ones(name, attn, static, padded, ids):
    model = make(name, attn)
    mask = torch.ones_like(ids)
    mask[0, : 5 if padded else 0] = 0
    sizes = [12, 1, 1, 3, 1, 6]

    def run():
        return steps(model, ids, sizes, StaticCache(model.config, 32) if static else None, mask)

    stock = run()
    absorb(model)
    got, seen = run(), mask.bool()
    torch.testing.assert_close(got[seen], stock[seen], **ROUNDING)
    assert got.isfinite().all()


def test_a_short_prompt_in_a_static_cache_without_a_mask(ids):
    """Few queries over many keys, of which transformers does not say that most are still empty."""
    model = make()
    stock = steps(model, ids, [4, 1, 3], StaticCache(model.config, 200))
    absorb(model)
    torch.testing.assert_close(steps(model, ids, [4, 1, 3], StaticCache(model.config, 200)), stock, **ROUNDING)


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_expands_nothing_and_a_prompt_everything(padded, ids):
    model = make()
    absorb(model)
    counts = expansions(model)
    mask = torch.ones_like(ids)
    mask[0, : 5 if padded else 0] = 0
    steps(model, ids, [20, 1, 1, 2], mask=mask)
    assert counts == [20, 20]  # each layer once


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_generate_gives_the_same_tokens(name, options, ids):
    model = make(name)
    prompt = ids[:1] if "prompt_lookup_num_tokens" in options else ids
    mask = torch.ones_like(prompt)
    if len(prompt) > 1:
        prompt[0, :7] = mask[0, :7] = 0
    call = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, **options}
    stock = model.generate(prompt, **call)
    absorb(model)
    counts = expansions(model)
    torch.testing.assert_close(model.generate(prompt, **call), stock, rtol=0, atol=0)
    assert len(counts) < 2 * 12  # some steps were absorbed


@pytest.mark.parametrize("way", ["undo", "restore", "with"])
def test_undone_it_is_the_stock_model_again(way, ids):
    model = make()
    before = steps(model, ids, [12, 1, 11])
    handle = absorb(model)
    if way == "undo":
        handle.undo()
        handle.undo()
    elif way == "restore":
        restore(model)
        restore(model)
    else:
        with handle:
            pass
    assert model.config._attn_implementation == "sdpa"
    assert not any("expand_kv" in vars(module) for module in model.modules())
    counts = expansions(model)
    torch.testing.assert_close(steps(model, ids, [12, 1, 11]), before, rtol=0, atol=0)
    assert len(counts) == 6


def test_absorbing_twice_does_nothing_the_second_time(ids):
    model = make()
    before = steps(model, ids, [12, 1, 11])
    with absorb(model):
        with absorb(model):
            torch.testing.assert_close(steps(model, ids, [12, 1, 11]), before, **ROUNDING)
        counts = expansions(model)
        steps(model, ids, [12, 1])
        assert counts == [12, 12]
    assert model.config._attn_implementation == "sdpa"


def test_new_weights_are_seen(ids):
    model = make()
    absorb(model)
    steps(model, ids, [12, 1])
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(steps(model, ids, [12, 1, 1]), steps(other, ids, [12, 1, 1]), **ROUNDING)


def test_gradients_through_a_cached_step_are_the_stock_ones(ids):
    model = make()
    model.train()

    def gradients():
        cache = DynamicCache()
        model(ids[:, :12], None, None, cache)
        loss = model(ids[:, 12:13], None, None, cache).logits.square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    stock = gradients()
    absorb(model)
    torch.testing.assert_close(gradients(), stock, rtol=1e-3, atol=1e-4)


def test_attention_dropout_acts_in_a_cached_step_of_training(ids):
    model = make()
    absorb(model)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    cache = DynamicCache()
    model.eval()(ids[:, :12], None, None, cache)
    model.train()
    several = []
    for _ in range(2):
        several.append(model(ids[:, 12:13], None, None, cache).logits)
        cache.crop(-1)
    assert not torch.allclose(*several, rtol=1e-2)


def test_a_copy_is_absorbed_by_itself(ids):
    model = make()
    absorb(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.kv_b_proj.weight.mul_(2)
    got = steps(other, ids, [12, 1])
    restore(model)
    counts = expansions(other)
    torch.testing.assert_close(steps(other, ids, [12, 1]), got, rtol=0, atol=0)
    assert counts == [12, 12]
    restore(other)
    torch.testing.assert_close(steps(other, ids, [12, 1]), got, **ROUNDING)


def test_another_implementation_set_afterwards_still_gets_keys_and_values(ids):
    model = make()
    before = steps(model, ids, [12, 1])
    absorb(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(steps(model, ids, [12, 1]), before, **ROUNDING)


def test_eager_attention_weights_come_out(ids):
    model = make(attn="eager")

    def weights():
        cache = DynamicCache()
        with torch.no_grad():
            model(ids[:, :12], None, None, cache)
            return model(ids[:, 12:13], None, None, cache, output_attentions=True).attentions

    stock = weights()
    absorb(model)
    torch.testing.assert_close(weights(), stock, **ROUNDING)


def test_a_static_step_compiles_into_one_graph(ids):
    """Which `generate()` asks for on an accelerator."""
    model = make()
    absorb(model)

    def step(run):
        cache = StaticCache(model.config, 32)
        mask = torch.ones_like(ids)
        with torch.no_grad():
            model(ids[:, :12], mask[:, :12], None, cache)
            return run(ids[:, 12:13], mask[:, :13], torch.full((2, 1), 12), cache).logits

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(step(compiled), step(model), **ROUNDING)


def test_nothing_of_it_is_saved(tmp_path, ids):
    model = make()
    before = steps(model, ids, [12, 1])
    absorb(model)
    model.save_pretrained(tmp_path)
    assert "kvfold" not in (tmp_path / "config.json").read_text()
    loaded = DeepseekV3ForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(steps(loaded, ids, [12, 1]), before, **ROUNDING)


def test_models_that_cannot_be_absorbed_are_refused_and_left_alone():
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    )
    with pytest.raises(UserError, match="LlamaForCausalLM has no DeepSeek-V2 or -V3 attention"):
        absorb(llama)
    flex = make(attn="flex_attention")
    with pytest.raises(UserError, match=r"'flex_attention' cannot be absorbed; .* eager, sdpa"):
        absorb(flex)
    adapted = make()
    adapted.model.layers[1].self_attn.kv_b_proj = torch.nn.Sequential(adapted.model.layers[1].self_attn.kv_b_proj)
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.kv_b_proj is a Sequential"):
        absorb(adapted)
    for model in (flex, adapted):
        assert not any("expand_kv" in vars(module) for module in model.modules())


def test_an_adapter_put_on_afterwards_counts(ids):
    model = make()
    absorb(model)

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for layer in model.model.layers:
        linear = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = Doubled(linear.in_features, linear.out_features, bias=False)
        layer.self_attn.kv_b_proj.weight = linear.weight
    got = steps(model, ids, [12, 1])
    restore(model)
    torch.testing.assert_close(got, steps(model, ids, [12, 1]), **ROUNDING)


def test_an_absorbed_model_can_be_pickled(tmp_path, ids):
    model = make("v3")
    expected = model(ids).logits
    with absorb(model):
        torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(loaded(ids).logits, expected)
