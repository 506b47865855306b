"""Random layers in fp64 to merge, and what a mixture makes of them. G heads of d = 8 coordinates, D inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvfold.convert.merge.mixing import GroupMoments, Mixing, layer_moments, whole_heads
from kvfold.convert.rotary import Rotary

D, HEAD_DIM = 40, 8
EXACT = {"rtol": 0, "atol": 1e-9}
ROTARIES = {
    "half": Rotary((0, 1, 2, 3), (4, 5, 6, 7), ()),
    "interleaved": Rotary((0, 2, 4, 6), (1, 3, 5, 7), ()),
    "part": Rotary((0, 1), (2, 3), (4, 5, 6, 7)),
    "none": Rotary((), (), tuple(range(8))),
}
rotaries = pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
MEAN = whole_heads(torch.full((3,), 1 / 3, dtype=torch.float64), HEAD_DIM)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_heads(seed: int, heads: int) -> Tensor:
    """Projection rows and biases [G, d, D + 1]."""
    return randn(seed, heads, HEAD_DIM, D + 1)


def random_moment(seed: int, size: int, tokens: int = 300) -> Tensor:
    """The second moment of some tokens whose coordinates differ in size and are correlated."""
    tokens = randn(seed, tokens, size) @ (randn(seed + 1, size, size) * torch.logspace(0, -1, size).double())
    return tokens.mT @ tokens / len(tokens)


def random_inputs(seed: int, tokens: int = 300, dead: int = 0) -> Tensor:
    """The second moment of [x; 1], of which the first coordinates may be dead."""
    x = torch.cat([randn(seed, tokens, D) + 0.5, torch.ones(tokens, 1, dtype=torch.float64)], dim=1)
    x[:, :dead] = 0
    return x.mT @ x / tokens


def random_layer(keys: Tensor, values: Tensor, seed: int = 0) -> GroupMoments:
    size = keys[..., 0].numel()
    fishers = (random_moment(seed, size), random_moment(seed + 10, size))
    return layer_moments(keys, values, random_inputs(seed + 20), *fishers)


def random_moments(seed: int, heads: int) -> GroupMoments:
    """The moments of heads that have nothing in common but what every two random heads have."""
    return random_layer(random_heads(seed, heads), random_heads(seed + 1, heads), seed + 2)


def read_back(mixing: Mixing, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What the heads [g, d, ...] look like once they have gone through one."""
    return mixing.key_out @ (mixing.key_in @ keys).sum(0), mixing.value_out @ (mixing.value_in @ values).sum(0)


def composed(mixing: Mixing) -> tuple[Tensor, Tensor]:
    """`out[i] in[j]` of keys and of values, [g, g, d, d]: what does not depend on the gauge."""
    return mixing.key_out[:, None] @ mixing.key_in, mixing.value_out[:, None] @ mixing.value_in


def rope(rotary: Rotary, position: int) -> Tensor:
    """The matrix [d, d] by which RoPE turns a head at a position."""
    matrix = torch.eye(rotary.head_dim, dtype=torch.float64)
    for f, (re, im) in enumerate(zip(rotary.re, rotary.im, strict=True)):
        angle = position * 10000 ** (-f / len(rotary.re))
        cos, sin = math.cos(angle), math.sin(angle)
        matrix[re, re], matrix[re, im], matrix[im, re], matrix[im, im] = cos, -sin, sin, cos
    return matrix
