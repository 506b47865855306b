"""Which frequencies keep their rotation, and which others each of them stands for.

A head has P rotary pairs, the first of the highest frequency. F of them are kept, one rotary channel each. A stock
DeepSeek checkpoint can only say a geometric series of angles that starts with the first, so all choices are such.
"""

from __future__ import annotations

from ...common.errors import UserError, did_you_mean

Channels = tuple[tuple[int, ...], ...]
"""The source's frequencies that each kept channel stands for; it turns by the angle of the first."""

SELECTS = ("high", "stride", "fold")
# How many frequencies the last channel stands for where it folds. Those after it turn more slowly still: on
# SmolLM2-135M at a quarter to a third of the cache, 4 lose a tenth less than 1 or 2.
TAIL = 4


def channels(select: str, kept: int, pairs: int) -> Channels:
    """The channels of a choice.

    Args:
        select: `high` keeps the first frequencies, and folds those next to them into the last one; `fold` takes even
            steps through all of them, and folds into each those up to the next; `stride` takes steps and folds nothing.
        kept, pairs: F and P.

    Raises:
        UserError: there is no such choice.
    """
    if select not in SELECTS:
        raise UserError(f"unknown rotary selection {select!r}{did_you_mean(select, (*SELECTS, 'auto'))}")
    if not 0 < kept <= pairs:
        raise UserError(f"{2 * kept} rotary numbers are not possible: a head has {2 * pairs}; give 2 to {2 * pairs}")
    step = 1 if select == "high" else pairs // kept
    starts = range(0, kept * step, step)
    ends = [start + (1 if select == "stride" else step) for start in starts]
    if select != "stride":
        ends[-1] = min(max(ends[-1], starts[-1] + TAIL), pairs)
    return tuple(tuple(range(start, end)) for start, end in zip(starts, ends, strict=True))


def full_rank(kv_size: int, rotary: int, hidden_size: int) -> int:
    """The rank at which a latent holds all that there is: of K-wide keys and values with `rotary` = 2F numbers kept."""
    return min(2 * kv_size - rotary, hidden_size)
