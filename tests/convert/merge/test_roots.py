from __future__ import annotations

import pytest
import torch

from kvfold.common.errors import UserError
from kvfold.convert.merge.roots import psd_root

from .heads import random_moment

TIGHT = {"rtol": 0, "atol": 1e-10}


def hermitian(seed: int, size: int) -> torch.Tensor:
    halves = random_moment(seed, 2 * size)
    factor = torch.complex(halves[:size], halves[size:])  # [n, 2n]
    return factor @ factor.mH


@pytest.mark.parametrize("matrix", [random_moment(0, 6), hermitian(0, 6)], ids=["real", "complex"])
def test_the_root_squares_to_the_matrix_and_has_an_inverse(matrix):
    root = psd_root(matrix)
    torch.testing.assert_close(root.root @ root.root, matrix, **TIGHT)
    torch.testing.assert_close(root.root @ root.inverse, torch.eye(6).to(matrix), **TIGHT)
    torch.testing.assert_close(root.root, root.root.mH, **TIGHT)
    assert root.effective_rank == 6


def test_each_matrix_of_a_batch_has_its_own_floor():
    batch = torch.stack([random_moment(seed, 4) * scale for seed, scale in enumerate((1.0, 1e-20, 1e20))])
    root = psd_root(batch)
    assert root.effective_rank.tolist() == [4, 4, 4]
    for matrix, square in zip(batch, root.root @ root.root, strict=True):
        torch.testing.assert_close(square, matrix, rtol=0, atol=1e-12 * float(matrix.max()))


def test_directions_without_data_are_raised_to_the_floor():
    vector = torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)
    root = psd_root(torch.outer(vector, vector), floor=1e-6)
    assert root.effective_rank == 1
    expected = torch.tensor([5e-3, 5e-3, 5.0], dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.eigvalsh(root.root), expected, **TIGHT)
    torch.testing.assert_close(root.root @ root.inverse, torch.eye(3).double(), **TIGHT)


def test_a_matrix_of_zeros_counts_as_the_identity():
    root = psd_root(torch.stack([torch.zeros(3, 3).double(), random_moment(0, 3)]))
    torch.testing.assert_close(root.root[0], torch.eye(3).double())
    torch.testing.assert_close(root.inverse[0], torch.eye(3).double())
    assert root.effective_rank.tolist() == [0, 3]


@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 3)])
def test_nothing_has_a_root(shape):
    assert psd_root(torch.zeros(shape).double()).root.shape == shape


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_the_users_to_find(bad):
    matrix = random_moment(0, 3)
    matrix[0, 1] = bad
    with pytest.raises(UserError, match="NaN or an infinity"):
        psd_root(matrix)
