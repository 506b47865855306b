"""fp64 exactness of the methods that mix channels, and of grouping, through convert_gqa and stock transformers."""

import pytest
import torch

from kvfold.convert.gqa import convert_gqa

from .test_exact import EXACT, load, logits
from .tiny import CASES, HEADS, make_config, make_gpt2, make_model, repeat_heads

HALF_SPLIT = ("llama", "llama-bias", "llama-head-dim", "mistral", "qwen2", "gemma", "gemma2", "smollm3", "granite")
QK_NORM = ["qwen3", "qwen3_moe", "qwen3_moe-dense", "gemma3_text", "olmo2"]
QK_NORM += [case for case in CASES if case.endswith("qk-norm")]
MIXABLE = [case for case in CASES if case not in (*QK_NORM, "olmo")]
WEIGHTS_ONLY = {"calib": ("none",)}


def twins(narrow, wide_config, seed=0):
    """`narrow` with every KV head copied, the copies equal only up to what commutes: a complex factor for each pair of
    key coordinates, and an invertible map of the values. Queries and output projection undo them."""
    wide = repeat_heads(narrow, wide_config)
    d = wide.model.layers[0].self_attn.head_dim
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in wide.model.layers:
            attention = layer.self_attn
            for head in range(HEADS):
                rows = slice(head * d, (head + 1) * d)  # as many query heads as KV heads
                factor = torch.randn(d // 2, generator=generator, dtype=torch.complex128)
                times(attention.k_proj, rows, factor)
                times(attention.q_proj, rows, 1 / factor.conj())
                change = torch.randn(d, d, generator=generator, dtype=torch.float64)
                for tensor in (attention.v_proj.weight, attention.v_proj.bias):
                    if tensor is not None:
                        tensor[rows] = change @ tensor[rows]
                attention.o_proj.weight[:, rows] = attention.o_proj.weight[:, rows] @ change.inverse()
    return wide


def times(projection, rows, factor):
    for tensor in (projection.weight, projection.bias):
        if tensor is not None:
            re, im = tensor[rows].chunk(2)  # half-split pairs
            product = torch.complex(re, im) * factor.view(-1, *[1] * (re.ndim - 1))
            tensor[rows] = torch.cat([product.real, product.imag])


def convert(model, tmp_path, name="out", **knobs):
    model.save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / name, kv_heads=2, **WEIGHTS_ONLY, **knobs)
    return load(tmp_path / name)


@pytest.mark.parametrize("method", ["svd", "aligned"])
@pytest.mark.parametrize("case", MIXABLE)
def test_equal_heads_merge_exactly(case, method, tmp_path):
    wide = repeat_heads(make_model(make_config(case, 2), seed=1), make_config(case, HEADS))
    torch.testing.assert_close(logits(convert(wide, tmp_path, method=method)), logits(wide), **EXACT)


@pytest.mark.parametrize("case", MIXABLE)
def test_heads_equal_when_interleaved_do_not_merge_exactly(case, tmp_path):
    wide = repeat_heads(make_model(make_config(case, 2), seed=1), make_config(case, HEADS), interleaved=True)
    assert (logits(convert(wide, tmp_path, method="svd")) - logits(wide)).abs().max() > 1e-2


@pytest.mark.parametrize("case", HALF_SPLIT)
def test_twins_merge_exactly_under_svd_alone(case, tmp_path):
    wide = twins(make_model(make_config(case, 2), seed=1), make_config(case, HEADS))
    torch.testing.assert_close(logits(convert(wide, tmp_path, method="svd")), logits(wide), rtol=0, atol=1e-8)
    for method in ("aligned", "mean"):
        assert (logits(convert(wide, tmp_path, method, method=method)) - logits(wide)).abs().max() > 1e-2


@pytest.mark.parametrize("case", ["llama-bias", "phi", "cohere", "starcoder2"])
@pytest.mark.parametrize("method", ["svd", "aligned", "mean"])
def test_the_order_of_heads_in_a_group_does_not_matter(case, method, tmp_path):
    source = make_model(make_config(case), seed=4)
    before = logits(convert(source, tmp_path, "before", method=method))
    swapped = [1, 0, 3, 2]
    with torch.no_grad():
        for layer in source.model.layers:
            for name, module in layer.self_attn.named_modules():
                for tensor in module.parameters(recurse=False):
                    if "norm" in name:
                        continue
                    if name in ("o_proj", "dense"):
                        if tensor.ndim == 2:
                            tensor.copy_(tensor.unflatten(1, (HEADS, -1))[:, swapped].flatten(1))
                    else:
                        tensor.copy_(tensor.unflatten(0, (HEADS, -1))[swapped].flatten(0, 1))
    torch.testing.assert_close(logits(convert(source, tmp_path, "after", method=method)), before, rtol=0, atol=1e-8)


@pytest.mark.usefixtures("olmo2_norm_in_fp64")
@pytest.mark.parametrize("case", CASES)
def test_similar_grouping_finds_equal_heads_wherever_they_are(case, tmp_path):
    wide = repeat_heads(make_model(make_config(case, 2), seed=1), make_config(case, HEADS), interleaved=True)
    method = "svd" if case in MIXABLE else "mean"
    result = convert(wide, tmp_path, method=method, grouping="similar")
    torch.testing.assert_close(logits(result), logits(wide), **EXACT)


@pytest.mark.parametrize("case", [*QK_NORM, "olmo"])
@pytest.mark.parametrize("method", ["svd", "aligned"])
def test_refused_where_channels_must_not_be_mixed(case, method, tmp_path):
    reason = "clip_qkv" if case == "olmo" else "QK-norm"
    with pytest.raises(ValueError, match=rf"{reason}.*--method mean"):
        convert(make_model(make_config(case)), tmp_path, method=method)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["svd", "aligned"])
def test_gpt2_mixes_all_its_coordinates(method, tmp_path):
    source = make_model(make_gpt2(), seed=3)
    with torch.no_grad():
        for block in source.transformer.h:
            for tensor in (block.attn.c_attn.weight, block.attn.c_attn.bias):
                heads = tensor[..., 64:].unflatten(-1, (2, HEADS, 16))
                heads.copy_(heads[..., :1, :].expand_as(heads).clone())
    source.save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=1, method=method, **WEIGHTS_ONLY)
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(source), **EXACT)


def test_fresh_heads_are_similar_to_none(tmp_path):
    with pytest.raises(ValueError, match="--grouping similar"):
        convert(make_model(make_config("llama")), tmp_path, method="random", grouping="similar")
