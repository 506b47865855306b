"""Rotary embedding: complex multiplication, and transformers' own functions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvfold.attention.rope import Rope, geometric, rotate
from kvfold.common.errors import UserError

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def pairs(x, rope):
    """The turning coordinates as complex numbers, [..., F]."""
    count = len(rope.frequencies)
    turning = x[..., : 2 * count]
    re, im = (turning[..., 0::2], turning[..., 1::2]) if rope.interleaved else turning.tensor_split(2, -1)
    return torch.complex(re, im)


@settings(max_examples=30, deadline=None)
@given(
    frequencies=st.lists(st.floats(0, 2), max_size=3),
    still=st.integers(0, 3),
    interleaved=st.booleans(),
    per_sequence=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pairs_turn_by_position_times_frequency_and_the_rest_stays(frequencies, still, interleaved, per_sequence, seed):
    torch.manual_seed(seed)
    rope = Rope(tuple(frequencies), interleaved)
    x = torch.randn(2, 3, 4, 2 * len(frequencies) + still, dtype=torch.float64)
    positions = torch.randint(0, 5000, (2, 4) if per_sequence else (4,))
    got = rotate(x, positions, rope)
    angles = positions.expand(2, 4)[:, None, :, None] * torch.tensor(frequencies, dtype=torch.float64)
    torch.testing.assert_close(pairs(got, rope), pairs(x, rope) * torch.exp(1j * angles), **EXACT)
    torch.testing.assert_close(got[..., 2 * len(frequencies) :], x[..., 2 * len(frequencies) :], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("interleaved", "stock"), [(False, apply_rotary_pos_emb), (True, apply_rotary_pos_emb_interleave)]
)
def test_inner_products_equal_transformers(interleaved, stock):
    """transformers sorts interleaved pairs into halves as it turns them, which inner products do not see."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 3, 50, 8, dtype=torch.float64)
    positions = torch.arange(150, 200)
    rope = geometric(8, interleaved=interleaved)
    angles = positions[:, None] * torch.tensor(rope.frequencies, dtype=torch.float64)
    angles = torch.cat([angles, angles], -1)[None]
    theirs = stock(q, k, angles.cos(), angles.sin())
    ours = rotate(q, positions, rope), rotate(k, positions, rope)
    torch.testing.assert_close(ours[0] @ ours[1].mT, theirs[0] @ theirs[1].mT, **EXACT)


def test_geometric_series():
    torch.testing.assert_close(torch.tensor(geometric(8, 16.0).frequencies), torch.tensor([1, 0.5, 0.25, 0.125]))


def test_angles_survive_low_precision():
    """In bf16 position 100001 would be 99840."""
    x = torch.tensor([1.0, 0.0], dtype=torch.bfloat16).view(1, 1, 1, 2)
    turned = rotate(x, torch.tensor([100001]), Rope((1.0,)))
    exact = rotate(x.double(), torch.tensor([100001]), Rope((1.0,)))
    torch.testing.assert_close(turned.double(), exact, rtol=1e-2, atol=1e-2)


def test_refusals():
    with pytest.raises(UserError, match="7 coordinates do not form pairs"):
        geometric(7)
    with pytest.raises(UserError, match="4 frequencies turn 8 coordinates, but a head has 6"):
        rotate(torch.zeros(1, 1, 1, 6), torch.arange(1), geometric(8))
