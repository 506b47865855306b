"""From what a user asks for to the sizes of a latent and its rotary key."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from ...common.errors import UserError
from .rotation import Channels, channels, full_rank

# Rotary numbers to be tried, as shares of those that a head has. Between neighbours, loss changes little.
_SHARES = (1, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4)
# Steps without a fold lose by far the most; who wants them says so.
_TRIED = ("high", "fold")


@dataclass(frozen=True)
class Room:
    """What a source has: `turning` coordinates a head, `kv_size` = G*d, hidden size, and whether some layers have no
    positions, where nothing of a key goes into the rotary part."""

    turning: int
    kv_size: int
    hidden_size: int
    still_layers: bool = False

    def most(self, rope_dim: int) -> int:
        """The rank of a latent that holds all that the rotary key of this size leaves."""
        return full_rank(self.kv_size, 0 if self.still_layers else rope_dim, self.hidden_size)


@dataclass(frozen=True)
class Choice:
    """One way to spend a budget.

    Attributes:
        rope_select: one of `rotation.SELECTS`.
        rope_dim, kv_rank: qk_rope_head_dim and kv_lora_rank.
    """

    rope_select: str
    rope_dim: int
    kv_rank: int

    def channels(self, room: Room) -> Channels:
        return channels(self.rope_select, self.rope_dim // 2, room.turning // 2)


def choices(
    room: Room,
    *,
    kv_rank: int | None,
    rope_dim: int | None,
    kv_elements: int | None,
    kv_ratio: float | None,
    rope_select: str,
) -> list[Choice]:
    """All choices that fit what was asked for: one where everything was.

    Args:
        kv_rank, rope_dim: sizes; both, or one of them or none with a budget.
        kv_elements, kv_ratio: the budget, a token and layer: in numbers, or as a share of what the source caches.
        rope_select: one of `rotation.SELECTS`, or `auto` for those worth trying.

    Raises:
        UserError: too little is said, or too much, or what cannot be.
    """
    budget = _budget(room, kv_rank, rope_dim, kv_elements, kv_ratio)
    if rope_dim is not None and (rope_dim % 2 or not 0 < rope_dim <= room.turning):
        raise UserError(f"a rotary key of {rope_dim} numbers is not possible; give an even number, 2 to {room.turning}")
    if kv_rank is not None and kv_rank < 1:
        raise UserError(f"a latent of rank {kv_rank} holds nothing; give 1 or more")
    if kv_rank is not None and rope_dim is not None:
        dims = [rope_dim]
    elif budget is None:
        raise UserError("say how large the cache may be: --kv-rank and --rope-dim, or --kv-elements, or --kv-ratio")
    elif rope_dim is not None:
        dims = [rope_dim]
    elif kv_rank is not None:
        dims = [min(budget - kv_rank, room.turning) // 2 * 2]
    else:
        dims = sorted({max(2, int(share * room.turning) // 2 * 2) for share in _SHARES}, reverse=True)
        if dims[-1] >= budget:  # none of them leaves room for a latent
            dims = [(budget - 1) // 2 * 2]
    names = _TRIED if rope_select == "auto" else (rope_select,)
    found: dict[tuple[int, Channels], Choice] = {}
    for dim in dims:
        most, rank = room.most(dim), kv_rank
        if rank is None:
            assert budget is not None
            rank = min(budget - dim, most)
        if dim < 2 or rank < 1:
            continue
        if rank > most:
            raise UserError(f"rank {rank} is more than there is beside {dim} rotary numbers; give {most} or less")
        for name in names:
            choice = Choice(name, dim, rank)
            found.setdefault((dim, choice.channels(room)), choice)  # with all frequencies kept, all are the same
    if not found:
        given = f" beside --kv-rank {kv_rank}" if kv_rank else f" beside --rope-dim {rope_dim}" if rope_dim else ""
        raise UserError(f"{budget} cached numbers hold no rotary key and latent{given}; give other sizes")
    return list(found.values())


def _budget(
    room: Room, kv_rank: int | None, rope_dim: int | None, kv_elements: int | None, kv_ratio: float | None
) -> int | None:
    """Cached numbers a token and layer; None where no budget was given."""
    if kv_elements is not None and kv_ratio is not None:
        raise UserError("--kv-elements and --kv-ratio say the same; give one of them")
    if (kv_elements is not None or kv_ratio is not None) and kv_rank is not None and rope_dim is not None:
        raise UserError("--kv-rank and --rope-dim say all; leave the budget out, or one of them")
    if kv_ratio is not None:
        if not isfinite(kv_ratio) or not 0 < kv_ratio <= 1:
            raise UserError(f"a ratio of {kv_ratio:g} is no smaller cache; give more than 0 and at most 1")
        return int(kv_ratio * 2 * room.kv_size)
    if kv_elements is not None and not 0 < kv_elements <= 2 * room.kv_size:
        raise UserError(
            f"{kv_elements} cached numbers are not possible; give 3 to {2 * room.kv_size}, which the source caches"
        )
    return kv_elements
