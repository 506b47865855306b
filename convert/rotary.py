"""Which coordinates of a head RoPE turns together.

RoPE reads pairs of coordinates as complex numbers z_f = re + i im and multiplies z_f at position n by
exp(i n w_f), the same for every head. Coordinates that do not turn are free: they carry no position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..common.kvcache import head_dim
from .families import Family


@dataclass(frozen=True)
class Rotary:
    """The d coordinates of a head: `re[f]` and `im[f]` form the complex channel f, `free` ones do not turn."""

    re: tuple[int, ...]
    im: tuple[int, ...]
    free: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        return len(self.re) + len(self.im) + len(self.free)


def turning_of(family: Family, config: Any) -> int:
    """How many coordinates of a head turn, in layers that have positions; `config` as in `rotary_of`."""
    if family.rope == "none":
        return 0
    share = 1.0
    if family.rotary == "part":
        parameters = getattr(config, "rope_parameters", None) or {}
        share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(head_dim(config) * share)


def rotary_of(family: Family, config: Any, layer: int) -> Rotary:
    """How RoPE pairs the coordinates of a head in a layer.

    Args:
        config: a transformers config (not config.json alone: the rotating share has many spellings).
    """
    d, turning = head_dim(config), turning_of(family, config)
    no_rope_layers = getattr(config, "no_rope_layers", None)
    if no_rope_layers and not no_rope_layers[layer]:  # SmolLM3 says 1 for a layer that has RoPE
        turning = 0
    half = turning // 2
    if family.rope == "interleaved":
        re, im = range(0, turning, 2), range(1, turning, 2)
    else:
        re, im = range(half), range(half, turning)
    return Rotary(tuple(re), tuple(im), tuple(range(turning, d)))
