"""In which order windows are drawn: a function of the seed and the number of the draw, and of nothing else.

No state lives in an iterator, so a run is taken up at any draw, and every process knows the whole order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, chain

from ..common.errors import UserError


def check_weights(weights: Sequence[float] | None, texts: int) -> None:
    """Refuse weights that do not fit the texts.

    Raises:
        UserError: there are not as many as texts, or one is not a positive number.
    """
    if weights is None:
        return
    if len(weights) != texts:
        raise UserError(f"{len(weights)} weights do not fit {texts} texts; give one for each, or none")
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"weight {weight} is not possible; give a positive number, or leave the text out")


class Order:
    """The order of the windows of several texts, which are numbered through.

    1. Without weights, an epoch is a permutation of all windows, drawn from (seed, epoch).
    2. With weights, text i has M_i = max(1, round(w_i * N / sum(w))) of an epoch's places, where N is the number of
       all windows. Which text has which place is drawn from (seed, epoch).
    3. On its places, a text walks through permutations of its own, drawn from (seed, text, number), on and on: none of
       its windows comes back before it was seen whole, however epochs fall.

    Args:
        sizes: windows of each text, each at least 1.
        weights: how often each is drawn, by proportion; by default every window as often as any other.
        seed: another one gives another order.

    Raises:
        UserError: the weights do not fit.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None = None, seed: int = 0):
        assert sizes and min(sizes) > 0
        check_weights(weights, len(sizes))
        self.sizes, self.seed = list(sizes), seed
        windows = sum(sizes)
        # With one text there is nothing to weigh.
        self.places = (
            None
            if weights is None or len(sizes) == 1
            else [max(1, round(weight * windows / math.fsum(weights))) for weight in weights]
        )
        self.epoch_size = sum(self.places) if self.places else windows
        self._firsts = [0, *accumulate(sizes)]
        self._kept: tuple[int, list[int]] = (-1, [])

    def draw(self, start: int, count: int) -> list[int]:
        """Window numbers of the draws `start` to `start + count`, which may lie in several epochs."""
        return [self._epoch(draw // self.epoch_size)[draw % self.epoch_size] for draw in range(start, start + count)]

    def _epoch(self, number: int) -> list[int]:
        if self._kept[0] != number:  # draws mostly come one after the other
            self._kept = (number, self._order_of(number))
        return self._kept[1]

    def _order_of(self, epoch: int) -> list[int]:
        chance = random.Random(f"{self.seed}/{epoch}")
        if not self.places:
            return chance.sample(range(self.epoch_size), self.epoch_size)
        texts = list(chain(*([text] * places for text, places in enumerate(self.places))))
        walks = [iter(self._walk(text, epoch * places, places)) for text, places in enumerate(self.places)]
        return [next(walks[text]) for text in chance.sample(texts, len(texts))]

    def _walk(self, text: int, start: int, count: int) -> list[int]:
        """What a text gives to its own draws `start` to `start + count`."""
        size, first = self.sizes[text], self._firsts[text]
        rounds = range(start // size, (start + count - 1) // size + 1)
        walk = list(
            chain(*(random.Random(f"{self.seed}/{text}/{number}").sample(range(size), size) for number in rounds))
        )
        skipped = start - rounds[0] * size
        return [first + window for window in walk[skipped : skipped + count]]
