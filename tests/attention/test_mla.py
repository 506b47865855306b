"""Multi-head latent attention against transformers' DeepSeek-V3, absorbed against expanded, cached against whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.attention import mla
from kvfold.attention.cache import LayerCache
from kvfold.attention.latent import absorbed_attention
from kvfold.attention.mla import MultiHeadLatentAttention
from kvfold.attention.rope import geometric

from . import stock

EXACT = {"rtol": 1e-11, "atol": 1e-11}


def module(
    heads=3, rank=16, nope=6, rope=4, value=5, query_rank=None, interleaved=True, bias=False, dropout=0.0, seed=0
):
    torch.manual_seed(seed)
    return (
        MultiHeadLatentAttention(
            24,
            heads,
            kv_lora_rank=rank,
            qk_nope_head_dim=nope,
            v_head_dim=value,
            rope=geometric(rope, interleaved=interleaved),
            q_lora_rank=query_rank,
            bias=bias,
            dropout=dropout,
        )
        .double()
        .eval()
    )


def tokens(length=7, seed=1):
    return torch.randn(2, length, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("query_rank", [None, 10])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", [{"explicit": True}, {"explicit": False}, {"absorbed": True}], ids=str)
def test_equals_transformers_with_the_same_weights(query_rank, interleaved, bias, form):
    torch.manual_seed(0)
    theirs = stock.deepseek(query_rank, interleaved, bias)
    stock.randomise_biases(theirs)
    ours = module(query_rank=query_rank, interleaved=interleaved, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    x = tokens(200)
    visible = stock.padded(2, 200)
    form = {"absorbed": False} | form
    got = ours(x, mask=visible, causal=False, **form)
    torch.testing.assert_close(got, stock.forward(theirs, x, ours.rope, visible), **EXACT)
    torch.testing.assert_close(ours(x, **form)[1], got[1], **EXACT)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.fixed_dictionaries({name: st.integers(1, 5) for name in ("heads", "rank", "nope", "value")}),
    rope=st.sampled_from([0, 2, 4]),
    query_rank=st.sampled_from([None, 3]),
    interleaved=st.booleans(),
    splits=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, False, True])), min_size=1, max_size=5),
    padding=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_split_in_any_form_equals_the_whole(sizes, rope, query_rank, interleaved, splits, padding, seed):
    ours = module(**sizes, rope=rope, query_rank=query_rank, interleaved=interleaved, seed=seed)
    length = sum(size for size, _ in splits)
    x = tokens(length, seed=seed)
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    mask[0, ..., : length // 2] = not padding
    cache, parts, done = LayerCache(), [], 0
    for size, absorbed in splits:
        options = {"mask": mask[..., : done + size], "cache": cache, "absorbed": absorbed}
        parts.append(ours(x[:, done : done + size], **options))
        done += size
    expected = ours(x, mask=mask, absorbed=False, explicit=True)
    torch.testing.assert_close(torch.cat(parts, 1), expected, **EXACT)
    assert cache.elements == 2 * length * (sizes["rank"] + rope)


def test_a_step_over_a_long_cache_is_absorbed_and_a_prompt_is_not(monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(args[0].shape[2])
        return absorbed_attention(*args, **options)

    monkeypatch.setattr(mla, "absorbed_attention", counted)
    ours, cache = module(), LayerCache()
    ours(tokens(50), cache=cache)
    assert not calls
    ours(tokens(1), cache=cache)
    assert calls == [1]


@pytest.mark.parametrize("absorbed", [False, True])
def test_dropout_acts_in_training_only(absorbed):
    ours = module(dropout=0.5)
    torch.testing.assert_close(ours(tokens(), absorbed=absorbed), ours(tokens(), absorbed=absorbed), rtol=0, atol=0)
    ours.train()
    assert not torch.allclose(ours(tokens(), absorbed=absorbed), ours(tokens(), absorbed=absorbed))


def test_gradients_of_both_forms_are_equal():
    ours = module(query_rank=8)
    grads = [torch.autograd.grad(ours(tokens(), absorbed=a).square().sum(), ours.parameters()) for a in (False, True)]
    torch.testing.assert_close(*grads, **EXACT)
