"""The merging methods by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...common.errors import UserError, did_you_mean
from . import whole_heads

if TYPE_CHECKING:
    from ..rotary import Rotary
    from .mixing import GroupMoments, Mixing

Mix = Callable[["GroupMoments", int, "Rotary"], "Mixing"]
"""The maps of a group, from its second moments, its number of heads and the pairs that RoPE turns."""


@dataclass(frozen=True)
class Method:
    """One way to make one KV head of a group's.

    Attributes:
        fold: for a method on whole heads, its arithmetic on stored heads.
        mix: gives its maps; None where there are none, as heads are drawn afresh. Imported when it is called.
        compare: a quicker form of `mix`, good enough to tell which heads lose least together; `mix` itself if None.
    """

    fold: whole_heads.Fold | None
    mix: Callable[[], Mix] | None
    compare: Callable[[], Mix] | None = None

    @property
    def mixes_channels(self) -> bool:
        """Whether it needs statistics, and changes queries and output projection too."""
        return self.fold is None


def _svd() -> Mix:
    from .svd import svd

    return svd


def _svd_uncoupled() -> Mix:
    from .svd import svd

    return partial(svd, rounds=0)


def _aligned() -> Mix:
    from .aligned import aligned

    return aligned


def _weights(*, only_first: bool) -> Mix:
    import torch

    from .mixing import whole_heads as mixing

    def mix(moments: GroupMoments, heads: int, rotary: Rotary) -> Mixing:
        weights = torch.full((heads,), 1 / heads, dtype=torch.float64, device=moments.key.device)
        if only_first:
            weights = torch.eye(heads, dtype=torch.float64, device=moments.key.device)[0]
        return mixing(weights, rotary.head_dim)

    return mix


METHODS: dict[str, Method] = {
    "svd": Method(None, _svd, compare=_svd_uncoupled),
    "aligned": Method(None, _aligned),
    "mean": Method(whole_heads.mean, lambda: _weights(only_first=False)),
    "first": Method(whole_heads.first, lambda: _weights(only_first=True)),
    "random": Method(whole_heads.random, None),
}


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        UserError: there is none.
    """
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}{did_you_mean(name, METHODS)}")
    return METHODS[name]
