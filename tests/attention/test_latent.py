"""Attention in latent space against attention over the keys and values that the latents expand to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.attention.latent import absorbed_attention, absorbing_pays
from kvfold.attention.sdpa import attention, softmax

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def problem(batch=2, heads=3, queries=4, cached=7, nope=5, rope=4, value=6, rank=8, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    shapes = [
        (batch, heads, queries, nope),
        (batch, heads, queries, rope),
        (batch, cached, rank),
        (batch, cached, rope),
        (heads, nope, rank),
        (heads, value, rank),
    ]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def expanded(q_nope, q_rope, latent, key_rope, up_key, up_value, **options):
    """Keys and values of every head written out."""
    key = torch.einsum("bsr,hnr->bhsn", latent, up_key)
    rotary = key_rope[:, None].expand(-1, key.shape[1], -1, -1)
    value = torch.einsum("bsr,hvr->bhsv", latent, up_value)
    query = torch.cat([q_nope, q_rope], -1)
    return attention(query, torch.cat([key, rotary], -1), value, explicit=True, **options)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {name: st.integers(1, 5) for name in ("batch", "heads", "queries", "nope", "rope", "value", "rank")}
    ),
    earlier=st.integers(0, 6),
    kind=st.sampled_from(["none", "bool", "additive"]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_expanded_form(sizes, earlier, kind, causal, seed):
    cached = sizes["queries"] + earlier
    tensors = problem(**sizes, cached=cached, seed=seed)
    mask = torch.rand(sizes["batch"], 1, sizes["queries"], cached) > 0.4
    if kind == "additive":
        mask = torch.randn_like(mask, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    options = {"scale": 0.3, "mask": None if kind == "none" else mask, "causal": causal}
    torch.testing.assert_close(absorbed_attention(*tensors, **options), expanded(*tensors, **options), **EXACT)


def test_gradients_equal_the_expanded_forms_and_stay_finite_in_masked_rows():
    tensors = [tensor.requires_grad_() for tensor in problem()]
    mask = torch.ones(2, 1, 4, 7, dtype=torch.bool)
    mask[0, 0, 1] = False  # sees nothing
    options = {"scale": 0.3, "mask": mask, "causal": True}
    upstream = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((form(*tensors, **options) * upstream).sum(), tensors)
        for form in (absorbed_attention, expanded)
    )
    torch.testing.assert_close(ours, theirs, **EXACT)
    assert not ours[0][0, :, 1].any()
    assert ours[0][0, :, 2].any()


def test_a_row_that_sees_nothing_gives_zeros():
    mask = torch.ones(2, 1, 4, 7, dtype=torch.bool)
    mask[1, 0, 2] = False
    output = absorbed_attention(*problem(), scale=1.0, mask=mask)
    assert not output[1, :, 2].any()
    assert output.isfinite().all() and output[1, :, 1].all()


def test_views_of_one_projection_and_a_preallocated_cache_are_read_in_place():
    """`kv_b_proj.weight` holds both maps, and a static cache is longer than what is in it."""
    q_nope, q_rope, latent, key_rope, up_key, up_value = problem(cached=9)
    weight = torch.cat([up_key, up_value], 1).flatten(0, 1)  # [H*(n+v), R]
    views = weight.unflatten(0, (3, -1)).split([5, 6], dim=1)
    mask = torch.arange(9) < 6
    cut = absorbed_attention(q_nope, q_rope, latent[:, :6], key_rope[:, :6], *views, scale=1.0)
    whole = absorbed_attention(q_nope, q_rope, latent, key_rope, up_key, up_value, scale=1.0, mask=mask)
    torch.testing.assert_close(cut, whole, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_the_dtype_and_the_softmax_in_fp32(dtype):
    tensors = problem()
    options = {"scale": 0.3, "causal": True}
    output = absorbed_attention(*(tensor.to(dtype) for tensor in tensors), **options)
    assert output.dtype == dtype
    assert softmax(torch.zeros(1, 1, 1, 3, dtype=dtype), None).dtype == torch.float32
    torch.testing.assert_close(output.double(), absorbed_attention(*tensors, **options), rtol=0.1, atol=0.1)


def test_absorbing_pays_for_few_queries_over_a_long_cache():
    deepseek = {"rank": 512, "nope": 128, "value": 128}
    assert absorbing_pays(1, 4096, **deepseek)
    assert absorbing_pays(100, 4096, **deepseek)
    assert not absorbing_pays(160, 4096, **deepseek)
    assert not any(absorbing_pays(tokens, tokens, **deepseek) for tokens in (2, 100, 10_000))


def test_absorbing_pays_no_whole_prompt_even_where_a_small_rank_makes_it_less_work():
    """It would hold the scores of all heads at once."""
    assert absorbing_pays(64, 4096, rank=16, nope=64, value=64)
    assert not absorbing_pays(65, 4096, rank=16, nope=64, value=64)
