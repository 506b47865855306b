from __future__ import annotations

import itertools

import pytest
import torch

from kvfold.common.errors import UserError
from kvfold.convert.merge.mixing import (
    complex_blocks,
    free_block,
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
    ROTARIES,
    D,
    composed,
    randn,
    random_heads,
    random_inputs,
    random_moment,
    random_moments,
    read_back,
    rope,
    rotaries,
)


def random_maps(seed, heads, rotary):
    factors = torch.complex(*randn(seed, 2, len(rotary.re), heads))
    n = len(rotary.free)
    return factors, key_maps(factors, randn(seed + 1, heads, n, n), rotary)


@rotaries
def test_complex_blocks_are_the_moments_of_the_complex_channels(rotary):
    tokens = randn(0, 50, 3, HEAD_DIM)  # [n, g, d]
    stacked = tokens.flatten(1)
    channels = torch.complex(tokens[..., list(rotary.re)], tokens[..., list(rotary.im)])  # [n, g, F]
    expected = torch.einsum("njf,nkf->fjk", channels, channels.conj())
    torch.testing.assert_close(complex_blocks(stacked.mT @ stacked, 3, rotary), expected)


@rotaries
def test_key_maps_multiply_channels(rotary):
    factors, maps = random_maps(0, 3, rotary)
    key = randn(2, 3, HEAD_DIM)
    re, im = list(rotary.re), list(rotary.im)
    for one, factor in ((maps, factors.mT), (maps.mT, factors.mT.conj())):
        turned = (one @ key[..., None]).squeeze(-1)
        expected = factor * torch.complex(key[:, re], key[:, im])
        torch.testing.assert_close(torch.complex(turned[:, re], turned[:, im]), expected)


@rotaries
@pytest.mark.parametrize("position", [1, 7, 200])
def test_key_maps_commute_with_rope(rotary, position):
    _, maps = random_maps(0, 3, rotary)
    turn = rope(rotary, position)
    torch.testing.assert_close(maps @ turn, turn @ maps, **EXACT)


@rotaries
def test_uncoupled_is_the_mean_over_all_turns_of_all_channels(rotary):
    moment = random_moment(0, 2 * HEAD_DIM)
    angles = [torch.tensor(turn) for turn in itertools.product((1, 1j, -1, -1j), repeat=len(rotary.re))]
    free = torch.eye(len(rotary.free), dtype=torch.float64).expand(2, -1, -1)
    mean = torch.zeros_like(moment)
    for sign, turn in itertools.product((1, -1), angles):  # free coordinates may be turned by any map; a sign will do
        factors = turn.reshape(-1, 1).expand(-1, 2).to(torch.complex128)
        whole = torch.block_diag(*key_maps(factors, sign * free, rotary))
        mean += whole @ moment @ whole.mT / (2 * len(angles))
    result = uncoupled(moment, 2, rotary)
    torch.testing.assert_close(result, mean)
    torch.testing.assert_close(complex_blocks(result, 2, rotary), complex_blocks(moment, 2, rotary))
    torch.testing.assert_close(free_block(result, 2, rotary), free_block(moment, 2, rotary))


def test_moments_are_those_of_the_projections_outputs():
    keys, values = random_heads(0, 4), random_heads(1, 4)
    x = torch.cat([randn(2, 500, D), torch.ones(500, 1).double()], dim=1)
    layer = layer_moments(keys, values, x.mT @ x / 500)
    for heads, moment in ((keys, layer.key), (values, layer.value)):
        outputs = x @ heads.flatten(0, 1).mT  # [n, G*d]
        torch.testing.assert_close(moment, outputs.mT @ outputs / 500, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.key_fisher, torch.eye(4 * HEAD_DIM).double())


def test_a_groups_moments_stand_in_the_groups_order():
    keys, values = random_heads(0, 4), random_heads(1, 4)
    inputs, order = random_inputs(2), [3, 0, 2]
    fishers = [random_moment(seed, 4 * HEAD_DIM) for seed in (3, 4)]
    layer = layer_moments(keys, values, inputs, *fishers)
    group = group_moments(layer, order, HEAD_DIM)
    direct = layer_moments(keys[order], values[order], inputs)
    torch.testing.assert_close(group.key, direct.key)
    torch.testing.assert_close(group.value, direct.value)
    blocks = fishers[1].view(4, HEAD_DIM, 4, HEAD_DIM)
    torch.testing.assert_close(group.value_fisher[HEAD_DIM : 2 * HEAD_DIM, :HEAD_DIM], blocks[0, :, 3])


def test_what_calibration_never_showed_is_merged_by_the_weights_alone():
    keys, values = random_heads(0, 3), random_heads(1, 3)
    keys[..., -1] = values[..., -1] = 0
    nothing = torch.zeros(D + 1, D + 1).double()
    nothing[-1, -1] = 1
    for few, none in zip(
        composed(svd(layer_moments(keys, values, nothing), 3, ROTARIES["part"])),
        composed(svd(layer_moments(keys, values), 3, ROTARIES["part"])),
        strict=True,
    ):
        torch.testing.assert_close(few, none, **EXACT)


def test_the_ridge_outweighs_the_rounding_of_sums_in_fp32():
    x = torch.cat([randn(0, 3, D), torch.ones(3, 1).double()], dim=1).float()
    layer = layer_moments(random_heads(0, 6), random_heads(1, 6), (x.mT @ x).double() / 3)
    for moment in (layer.key, layer.value):  # 48 coordinates of 41 inputs, of which 3 tokens show 3 directions
        assert torch.linalg.eigvalsh(moment)[-41] > 0


def test_weights_that_are_no_numbers_are_told():
    keys = random_heads(0, 2)
    keys[1, 0, 0] = float("nan")
    with pytest.raises(UserError, match="NaN or an infinity"):
        layer_moments(keys, random_heads(1, 2))


def test_loss_is_the_mean_square_that_is_not_read_back():
    keys, values = random_heads(0, 2), random_heads(1, 2)
    moments = layer_moments(keys, values)  # of white inputs: the mean square of an output is that of its weights
    mixing = svd(random_moments(2, 2), 2, ROTARIES["half"])  # a mixture made for other heads
    missed = [heads - read for heads, read in zip((keys, values), read_back(mixing, keys, values), strict=True)]
    assert loss(mixing, moments) == pytest.approx(sum(float(part.square().sum()) for part in missed), rel=1e-10)


def test_fisher_moments_weigh_the_loss():
    moments = random_moments(0, 3)
    mixing = whole_heads(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), HEAD_DIM)
    expected = 0.0
    for into, out, moment, fisher in (
        (mixing.key_in, mixing.key_out, moments.key, moments.key_fisher),
        (mixing.value_in, mixing.value_out, moments.value, moments.value_fisher),
    ):
        rest = torch.eye(3 * HEAD_DIM).double() - torch.cat(list(out)) @ torch.cat(list(into), dim=1)
        expected += float((fisher @ rest @ moment @ rest.mT).trace())
    assert loss(mixing, moments) == pytest.approx(expected, rel=1e-10)


def test_whole_heads_are_summed_by_their_weights():
    keys, values = random_heads(0, 3), random_heads(1, 3)
    for weights in ([1 / 3] * 3, [1.0, 0.0, 0.0]):
        read = read_back(whole_heads(torch.tensor(weights, dtype=torch.float64), HEAD_DIM), keys, values)
        for heads, back in zip((keys, values), read, strict=True):
            expected = sum(weight * head for weight, head in zip(weights, heads, strict=True))
            torch.testing.assert_close(back, expected.expand_as(back), **EXACT)
