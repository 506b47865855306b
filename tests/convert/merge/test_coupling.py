from __future__ import annotations

import pytest
import torch

from kvfold.convert.merge import coupling
from kvfold.convert.merge.coupling import couple
from kvfold.convert.merge.mixing import complex_blocks, key_maps, loss, residual, uncoupled
from kvfold.convert.merge.svd import _channels, svd

from .heads import ROTARIES, randn, random_moments

TURNING = [name for name, rotary in ROTARIES.items() if rotary.re]
turning = pytest.mark.parametrize("rotary", [ROTARIES[name] for name in TURNING], ids=TURNING)


@turning
def test_a_step_solves_for_the_factors_of_one_side(rotary):
    moments = random_moments(0, 3)
    into, out = (torch.complex(*randn(seed, 2, len(rotary.re), 3)) for seed in (1, 2))
    n = len(rotary.free)
    free = randn(3, 2, 3, n, n)

    def lost(out):
        maps = key_maps(into, free[0], rotary), key_maps(out, free[1], rotary)
        return residual(*maps, moments.key, moments.key_fisher)

    maps = key_maps(into, free[0], rotary), key_maps(out, free[1], rotary)
    best = out + coupling._step(*maps, moments.key, moments.key_fisher, rotary)
    least = lost(best)
    assert least < lost(out)
    for seed in range(20):
        change = torch.complex(*randn(10 + seed, 2, len(rotary.re), 3))
        for size in (1e-3, 1.0):
            # The loss is quadratic: at its least it grows alike on both sides.
            ahead, behind = lost(best + size * change) - least, lost(best - size * change) - least
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
