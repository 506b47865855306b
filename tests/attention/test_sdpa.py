"""Scaled dot-product attention: torch's kernels and the explicit form, both against the formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.attention.sdpa import attention, same_width
from kvfold.common.errors import UserError

EXACT = {"rtol": 1e-12, "atol": 1e-12}
FORMS = pytest.mark.parametrize("explicit", [False, True], ids=["fast", "explicit"])


def heads(batch=2, kv_heads=2, group=2, queries=3, keys=5, size=4, value=6, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return (
        torch.randn(batch, kv_heads * group, queries, size, dtype=dtype),
        torch.randn(batch, kv_heads, keys, size, dtype=dtype),
        torch.randn(batch, kv_heads, keys, value, dtype=dtype),
    )


def by_hand(query, key, value, visible, scale):
    """One query at a time, over the keys that it may see."""
    output = query.new_zeros(*query.shape[:-1], value.shape[-1])
    group = query.shape[1] // key.shape[1]
    for b, h, t in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).reshape(-1, 3).tolist():
        seen = visible[b, h, t].nonzero().flatten()
        scores = key[b, h // group, seen] @ query[b, h, t] * scale
        weights = scores.exp() / scores.exp().sum()
        output[b, h, t] = weights @ value[b, h // group, seen]
    return output


SIZES = st.fixed_dictionaries(
    {name: st.integers(1, 4) for name in ("batch", "kv_heads", "group", "queries", "keys", "size", "value")}
)


@settings(max_examples=40, deadline=None)
@given(
    sizes=SIZES,
    shape=st.tuples(*[st.booleans()] * 4),
    causal=st.booleans(),
    additive=st.booleans(),
    scale=st.sampled_from([None, 0.2]),
    seed=st.integers(0, 99),
)
def test_both_forms_equal_the_formula(sizes, shape, causal, additive, scale, seed):
    """Any shape, group size and mask, rows without a visible key among them."""
    query, key, value = heads(**sizes, seed=seed)
    full = (*query.shape[:3], key.shape[2])
    mask = torch.rand([size if kept else 1 for size, kept in zip(full, shape, strict=True)]) > 0.4
    visible = mask.expand(full)
    if causal:
        visible = visible & torch.ones(full[2:], dtype=torch.bool).tril(full[3] - full[2])
    if additive:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    expected = by_hand(query, key, value, visible, scale or sizes["size"] ** -0.5)
    for explicit in (False, True):
        got = attention(query, key, value, mask=mask, causal=causal, scale=scale, explicit=explicit)
        torch.testing.assert_close(got, expected, **EXACT)


@FORMS
@pytest.mark.parametrize("queries", [1, 3, 5, 7])
def test_causal_stands_at_the_end_of_the_keys(queries, explicit):
    query, key, value = heads(queries=queries)
    visible = torch.ones(2, 4, queries, 5, dtype=torch.bool).tril(5 - queries)
    got = attention(query, key, value, causal=True, explicit=explicit)
    torch.testing.assert_close(got, by_hand(query, key, value, visible, 0.5), **EXACT)


def test_an_added_mask_biases_the_scores_and_gets_gradients():
    query, key, value = heads()
    bias = torch.randn(1, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    results = [attention(query, key, value, mask=bias, explicit=explicit) for explicit in (False, True)]
    torch.testing.assert_close(*results, **EXACT)
    torch.testing.assert_close(*(torch.autograd.grad(r.square().sum(), bias) for r in results), **EXACT)
    assert not torch.allclose(results[0], attention(query, key, value))


@FORMS
@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_nothing_give_zeros_and_no_gradients(explicit, additive, causal):
    query, key, value = (tensor.requires_grad_() for tensor in heads())
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    mask[1, 0, 1] = False
    mask[0, 0, :, 4] = False
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    output = attention(query, key, value, mask=mask, causal=causal, explicit=explicit)
    assert not output[1, :, 1].any() and output[1, :, 0].all()
    grads = torch.autograd.grad(output.square().sum(), (query, key, value))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][1, :, 1].any()
    assert not grads[1][0, :, 4].any() and not grads[2][0, :, 4].any()


@FORMS
def test_a_batch_in_which_nobody_sees_anything(explicit):
    query, key, value = (tensor.requires_grad_() for tensor in heads())
    output = attention(query, key, value, mask=torch.zeros(3, 5, dtype=torch.bool), explicit=explicit)
    grads = torch.autograd.grad(output.sum(), (query, key, value))
    assert not any(tensor.any() for tensor in (output, *grads))


@FORMS
def test_dropout_drops_weights_after_the_softmax_and_keeps_their_mean(explicit):
    """Constant values of 1: without dropout every output is 1, and dropped before the softmax it would be too."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 1, 4000, 4), torch.randn(1, 1, 8, 4), torch.ones(1, 1, 8, 1)
    torch.testing.assert_close(attention(query, key, value, explicit=explicit), torch.ones(1, 1, 4000, 1))
    dropped = attention(query, key, value, dropout=0.25, explicit=explicit)
    assert dropped.std() > 0.05
    assert abs(dropped.mean() - 1) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    tensors = heads(queries=5)
    exact = attention(*tensors, causal=True, explicit=True)
    for explicit in (False, True):
        got = attention(*(tensor.to(dtype) for tensor in tensors), causal=True, explicit=explicit)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, rtol=3e-2, atol=3e-2)


