"""MHA, GQA and MQA against transformers' Llama, and the cache against the whole sequence.

The last tests are errors of widespread tutorial code: each of them runs, and gives numbers.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.attention.cache import LayerCache
from kvfold.attention.multihead import MultiHeadAttention
from kvfold.attention.rope import geometric
from kvfold.common.errors import UserError

from . import stock

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def module(*args, seed=0, **options):
    torch.manual_seed(seed)
    return MultiHeadAttention(*args, **options).double().eval()


def tokens(length=7, batch=2, hidden=24, seed=1):
    return torch.randn(batch, length, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize(("head_dim", "bias"), [(6, False), (10, True)])
@pytest.mark.parametrize("explicit", [False, True])
def test_equals_transformers_with_the_same_weights(kv_heads, head_dim, bias, explicit):
    torch.manual_seed(0)
    theirs = stock.llama(kv_heads, head_dim, bias)
    stock.randomise_biases(theirs)
    rope = geometric(head_dim)
    ours = module(24, 4, kv_heads, head_dim, qkv_bias=bias, out_bias=bias, rope=rope)
    ours.load_state_dict(theirs.state_dict())
    x = tokens(200)
    visible = stock.padded(2, 200)
    expected = stock.forward(theirs, x, rope, visible)
    torch.testing.assert_close(ours(x, mask=visible, causal=False, explicit=explicit), expected, **EXACT)
    torch.testing.assert_close(ours(x)[1], expected[1], **EXACT)


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4]),
    fused=st.booleans(),
    splits=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    padding=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_split_of_a_sequence_equals_the_whole(kv_heads, group, head_dim, fused, splits, padding, seed):
    ours = module(12, kv_heads * group, kv_heads, head_dim, fused=fused, rope=geometric(head_dim), seed=seed)
    length = sum(splits)
    x = tokens(length, hidden=12, seed=seed)
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    mask[0, ..., : length // 2] = not padding
    cache, parts, done = LayerCache(), [], 0
    for size in splits:
        parts.append(ours(x[:, done : done + size], mask=mask[..., : done + size], cache=cache))
        done += size
    torch.testing.assert_close(torch.cat(parts, 1), ours(x, mask=mask), **EXACT)
    assert cache.elements == 2 * length * 2 * kv_heads * head_dim


@pytest.mark.parametrize("bias", [False, True])
def test_fused_equals_separate(bias):
    separate, fused = (module(24, 4, 2, 6, fused=form, qkv_bias=bias, rope=geometric(6)) for form in (False, True))
    parts = [separate.q_proj, separate.k_proj, separate.v_proj]
    state = {
        f"qkv_proj.{name}": torch.cat([getattr(p, name) for p in parts]) for name in ("weight", "bias")[: 1 + bias]
    }
    fused.load_state_dict(state | {"o_proj.weight": separate.o_proj.weight})
    torch.testing.assert_close(fused(tokens()), separate(tokens()), **EXACT)


def test_explicit_positions_shift_nothing_but_per_sequence_ones_do():
    ours = module(24, 4, 2, rope=geometric(6))
    x = tokens()
    torch.testing.assert_close(ours(x, positions=torch.arange(7) + 1000), ours(x), rtol=1e-9, atol=1e-9)
    spread = torch.stack([torch.arange(7), 3 * torch.arange(7)])
    got = ours(x, positions=spread)
    torch.testing.assert_close(got[0], ours(x)[0], **EXACT)
    assert not torch.allclose(got[1, 1:], ours(x)[1, 1:])


def test_dropout_acts_in_training_only():
    ours = module(24, 4, dropout=0.5)
    torch.testing.assert_close(ours(tokens()), ours(tokens()), rtol=0, atol=0)
    ours.train()
    assert not torch.allclose(ours(tokens()), ours(tokens()))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="10 does not split into 4 heads; give head_dim, or try 1, 2, 5, 10"):
        MultiHeadAttention(10, 4)
    with pytest.raises(UserError, match="4 query heads cannot share 3 key/value heads"):
        MultiHeadAttention(24, 4, 3)


def test_tutorial_error_a_head_size_that_becomes_a_float():
    """`embed_dim / num_heads`: every size derived from it has to be a whole number."""
    ours = MultiHeadAttention(24, 4, 2)
    assert type(ours.head_dim) is int
    assert all(type(size) is int for size in ours.sizes)
    assert ours.head_dim == 6


@pytest.mark.parametrize("explicit", [False, True])
def test_tutorial_error_a_masked_fill_whose_result_is_dropped(explicit):
    """`scores.masked_fill(...)` without an underscore leaves everything visible."""
    ours = module(24, 4)
    x = tokens()
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    mask[..., 3] = False
    changed = x.clone()
    changed[:, 3] += 1
    before, after = (ours(t, mask=mask, causal=False, explicit=explicit) for t in (x, changed))
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(before[:, others], after[:, others], rtol=0, atol=0)
    assert not torch.allclose(before, ours(x, causal=False, explicit=explicit))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_tutorial_error_keys_and_values_of_embed_dim_over_groups(kv_heads):
    """G heads of d each; D/G is the same by chance for some G."""
    ours = MultiHeadAttention(24, 4, kv_heads, 10)
    assert ours.q_proj.weight.shape == (40, 24)
    assert ours.k_proj.weight.shape == ours.v_proj.weight.shape == (kv_heads * 10, 24)
    assert MultiHeadAttention(24, 4, kv_heads, 10, fused=True).qkv_proj.weight.shape == (40 + 2 * kv_heads * 10, 24)


def test_tutorial_error_the_value_returned_instead_of_the_output():
    """Equal queries and keys attend evenly: each token gets the mean of the values up to it, not its own."""
    ours = module(24, 4)
    with torch.no_grad():
        ours.q_proj.weight.zero_()
    x = tokens()
    means = ours.v_proj(x).cumsum(1) / torch.arange(1, 8)[:, None]
    torch.testing.assert_close(ours(x), ours.o_proj(means), **EXACT)


@pytest.mark.parametrize("explicit", [False, True])
def test_tutorial_error_a_causal_mask_of_zeros(explicit):
    """Zeros added to scores, or multiplied into them, let later tokens through."""
    ours = module(24, 4, 2, rope=geometric(6))
    x = tokens()
    changed = x.clone()
    changed[:, 5:] += 1
    before, after = ours(x, explicit=explicit), ours(changed, explicit=explicit)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=0)
    assert not torch.allclose(before[:, 5:], after[:, 5:])
