"""Hidden states of many sequences: in memory, or in a file that is mapped when they are many."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ...common.atomic import check_room

LIMIT = 1 << 30  # bytes that one buffer may take of the memory


class HiddenStates:
    """A buffer with one entry [B, T, D] for every batch of ids [B, T].

    Args:
        shapes: [B, T] of every batch.
        size: D.
        limit: bytes above which the buffer is a temporary file (TMPDIR says where), not memory.

    Raises:
        EnvironmentFailure: there is no room for the file.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], size: int, dtype: torch.dtype, limit: int = LIMIT):
        self.shapes = [(*shape, size) for shape in shapes]
        self.starts = [0]
        for shape in self.shapes:
            self.starts.append(self.starts[-1] + prod(shape))
        count = self.starts[-1]
        fits = count * dtype.itemsize <= limit
        self.flat = torch.empty(count, dtype=dtype) if fits else _on_disk(count, dtype)

    def __getitem__(self, batch: int) -> Tensor:
        return self.flat[self.starts[batch] : self.starts[batch + 1]].view(self.shapes[batch])

    def __setitem__(self, batch: int, state: Tensor) -> None:
        self[batch].copy_(state)


def _on_disk(count: int, dtype: torch.dtype) -> Tensor:
    """A tensor [count] mapped from a file, which lives as long as it.

    The file loses its name at once, so that nothing is left of it however the process ends.

    Raises:
        EnvironmentFailure: there is no room for it.
    """
    nbytes = count * dtype.itemsize
    with tempfile.TemporaryDirectory(prefix="kvfold-hidden-") as folder:
        path = Path(folder) / "states"
        check_room(path.parent, nbytes)
        with path.open("xb") as file:
            if hasattr(os, "posix_fallocate"):  # a map of a hole kills the process once the disk is full
                os.posix_fallocate(file.fileno(), 0, nbytes)
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype)
