"""How a model is calibrated and refined; free of torch, so that wrong numbers are told before it is imported."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.errors import UserError, did_you_mean
from ...common.loading import DTYPES
from .text import CalibText


@dataclass(frozen=True)
class Calibration:
    """How a model is calibrated.

    Attributes:
        text: which windows it reads.
        fisher: whether gradients are taken; without them the backward pass is saved, and quality lost.
        offload: hold one decoder layer at a time, and hidden states on the disk.
        batch_size: windows at a time; a matter of speed, not of the result.
        device, dtype: where and in what to run, as in `common.loading.load_model`.
    """

    text: CalibText
    fisher: bool = True
    offload: bool = False
    batch_size: int = 1
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"a calibration batch of {self.batch_size} windows is not possible; give 1 or more")
        if self.dtype not in DTYPES:
            raise UserError(f"unknown dtype {self.dtype!r}{did_you_mean(self.dtype, DTYPES)}")


@dataclass(frozen=True)
class RefineKnobs:
    """How a merged model is refined.

    Attributes:
        windows: of the calibration text.
        passes: over them, in each layer.
        batch_size: windows a step (of each process).
        learning_rate: of Adam, at its highest.
        through_mlp: whether the state after the whole layer is compared with the source's, rather than the one after
            its attention; costs twice as much.
    """

    windows: int
    passes: int = 3
    batch_size: int = 1
    learning_rate: float = 2e-3
    through_mlp: bool = False

    def __post_init__(self) -> None:
        for name in ("windows", "passes"):
            if getattr(self, name) < 1:
                raise UserError(f"{getattr(self, name)} {name} refine nothing; give 1 or more")
