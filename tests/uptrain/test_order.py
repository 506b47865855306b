"""The order of the windows: fair, a function of seed and draw, and the same everywhere."""

import math
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from kvfold.common.errors import UserError
from kvfold.uptrain.order import Order

CASES = [([7], None), ([5, 8], None), ([1, 2, 9], None), ([7], [3.0]), ([5, 8], [1, 3]), ([1, 2, 9], [0.5, 0.2, 0.3]),
         ([40, 3], [0.1, 0.9]), ([10, 10, 10], [1e-9, 1, 1])]  # fmt: skip


def split(drawn, sizes):
    """The draws of each text, in their order, numbered within the text."""
    first, parts = 0, []
    for size in sizes:
        parts.append([window - first for window in drawn if first <= window < first + size])
        first += size
    return parts


@pytest.mark.parametrize(("sizes", "weights"), CASES)
def test_no_window_is_lost_or_repeated_within_a_texts_epoch(sizes, weights):
    order = Order(sizes, weights, seed=3)
    drawn = order.draw(0, 20 * order.epoch_size)
    assert sum(map(len, split(drawn, sizes))) == len(drawn)
    for size, part in zip(sizes, split(drawn, sizes), strict=True):
        epochs = [part[start : start + size] for start in range(0, len(part) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert size < 5 or all(left != right for left, right in pairwise(epochs))


@pytest.mark.parametrize("sizes", [[7], [5, 8], [1, 2, 9]])
def test_without_weights_every_epoch_has_every_window_once(sizes):
    order = Order(sizes, seed=3)
    total = sum(sizes)
    assert order.epoch_size == total
    for epoch in range(3):
        assert sorted(order.draw(epoch * total, total)) == list(range(total))
    assert order.draw(0, total) != order.draw(total, total)


@pytest.mark.parametrize(("sizes", "weights"), CASES)
def test_weights_are_shares_of_every_epoch(sizes, weights):
    order = Order(sizes, weights)
    weights = weights or sizes
    for epoch in range(3):
        parts = split(order.draw(epoch * order.epoch_size, order.epoch_size), sizes)
        for weight, part in zip(weights, parts, strict=True):
            assert len(part) == max(1, round(weight * sum(sizes) / math.fsum(weights)))


def test_texts_are_mixed_within_an_epoch():
    kinds = [window < 500 for window in Order([500, 500], [1, 1]).draw(0, 1000)]
    assert 400 < sum(left != right for left, right in pairwise(kinds)) < 600


@pytest.mark.parametrize(("sizes", "weights"), CASES)
@pytest.mark.parametrize("seed", [0, 5])
def test_any_draw_is_reached_at_once(sizes, weights, seed):
    order = Order(sizes, weights, seed)
    whole = order.draw(0, 100)
    assert [Order(sizes, weights, seed).draw(start, 1)[0] for start in range(100)] == whole
    for start in random.Random(0).sample(range(100), 20):  # back and forth, over the kept epoch
        assert order.draw(start, 7)[: 100 - start] == whole[start : start + 7]
    assert order.draw(10, 0) == []


def test_another_seed_is_another_order():
    assert Order([30, 20], [1, 2], 0).draw(0, 50) != Order([30, 20], [1, 2], 1).draw(0, 50)


def test_the_order_does_not_change_between_releases_or_processes():
    """Recipes name a seed; the windows behind it are part of what they promise."""
    assert Order([6]).draw(0, 6) == Order([2, 4]).draw(0, 6) == Order([6], [2.0]).draw(0, 6) == [2, 3, 4, 1, 5, 0]
    script = "from kvfold.uptrain.order import Order; print(Order([5, 3], [1, 2], 4).draw(3, 20))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONHASHSEED": seed}
        ).stdout.strip()
        for seed in "12"
    }
    assert printed == {str(Order([5, 3], [1, 2], 4).draw(3, 20))}


def test_epochs_of_a_small_text_pass_within_one_of_all():
    order = Order([2, 100], [0.5, 0.5])
    counts = Counter(split(order.draw(0, order.epoch_size), [2, 100])[0])
    assert set(counts.values()) <= {25, 26} and sum(counts.values()) == 51


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ([1], "1 weights do not fit 2 texts; give one for each"),
        ([1, 2, 3], "3 weights do not fit 2 texts"),
        ([1, 0], "weight 0 is not possible; give a positive number"),
        ([-1, 1], "weight -1 is not possible"),
        ([1, math.nan], "weight nan"),
        ([1, math.inf], "weight inf"),
    ],
)
def test_weights_that_cannot_be(weights, match):
    with pytest.raises(UserError, match=match) as caught:
        Order([3, 4], weights)
    assert "\n" not in str(caught.value)
