"""Rotary position embedding (RoFormer, arXiv 2104.09864): pairs of coordinates turn by position times frequency."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.errors import UserError


@dataclass(frozen=True)
class Rope:
    """Which coordinates of a head turn, and how fast.

    The first 2F of a head's d coordinates form F pairs, pair f turning by `frequencies[f]`; the rest stay.

    Attributes:
        frequencies: radians a position. Numbers rather than a tensor, as a module's `.to(torch.bfloat16)` would
            round a tensor, and angles at large positions with it.
        interleaved: pair f is (2f, 2f+1), as in DeepSeek, instead of (f, F+f), as in Llama.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False


def geometric(dim: int, theta: float = 10000.0, *, interleaved: bool = False) -> Rope:
    """The usual series of frequencies, `theta^(-2f/dim)` for f < dim/2, which turns `dim` coordinates.

    Raises:
        UserError: `dim` is odd.
    """
    if dim % 2:
        raise UserError(f"{dim} coordinates do not form pairs; RoPE turns an even number of them")
    return Rope(tuple(theta ** (-2 * f / dim) for f in range(dim // 2)), interleaved)


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Turn heads [B, H, T, d] to their positions, [T] or [B, T]; layout, shape and dtype stay as they are.

    Angles are formed in fp64 whatever the dtype of `x`.

    Raises:
        UserError: a head has fewer coordinates than turn.
    """
    pairs = len(rope.frequencies)
    if x.shape[-1] < 2 * pairs:
        raise UserError(f"{pairs} frequencies turn {2 * pairs} coordinates, but a head has {x.shape[-1]}; drop some")
    angles = positions[..., None].double() * torch.tensor(
        rope.frequencies, dtype=torch.float64, device=positions.device
    )  # [(B,) T, F]
    angles = angles.unsqueeze(-3)  # [(B,) 1, T, F]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turning, still = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if rope.interleaved:
        re, im = turning[..., 0::2], turning[..., 1::2]  # [B, H, T, F]
    else:
        re, im = turning[..., :pairs], turning[..., pairs:]  # [B, H, T, F]
    turned = (re * cos - im * sin, re * sin + im * cos)
    turning = torch.stack(turned, -1).flatten(-2) if rope.interleaved else torch.cat(turned, -1)  # [B, H, T, 2F]
    return torch.cat([turning, still], -1)
