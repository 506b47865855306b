from __future__ import annotations

import pytest
import torch

from kvfold.convert.merge.aligned import aligned
from kvfold.convert.merge.mixing import (
    GroupMoments,
    Mixing,
    complex_blocks,
    group_moments,
    key_maps,
    layer_moments,
    loss,
    uncoupled,
    whole_heads,
)
from kvfold.convert.merge.svd import svd

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

FIRST = whole_heads(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), HEAD_DIM)


def uncoupled_moments(seed, rotary):
    """Moments for which each frequency's own optimum is the optimum."""
    moments = random_moments(seed, 3)
    keys = (uncoupled(moment, 3, rotary) for moment in (moments.key, moments.key_fisher))
    return GroupMoments(next(keys), moments.value, next(keys), moments.value_fisher)


def twins(seed, rotary, dead):
    """Three heads that are one, but for a complex factor at each frequency and an invertible map of the rest.

    The one may have some dead coordinates.
    """
    n = len(rotary.free)
    maps = key_maps(torch.complex(*randn(seed, 2, len(rotary.re), 3)), randn(seed + 1, 3, n, n), rotary)
    key, value = random_heads(seed + 2, 1), random_heads(seed + 4, 1)
    key[:, :dead] = value[:, :dead] = 0
    return maps @ key, randn(seed + 3, 3, HEAD_DIM, HEAD_DIM) @ value


@rotaries
def test_one_head_stays_what_it_is(rotary):
    mixing = svd(random_moments(0, 1), 1, rotary)
    for maps in (mixing.key_in, mixing.key_out, mixing.value_in, mixing.value_out):
        torch.testing.assert_close(maps, torch.eye(HEAD_DIM).double()[None], **EXACT)


@rotaries
def test_equal_heads_become_themselves(rotary):
    keys, values = (random_heads(seed, 1).repeat(3, 1, 1) for seed in (0, 1))
    mixing = svd(random_layer(keys, values), 3, rotary)
    for heads, into, out in ((keys, mixing.key_in, mixing.key_out), (values, mixing.value_in, mixing.value_out)):
        torch.testing.assert_close((into @ heads).sum(0), heads[0], **EXACT)
        torch.testing.assert_close(out, torch.eye(HEAD_DIM).double().expand_as(out), **EXACT)


@rotaries
@pytest.mark.parametrize("dead", [0, 2])
def test_twins_merge_exactly(rotary, dead):
    keys, values = twins(0, rotary, dead)
    moments = random_layer(keys, values)
    for heads, back in zip((keys, values), read_back(svd(moments, 3, rotary), keys, values), strict=True):
        torch.testing.assert_close(back, heads, **EXACT)
    assert loss(MEAN, moments) > 0.1 * loss(FIRST, moments) > 0


@rotaries
def test_maps_commute_with_rope(rotary):
    mixing = svd(random_moments(0, 3), 3, rotary)
    for position in (1, 7, 200):
        turn = rope(rotary, position)
        for maps in (mixing.key_in, mixing.key_out):
            torch.testing.assert_close(maps @ turn, turn @ maps, **EXACT)


@rotaries
def test_no_change_of_the_maps_loses_less(rotary):
    moments = uncoupled_moments(0, rotary)
    mixing = svd(moments, 3, rotary)
    least = loss(mixing, moments)
    for seed in range(20):
        for size in (1e-4, 1e-2, 1.0):
            factors = torch.complex(*randn(seed, 2, 2, len(rotary.re), 3))
            n = len(rotary.free)
            free, value = randn(seed + 1, 2, 3, n, n), randn(seed + 2, 2, 3, HEAD_DIM, HEAD_DIM)
            changed = Mixing(
                mixing.key_in + size * key_maps(factors[0], free[0], rotary),
                mixing.key_out + size * key_maps(factors[1], free[1], rotary),
                mixing.value_in + size * value[0],
                mixing.value_out + size * value[1],
            )
            assert loss(changed, moments) > least


@rotaries
def test_it_loses_what_the_smaller_eigenvalues_say(rotary):
    moments = uncoupled_moments(0, rotary)
    mixing = svd(moments, 3, rotary)
    expected = torch.linalg.eigvals(moments.value_fisher @ moments.value).real.sort().values[: 2 * HEAD_DIM].sum()
    n = len(rotary.free)
    rows = torch.tensor([j * HEAD_DIM + i for j in range(3) for i in rotary.free], dtype=torch.long)
    free = (moment[rows[:, None], rows] for moment in (moments.key_fisher, moments.key))
    expected += torch.linalg.eigvals(next(free) @ next(free)).real.sort().values[: 2 * n].sum()
    blocks = (complex_blocks(moment, 3, rotary) for moment in (moments.key_fisher, moments.key))
    expected += torch.linalg.eigvals(next(blocks) @ next(blocks)).real.sort(dim=-1).values[:, :2].sum() / 2
    assert loss(mixing, moments) == pytest.approx(float(expected), rel=1e-9)