@FORMS
def test_an_added_mask_counts_in_the_dtype_of_the_queries(explicit):
    """The lowest fp32 number, which stock masks are made of, is minus infinity in fp16."""
    query, key, value = heads(dtype=torch.float16)
    mask = torch.zeros(3, 5)
    mask[1] = torch.finfo(torch.float32).min
    output = attention(query, key, value, mask=mask, explicit=explicit)
    assert output.isfinite().all() and output[:, :, 0].all()
    assert not output[:, :, 1].any()


def test_kernels_of_long_sequences_agree():
    """Long enough for torch's blocked kernels, which tiny shapes may not reach; head sizes equal, as these demand."""
    query, key, value = heads(batch=1, group=4, queries=300, keys=300, size=64, value=64, dtype=torch.float32)
    mask = torch.rand(1, 1, 300, 300) > 0.5
    mask[..., 7, :] = False
    for options in ({"causal": True}, {"mask": mask}, {"mask": mask, "causal": True}):
        fast, slow = (attention(query, key, value, explicit=explicit, **options) for explicit in (False, True))
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(3, 5, dtype=torch.long), "torch.int64"),
        (torch.ones(2, 5, dtype=torch.bool), r"\[2, 5\] does not broadcast to \[2, 4, 3, 5\]"),
        (torch.ones(1, 2, 4, 3, 5, dtype=torch.bool), "does not broadcast"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, said):
    with pytest.raises(UserError, match=said):
        attention(*heads(), mask=mask)


def test_heads_that_do_not_divide_are_refused():
    query, key, value = heads()
    with pytest.raises(UserError, match="4 query heads cannot share 3 key/value heads; try 1, 2, 4"):
        attention(query, key.repeat(1, 2, 1, 1)[:, :3], value.repeat(1, 2, 1, 1)[:, :3])


@pytest.mark.parametrize(("size", "value"), [(6, 4), (4, 6), (5, 5)])
def test_heads_of_one_width_attend_the_same(size, value):
    """What was added is zeros: no score changes, and what comes out is the same with zeros behind."""
    query, key, values = heads(queries=5, size=size, value=value)
    expected = attention(query, key, values, causal=True, scale=0.3)
    wide = same_width(query, key, values)
    assert {each.shape[-1] for each in wide} == {max(size, value)}
    output = attention(*wide, causal=True, scale=0.3)
    torch.testing.assert_close(output[..., :value], expected, **EXACT)
    assert not output[..., value:].any()


def test_only_a_cpu_wants_one_width():
    there = [each.to("meta") for each in heads()]
    assert all(a is b for a, b in zip(same_width(*there), there, strict=True))


def test_scores_of_a_whole_layer_are_not_held():
    """What `same_width` is for: torch's kernel for a CPU, which it takes for heads of one width only."""
    with torch.profiler.profile() as profile:
        attention(*same_width(*heads(queries=64, keys=64, dtype=torch.float32)), causal=True)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
