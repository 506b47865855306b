"""fp64 exactness of head merging, on a tiny model of every family row."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.convert.checkpoint import Checkpoint
from kvfold.convert.checks import account
from kvfold.convert.families import FAMILIES
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.source import open_source

from .tiny import CASES, EAGER_EXPERTS, HEADS, make_config, make_gpt2, make_model, repeat_heads

EXACT = {"rtol": 0, "atol": 1e-9}
TOKENS = torch.arange(201).remainder(95).add(2).flip(0)[None]  # [1, 201]: positions 0..200


def load(path):
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True, **EAGER_EXPERTS)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]), info
    return model.eval()


def logits(model, ids=TOKENS, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def test_every_row_has_a_case():
    assert {kind for kind, _ in CASES.values()} | {"gpt2", "gpt_bigcode"} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_table_names_what_transformers_saves(case, tmp_path):
    make_model(make_config(case, 2)).save_pretrained(tmp_path)
    with open_source(str(tmp_path)) as source:
        required = {
            name
            for name, promise in source.family.promises(source.config, source.checkpoint.tensors).items()
            if not promise.optional
        }
        assert (
            required
            <= set(account(source.family, source.config, source.checkpoint.tensors))
            == set(source.checkpoint.tensors)
        )


@pytest.mark.parametrize("case", CASES)
def test_same_head_count_keeps_every_byte(case, tmp_path):
    make_model(make_config(case, 2)).to(torch.bfloat16).save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")
    before, after = Checkpoint.open(tmp_path / "src"), Checkpoint.open(tmp_path / "out")
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        one, two = (b"".join(map(bytes, c.pieces(c.tensors[name]))) for c in (before, after))
        assert one == two, name


@pytest.mark.usefixtures("olmo2_norm_in_fp64")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("few", [1, 2])
def test_equal_heads_merge_exactly(case, few, tmp_path):
    narrow = make_model(make_config(case, few), seed=1)
    wide = repeat_heads(narrow, make_config(case, HEADS))
    torch.testing.assert_close(logits(wide), logits(narrow), **EXACT)  # the test's own helper is right
    wide.save_pretrained(tmp_path / "src", max_shard_size="40KB")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=few, method="mean")
    result = load(tmp_path / "out")
    assert result.config.num_key_value_heads == few
    torch.testing.assert_close(logits(result), logits(wide), **EXACT)

    # Left padding: the real tokens of both rows get the same logits.
    ids = torch.cat([torch.zeros(1, 7, dtype=torch.long), TOKENS[:, :20]], dim=1).repeat(2, 1)
    ids[1] = TOKENS[0, 30:57]
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    # gemma2's softmax is fp32, where the mask value of fp64 overflows to -inf and padding gives NaN.
    dtype, tolerance = (torch.float32, 1e-4) if case == "gemma2" else (torch.float64, 1e-9)
    padded = [logits(model.to(dtype), ids, attention_mask=mask)[mask.bool()] for model in (wide, result)]
    torch.testing.assert_close(*padded, rtol=0, atol=tolerance)

    generate = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    cached = result.generate(TOKENS[:, :90], use_cache=True, **generate)
    uncached = result.generate(TOKENS[:, :90], use_cache=False, **generate)
    origin = wide.generate(TOKENS[:, :90], use_cache=True, **generate)
    assert torch.equal(cached.sequences, uncached.sequences)
    assert torch.equal(cached.sequences, origin.sequences)
    # Sums run in another order with a cache, and some norms and RoPE run in fp32 whatever the dtype.
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(uncached.logits), rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(origin.logits), **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_heads_equal_when_interleaved_do_not_merge_exactly(case, tmp_path):
    narrow = make_model(make_config(case, 2), seed=1)
    wide = repeat_heads(narrow, make_config(case, HEADS), interleaved=True)
    wide.save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")
    assert (logits(load(tmp_path / "out")) - logits(wide)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_mean_pools_weights_and_biases(name, tmp_path):
    source = make_model(make_config("qwen2"))
    source.save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")
    result = load(tmp_path / "out")
    for projection in ("k_proj", "v_proj"):
        before, after = (
            getattr(getattr(m.model.layers[1].self_attn, projection), name).unflatten(0, (heads, 16))
            for m, heads in ((source, 4), (result, 2))
        )
        for head in range(2):
            torch.testing.assert_close(after[head], before[2 * head : 2 * head + 2].mean(0), rtol=0, atol=0)


def test_first_keeps_the_first_head_of_each_group(tmp_path):
    source = make_model(make_config("phi3"))
    source.save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="first")
    before, after = (m.model.layers[0].self_attn.qkv_proj.weight for m in (source, load(tmp_path / "out")))
    assert torch.equal(after[:64], before[:64])  # queries
    for heads_before, heads_after in zip(before[64:].chunk(2), after[64:].chunk(2), strict=True):
        assert torch.equal(heads_after.unflatten(0, (2, 16)), heads_before.unflatten(0, (4, 16))[::2])


def test_random_is_fresh_reproducible_and_seeded(tmp_path):
    make_model(make_config("qwen2")).save_pretrained(tmp_path / "src")
    weights = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        convert_gqa(tmp_path / "src", tmp_path / name, kv_heads=2, method="random", seed=seed)
        weights[name] = load(tmp_path / name).model.layers[0].self_attn
    assert torch.equal(weights["a"].k_proj.weight, weights["b"].k_proj.weight)
    assert not torch.equal(weights["a"].k_proj.weight, weights["c"].k_proj.weight)
    assert not torch.equal(weights["a"].k_proj.weight, weights["a"].v_proj.weight)
    assert weights["a"].k_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)  # the config's initializer_range
    assert not weights["a"].k_proj.bias.any()


def test_random_draws_fused_keys_and_values_apart(tmp_path):
    make_model(make_config("phi3")).save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="random")
    keys, values = load(tmp_path / "out").model.layers[0].self_attn.qkv_proj.weight[64:].chunk(2)
    assert not torch.equal(keys, values)


def test_random_keeps_norm_gains(tmp_path):
    source = make_model(make_config("olmo2"))
    source.save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=1, method="random")
    gains = [m.model.layers[0].self_attn.k_norm.weight for m in (source, load(tmp_path / "out"))]
    torch.testing.assert_close(gains[1], gains[0].unflatten(0, (4, 16)).mean(0))


@pytest.mark.parametrize("prefix", [True, False])
def test_gpt2_becomes_gpt_bigcode(prefix, tmp_path):
    source = make_model(make_gpt2(), seed=3)
    with torch.no_grad():
        for block in source.transformer.h:  # equal key heads, and equal value heads
            for tensor in (block.attn.c_attn.weight, block.attn.c_attn.bias):
                heads = tensor[..., 64:].unflatten(-1, (2, HEADS, 16))
                heads.copy_(heads[..., :1, :].expand_as(heads).clone())
    (source if prefix else source.transformer).save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=1, method="mean")
    result = load(tmp_path / "out")
    assert type(result).__name__ == "GPTBigCodeForCausalLM"
    assert result.config.multi_query
    torch.testing.assert_close(logits(result), logits(source), **EXACT)


def test_gpt2_drops_the_mask_buffers_of_old_checkpoints(tmp_path):
    from safetensors.torch import load_file, save_file

    make_model(make_gpt2()).save_pretrained(tmp_path / "src")
    state = load_file(tmp_path / "src/model.safetensors")
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 512, 512)
    save_file(state, tmp_path / "src/model.safetensors")
    report = convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=1, method="mean")
    assert report.tensors_dropped == ["transformer.h.0.attn.bias"]
    load(tmp_path / "out")


def test_base_model_checkpoint_without_prefix(tmp_path):
    source = make_model(make_config("llama-tied"))
    source.model.save_pretrained(tmp_path / "src")
    source.save_pretrained(tmp_path / "full")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")
    convert_gqa(tmp_path / "full", tmp_path / "full-out", kv_heads=2, method="mean")
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(load(tmp_path / "full-out")), **EXACT)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_experts_saved_fused(case, tmp_path):
    source = make_model(make_config(case))
    source.save_pretrained(tmp_path / "src", save_original_format=False)
    assert any("gate_up_proj" in name for name in Checkpoint.open(tmp_path / "src").tensors)
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")
    source.save_pretrained(tmp_path / "apart")
    convert_gqa(tmp_path / "apart", tmp_path / "apart-out", kv_heads=2, method="mean")
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(load(tmp_path / "apart-out")), **EXACT)