@rotaries
@pytest.mark.parametrize("seed", range(5))
def test_no_method_loses_less(rotary, seed):
    moments = uncoupled_moments(100 * seed, rotary)
    ours = loss(svd(moments, 3, rotary), moments)
    assert ours < loss(aligned(moments, 3, rotary), moments)
    assert ours < loss(MEAN, moments)
    assert ours < loss(FIRST, moments)


@rotaries
def test_the_order_of_heads_does_not_matter(rotary):
    order = [2, 0, 1]
    moments = random_moments(0, 3)
    before = composed(svd(moments, 3, rotary))
    after = composed(svd(group_moments(moments, order, HEAD_DIM), 3, rotary))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one[order][:, order], other, **EXACT)


@rotaries
@pytest.mark.parametrize("scales", [(10.0, 1.0), (1.0, 10.0), (1e-12, 1e-12), (1e12, 1e12)])
def test_scales_do_not_matter(rotary, scales):
    moments = random_moments(0, 3)
    size, fisher = scales
    scaled = GroupMoments(
        moments.key * size, moments.value * size, moments.key_fisher * fisher, moments.value_fisher * fisher
    )
    for one, other in zip(vars(svd(moments, 3, rotary)).values(), vars(svd(scaled, 3, rotary)).values(), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@rotaries
def test_new_channels_are_as_large_as_those_they_replace(rotary):
    moments = random_moments(0, 3)
    scaled = GroupMoments(moments.key * 7, moments.value * 7, moments.key_fisher * 1e-6, moments.value_fisher * 1e-6)
    mixing = svd(scaled, 3, rotary)
    sizes = []
    for into, moment in ((mixing.key_in, scaled.key), (mixing.value_in, scaled.value)):
        stacked = torch.cat(list(into), dim=1)  # [d, g*d]
        sizes.append(((stacked @ moment @ stacked.mT).diagonal(), moment.diagonal().view(3, HEAD_DIM).mean(0)))
    (key, replaced_keys), (value, replaced_values) = sizes
    assert float(value.sum()) == pytest.approx(float(replaced_values.sum()))
    re, im, free = map(list, (rotary.re, rotary.im, rotary.free))
    torch.testing.assert_close(key[re] + key[im], replaced_keys[re] + replaced_keys[im])
    torch.testing.assert_close(key[free].sum(), replaced_keys[free].sum())


@rotaries
def test_read_backs_are_as_near_to_the_mean_as_the_gauge_allows(rotary):
    mixing = svd(random_moments(0, 3), 3, rotary)
    key, value = mixing.key_out.sum(0), mixing.value_out.sum(0)
    torch.testing.assert_close(value, value.mT, **EXACT)
    assert torch.linalg.eigvalsh(value)[0] > 0
    torch.testing.assert_close(key, key.mT, **EXACT)  # a complex factor is symmetric when it is real
    assert torch.linalg.eigvalsh(key)[0] > 0


@rotaries
@pytest.mark.parametrize("heads", [3, 6])
def test_three_tokens_and_dead_channels_give_sane_maps(rotary, heads):
    keys, values = random_heads(0, heads), random_heads(1, heads)
    keys[:, 1] = values[:, 2] = 0  # dead in every head
    keys[1] = values[2] = 0  # dead heads
    tokens = randn(2, 2, 3, heads * HEAD_DIM)
    layer = layer_moments(keys, values, random_inputs(3, tokens=3, dead=D // 2), *(tokens.mT @ tokens / 3))
    mixing = svd(layer, heads, rotary)
    for maps in vars(mixing).values():
        assert maps.isfinite().all()
        assert maps.abs().max() < 1e4
    whole = (mixing.value_in @ mixing.value_out).sum(0)  # going through twice is going through once
    torch.testing.assert_close(whole, torch.eye(HEAD_DIM).double(), rtol=0, atol=1e-6)


@rotaries
def test_moments_of_zeros_give_finite_maps(rotary):
    zeros = torch.zeros(3 * HEAD_DIM, 3 * HEAD_DIM).double()
    some = random_moment(0, 3 * HEAD_DIM)
    for moments in (GroupMoments(zeros, zeros, some, some), GroupMoments(some, some, zeros, zeros)):
        for maps in vars(svd(moments, 3, rotary)).values():
            assert maps.isfinite().all()
