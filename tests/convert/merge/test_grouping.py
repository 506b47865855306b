from __future__ import annotations

import itertools

import pytest
import torch

from kvfold.convert.merge.aligned import aligned
from kvfold.convert.merge.apply import contiguous
from kvfold.convert.merge.grouping import pair_losses, similar
from kvfold.convert.merge.mixing import key_maps, loss
from kvfold.convert.merge.svd import svd

from .heads import HEAD_DIM, ROTARIES, randn, random_heads, random_layer


def inside(pair_loss, groups):
    return sum(float(pair_loss[i, j]) for group in groups for i, j in itertools.combinations(group, 2))


def random_losses(seed, heads):
    points = randn(seed, heads, 5)
    return torch.cdist(points, points).square()


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 1), (8, 2), (12, 3), (64, 8), (64, 32)])
def test_groups_are_equal_and_hold_every_head_once(heads, groups):
    result = similar(random_losses(0, heads), groups)
    assert sorted(head for group in result for head in group) == list(range(heads))
    assert {len(group) for group in result} == {heads // groups}
    assert list(result) == sorted(tuple(sorted(group)) for group in result)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("heads", "groups"), [(12, 3), (16, 8), (32, 8)])
def test_no_swap_helps_and_neighbours_are_not_better(seed, heads, groups):
    pair_loss = random_losses(seed, heads)
    result = similar(pair_loss, groups)
    least = inside(pair_loss, result)
    assert least <= inside(pair_loss, contiguous(heads, groups))
    home = {head: number for number, group in enumerate(result) for head in group}
    for i, j in itertools.combinations(range(heads), 2):
        swap = {i: j, j: i}
        swapped = [[swap.get(head, head) for head in group] for group in result]
        assert home[i] == home[j] or inside(pair_loss, swapped) >= least * (1 - 1e-9)


def best_pairs(pair_loss):
    """The best of all partitions into pairs."""

    def partitions(heads):
        if not heads:
            yield []
        for other in heads[1:]:
            left = [head for head in heads[1:] if head != other]
            yield from ([(heads[0], other), *more] for more in partitions(left))

    return min(partitions(list(range(len(pair_loss)))), key=lambda groups: inside(pair_loss, groups))


def test_it_mostly_finds_the_best_of_few_partitions():
    cases = [random_losses(seed, 8) for seed in range(100)]
    assert sum(list(similar(pair_loss, 4)) == best_pairs(pair_loss) for pair_loss in cases) > 90


@pytest.mark.parametrize("seed", range(30))
def test_neighbours_that_are_best_stay(seed):
    pair_loss = random_losses(seed, 8)
    order = [head for group in best_pairs(pair_loss) for head in group]
    assert similar(pair_loss[order][:, order], 4) == contiguous(8, 4)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_heads_that_lose_nothing_together_come_together(groups):
    owner = torch.randperm(16, generator=torch.Generator().manual_seed(groups)) % groups
    pair_loss = (owner[:, None] != owner).double() * (1 + randn(0, 1).abs())
    for group in similar(pair_loss, groups):
        assert len({int(owner[head]) for head in group}) == 1


def test_without_a_difference_heads_stay_where_they_are():
    assert similar(torch.zeros(6, 6), 3) == contiguous(6, 3)
    assert similar(torch.ones(6, 6), 2) == contiguous(6, 2)


@pytest.mark.parametrize("mix", [svd, aligned])
def test_pair_losses_are_what_each_pair_loses(mix):
    rotary = ROTARIES["part"]
    turn = key_maps(torch.tensor([[1j], [-1]], dtype=torch.complex128), torch.eye(4).double()[None], rotary)[0]
    keys, values = random_heads(0, 4), random_heads(1, 4)
    keys[3], values[3] = turn @ keys[1], values[1]
    layer = random_layer(keys, values)
    losses = pair_losses(mix, layer, rotary)
    assert losses[1, 3] < 1e-9 * losses[0, 1]
    torch.testing.assert_close(losses, losses.mT, rtol=0, atol=0)
    assert losses.diagonal().count_nonzero() == 0
    rows = torch.cat([torch.arange(HEAD_DIM), 2 * HEAD_DIM + torch.arange(HEAD_DIM)])
    pair = type(layer)(*(moment[rows[:, None], rows] for moment in vars(layer).values()))
    assert float(losses[0, 2]) == pytest.approx(loss(mix(pair, 2, rotary), pair))
    assert similar(losses, 2)[1] == (1, 3)
