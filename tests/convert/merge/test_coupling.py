from __future__ import annotations

import pytest
import torch

from kvfold.convert.merge import coupling
from kvfold.convert.merge.coupling import couple
from kvfold.convert.merge.mixing import complex_blocks, key_maps, layer_moments, loss, residual, uncoupled
from kvfold.convert.merge.svd import _channels, svd

from .heads import HEAD_DIM, ROTARIES, randn, random_heads, random_inputs, random_moments

TURNING = [name for name, rotary in ROTARIES.items() if rotary.re]
turning = pytest.mark.parametrize("rotary", [ROTARIES[name] for name in TURNING], ids=TURNING)


@turning
@pytest.mark.parametrize("side", ["in", "out"])
def test_a_step_solves_for_the_factors_of_one_side(rotary, side, monkeypatch):
    monkeypatch.setattr(coupling, "DOUBT", 0.0)
    moments = random_moments(0, 3)
    n = len(rotary.free)
    free = randn(3, 2, 3, n, n)

    def lost(into, out):
        maps = key_maps(into, free[0], rotary), key_maps(out, free[1], rotary)
        return residual(*maps, moments.key, moments.key_fisher)

    start = [torch.complex(*randn(seed, 2, len(rotary.re), 3)) for seed in (1, 2)]
    best = couple(*start, free, moments.key, moments.key_fisher, rotary, 1)  # solves for out, then for in
    if side == "out":
        maps = key_maps(start[0], free[0], rotary), key_maps(start[1], free[1], rotary)
        best = (start[0], start[1] + coupling._step(*maps, moments.key, moments.key_fisher, rotary))
    least = lost(*best)
    assert least < lost(*start)
    for seed in range(20):
        change = torch.complex(*randn(10 + seed, 2, len(rotary.re), 3))
        changes = (change, 0) if side == "in" else (0, change)
        for size in (1e-3, 1.0):
            # The loss is quadratic: at its least it grows alike on both sides.
            ahead, behind = (
                lost(*(one + sign * size * by for one, by in zip(best, changes, strict=True))) - least
                for sign in (1, -1)
            )
            assert ahead > 0
            assert ahead == pytest.approx(behind, rel=1e-4)


@turning
def test_couplings_are_worth_minding(rotary):
    moments = random_moments(0, 3)
    alone, together = (svd(moments, 3, rotary, rounds) for rounds in (0, 20))
    assert loss(together, moments) < 0.99 * loss(alone, moments)
    torch.testing.assert_close(together.value_in, alone.value_in, rtol=0, atol=0)


@turning
def test_nothing_is_gained_where_nothing_is_coupled(rotary):
    moments = random_moments(0, 3)
    fisher = uncoupled(moments.key_fisher, 3, rotary)
    into, out = _channels(complex_blocks(moments.key, 3, rotary), complex_blocks(fisher, 3, rotary))
    n = len(rotary.free)
    free = (torch.zeros(3, n, n).double(),) * 2
    after = couple(into, out, free, moments.key, fisher, rotary)
    torch.testing.assert_close(after[1][:, :, None] * after[0][:, None], out[:, :, None] * into[:, None])


@pytest.mark.parametrize("seed", [2, 20, 38, 53])
def test_few_tokens_summed_in_fp32_lose_less_with_every_round(seed, monkeypatch):
    monkeypatch.setattr(coupling, "DOUBT", 0.0)
    heads, rotary = 14, ROTARIES["half"]
    gradients = (randn(seed, 2 + seed % 4, heads * HEAD_DIM) * torch.logspace(0, -3, heads * HEAD_DIM)).float()
    fisher = (gradients.mT @ gradients).double()
    inputs = random_inputs(seed + 1, tokens=3).float().double()
    moments = layer_moments(random_heads(seed, heads), random_heads(seed + 1, heads), inputs, fisher, fisher)
    lost = [loss(svd(moments, heads, rotary, rounds), moments) for rounds in range(8)]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] > 0
