from __future__ import annotations

import pytest
import torch

from kvfold.convert.merge.aligned import aligned
from kvfold.convert.merge.mixing import (
    GroupMoments,
    Mixing,
    complex_blocks,
    free_block,
    group_moments,
    key_maps,
    layer_moments,
    loss,
    polar,
    unit,
)

from .heads import (
    EXACT,
    HEAD_DIM,
    MEAN,
    D,
    composed,
    randn,
    random_heads,
    random_inputs,
    random_layer,
    random_moment,
    random_moments,
    read_back,
    rope,
    rotaries,
)


def random_turns(seed, heads, rotary):
    """Rotations of keys that commute with RoPE, and of values."""
    n = len(rotary.free)
    phases = unit(torch.complex(*randn(seed, 2, len(rotary.re), heads)))
    return key_maps(phases, polar(randn(seed + 1, heads, n, n)), rotary), polar(
        randn(seed + 2, heads, HEAD_DIM, HEAD_DIM)
    )


@rotaries
def test_one_head_stays_what_it_is(rotary):
    for maps in vars(aligned(random_moments(0, 1), 1, rotary)).values():
        torch.testing.assert_close(maps, torch.eye(HEAD_DIM).double()[None], **EXACT)


@rotaries
@pytest.mark.parametrize("dead", [0, 2])
def test_equal_heads_become_themselves(rotary, dead):
    keys, values = (random_heads(seed, 1).repeat(3, 1, 1) for seed in (0, 1))
    keys[:, :dead] = values[:, :dead] = 0
    mixing = aligned(random_layer(keys, values), 3, rotary)
    read = read_back(mixing, keys, values)
    for heads, into, back in zip((keys, values), (mixing.key_in, mixing.value_in), read, strict=True):
        torch.testing.assert_close(back, heads, **EXACT)
        if not dead:
            torch.testing.assert_close((into @ heads).sum(0), heads[0], **EXACT)


@rotaries
@pytest.mark.parametrize("dead", [0, 2])
def test_turned_twins_merge_exactly(rotary, dead):
    key_turns, value_turns = random_turns(0, 3, rotary)
    key, value = random_heads(3, 1), random_heads(4, 1)
    key[:, :dead] = value[:, :dead] = 0
    keys, values = key_turns @ key, value_turns @ value
    moments = random_layer(keys, values)
    for heads, back in zip((keys, values), read_back(aligned(moments, 3, rotary), keys, values), strict=True):
        torch.testing.assert_close(back, heads, **EXACT)
    assert loss(MEAN, moments) > 1


@rotaries
def test_read_backs_are_rotations_that_commute_with_rope(rotary):
    mixing = aligned(random_moments(0, 3), 3, rotary)
    for out in (mixing.key_out, mixing.value_out):
        torch.testing.assert_close(out @ out.mT, torch.eye(HEAD_DIM).double().expand_as(out), **EXACT)
    for position in (1, 7, 200):
        turn = rope(rotary, position)
        for maps in (mixing.key_in, mixing.key_out):
            torch.testing.assert_close(maps @ turn, turn @ maps, **EXACT)


@rotaries
def test_averaging_does_not_shrink(rotary):
    moments = random_moments(0, 3)
    mixing = aligned(moments, 3, rotary)
    merged = []
    for into, moment in ((mixing.key_in, moments.key), (mixing.value_in, moments.value)):
        into = torch.cat(list(into), dim=1)  # [d, g*d]
        merged.append(into @ moment @ into.mT)
    sizes = complex_blocks(moments.key, 3, rotary).diagonal(dim1=1, dim2=2).real.mean(-1)
    torch.testing.assert_close(complex_blocks(merged[0], 1, rotary).real.flatten(), sizes)
    torch.testing.assert_close(free_block(merged[0], 1, rotary).trace(), free_block(moments.key, 3, rotary).trace() / 3)
    torch.testing.assert_close(merged[1].trace(), moments.value.trace() / 3)


def agreement(mixing, moments):
    """The mean square of the sum of the turned heads: of keys, and of values."""
    pairs = ((mixing.key_out, moments.key), (mixing.value_out, moments.value))
    return [float((out.flatten(0, 1).mT @ moment @ out.flatten(0, 1)).trace()) for out, moment in pairs]


@rotaries
def test_no_turn_of_a_head_brings_them_nearer(rotary):
    moments = random_moments(0, 3)
    mixing = aligned(moments, 3, rotary)
    most = agreement(mixing, moments)
    for seed in range(20):
        n = len(rotary.free)
        for size in (1e-2, 1e-1):
            turns = unit(1 + 1j * size * randn(seed, len(rotary.re), 3))
            free, value = (polar(torch.eye(k).double() + size * randn(seed, 3, k, k)) for k in (n, HEAD_DIM))
            turned = Mixing(
                mixing.key_in,
                key_maps(turns, free, rotary) @ mixing.key_out,
                mixing.value_in,
                value @ mixing.value_out,
            )
            for less, more in zip(agreement(turned, moments), most, strict=True):
                assert less < more


@rotaries
def test_the_order_of_heads_does_not_matter(rotary):
    order = [2, 0, 3, 1]
    moments = random_moments(0, 4)
    before = composed(aligned(moments, 4, rotary))
    after = composed(aligned(group_moments(moments, order, HEAD_DIM), 4, rotary))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one[order][:, order], other, **EXACT)


@rotaries
def test_scales_and_gradients_do_not_matter(rotary):
    moments = random_moments(0, 3)
    scaled = GroupMoments(moments.key * 10, moments.value * 1e-12, moments.value_fisher, moments.key_fisher)
    maps = vars(aligned(moments, 3, rotary)).values()
    for one, other in zip(maps, vars(aligned(scaled, 3, rotary)).values(), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@rotaries
@pytest.mark.parametrize("heads", [3, 6])
def test_three_tokens_and_dead_channels_give_finite_maps(rotary, heads):
    keys, values = random_heads(0, heads), random_heads(1, heads)
    keys[:, 1] = values[:, 2] = 0  # dead in every head
    keys[1] = values[2] = 0  # dead heads
    layer = layer_moments(keys, values, random_inputs(3, tokens=3, dead=D // 2))
    for maps in vars(aligned(layer, heads, rotary)).values():
        assert maps.isfinite().all()
        assert maps.abs().max() < 10


@rotaries
def test_moments_of_zeros_give_finite_maps(rotary):
    zeros, some = torch.zeros(3 * HEAD_DIM, 3 * HEAD_DIM).double(), random_moment(0, 3 * HEAD_DIM)
    for maps in vars(aligned(GroupMoments(zeros, zeros, some, some), 3, rotary)).values():
        assert maps.isfinite().all()
