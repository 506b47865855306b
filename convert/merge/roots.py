"""The square root of a second moment and its inverse, made of the same eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.errors import UserError


@dataclass(frozen=True)
class Root:
    """`root` = M^{1/2} and `inverse` = M^{-1/2}, each [..., n, n]; `root @ inverse` is the identity.

    `effective_rank` [...] counts the eigenvalues that the data gave, before the floor.
    """

    root: Tensor
    inverse: Tensor
    effective_rank: Tensor


def psd_root(matrix: Tensor, floor: float = 1e-7) -> Root:
    """The root of symmetric or Hermitian positive semi-definite matrices [..., n, n].

    By eigenvalues, not Cholesky: few calibration tokens leave moments without full rank. Eigenvalues below `floor`
    times the largest of their matrix are raised to it; a matrix of zeros says nothing, and counts as the identity.

    Raises:
        UserError: an element is not finite.
    """
    check_finite(matrix)
    if not matrix.numel():
        return Root(matrix, matrix, matrix.new_zeros(matrix.shape[:-2], dtype=torch.long))
    values, vectors = torch.linalg.eigh(matrix)
    largest = values[..., -1:]
    bound = floor * largest
    effective_rank = ((values > bound) & (largest > 0)).sum(-1)
    values = torch.where(largest > 0, values.maximum(bound), 1.0)
    root, inverse = ((vectors * power.unsqueeze(-2)) @ vectors.mH for power in (values.sqrt(), values.rsqrt()))
    return Root(root, inverse, effective_rank)


def check_finite(matrix: Tensor) -> None:
    """Raises UserError if an element of a second moment, or of the weights behind it, is not finite."""
    if not matrix.isfinite().all():
        raise UserError(
            "a second moment of keys or values holds a NaN or an infinity; look for one in the weights or in the "
            "calibration statistics, and calibrate again in a wider dtype"
        )
