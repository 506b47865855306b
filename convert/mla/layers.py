"""The factors of every layer of a source, made when they are asked for, and the plain form's tensors from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..calibration.statistics import LayerStatistics
from ..families import Sizes
from ..merge.mixing import ridge
from ..projections import projections, read_heads
from ..rotary import rotary_of
from ..source import Source
from .factorise import Factors, Moments, factorise
from .rotation import Channels

if TYPE_CHECKING:
    from ..calibration.store import Statistics


class LayerFactors:
    """What becomes of each layer's attention.

    Args:
        source: the checkpoint to factor.
        read: gives a tensor of the source by its full name, None where there is none.
        channels: to keep, in every layer that has positions.
        rank: of the latent.
        biased: whether the result's projections have biases.
        statistics: of the source; None to factor by weights alone.
        device: where to compute.
    """

    def __init__(
        self,
        source: Source,
        read: Callable[[str], Tensor | None],
        *,
        channels: Channels,
        rank: int,
        biased: bool,
        statistics: Statistics | None = None,
        device: str = "cpu",
    ):
        self.source, self.read, self.channels, self.rank, self.biased = source, read, channels, rank, biased
        self.statistics, self.device = statistics, device
        self.sizes = Sizes(source.config)
        self.places = projections(source.family, self.sizes)
        self._lock = Lock()  # two threads write tensors, often of one layer
        self._factors = lru_cache(2)(self._compute)

    def factors(self, layer: int) -> Factors:
        """One layer's maps, on the CPU."""
        with self._lock:
            return self._factors(layer)

    def _compute(self, layer: int) -> Factors:
        keys, values = (self._heads(layer, term).to(self.device) for term in ("K", "V"))
        seen = self.statistics.layer(layer, self.device) if self.statistics else None
        moments = _moments(keys, values, seen)
        rotary = rotary_of(self.source.family, self.source.config.full, layer)
        made = factorise(keys, values, moments, rotary, self.channels, self.rank, biased=self.biased)
        return Factors(
            **{name: value.cpu() if isinstance(value, Tensor) else value for name, value in vars(made).items()}
        )

    def latent_sizes(self) -> list[float]:
        """For every layer the mean square of the latent's elements, over the tokens of the calibration."""
        sizes = []
        for layer in range(self.sizes["L"]):
            rows = self.factors(layer).latent_in
            sizes.append(float(((rows @ self.inputs(layer)) * rows).sum() / len(rows)))
        return sizes

    def inputs(self, layer: int) -> Tensor:
        """E[[x; 1] [x; 1]^T] of a layer's inputs, [D + 1, D + 1], on the CPU; white ones where nothing is known."""
        if self.statistics is None:
            return torch.eye(self.sizes["D"] + 1, dtype=torch.float64)
        return self.statistics.layer(layer).inputs

    def _heads(self, layer: int, term: str) -> Tensor:
        prefix = f"{self.source.family.layers}{layer}."
        return read_heads(self.places[term], prefix, self.read, self.sizes["d"], torch.float64)

    def tensor(self, layer: int, name: str) -> Tensor:
        """A tensor of the plain form's attention, in fp64, by its name after `self_attn.`."""
        module, _, kind = name.partition(".")
        rows = _ROWS[module](self, layer, self.factors(layer))
        return rows[..., -1] if kind == "bias" else rows[..., :-1] if module in _WITH_BIAS else rows

    def _queries(self, layer: int, factors: Factors) -> Tensor:
        heads = self._heads(layer, "Q")  # [H, d, D + 1]
        back = self._each_head(factors.rotary_out).mT  # [H, 2F, d]
        return torch.cat([heads, back @ heads], dim=1).flatten(0, 1)  # [H * (d + 2F), D + 1]

    def _entries(self, layer: int, factors: Factors) -> Tensor:
        return torch.cat([factors.latent_in, factors.rotary_in])  # [r + 2F, D + 1]

    def _read_backs(self, layer: int, factors: Factors) -> Tensor:
        both = torch.cat([factors.key_out, factors.value_out], dim=1)  # [G, 2d, r]
        return self._each_head(both).flatten(0, 1)  # [H * 2d, r]

    def _outputs(self, layer: int, factors: Factors) -> Tensor:
        place, prefix = self.places["O"], f"{self.source.family.layers}{layer}.{self.places['O'].module}."
        weight = self.read(f"{prefix}weight")
        assert weight is not None
        weight = weight.double().movedim(place.dim, 1)  # [D, H * d]
        shift = self._each_head(factors.value_shift).flatten()  # [H * d]
        bias = self.read(f"{prefix}bias")
        constant = weight @ shift + (0 if bias is None else bias.double())
        return torch.cat([weight, constant[:, None]], dim=1)  # [D, H * d + 1]

    def _each_head(self, of_group: Tensor) -> Tensor:
        """What belongs to KV heads, [G, ...], for each query head, [H, ...]."""
        return of_group.repeat_interleave(self.sizes["H"] // self.sizes["G"], dim=0)


_ROWS: dict[str, Callable[[LayerFactors, int, Factors], Tensor]] = {
    "q_proj": LayerFactors._queries,
    "kv_a_proj_with_mqa": LayerFactors._entries,
    "kv_b_proj": LayerFactors._read_backs,
    "o_proj": LayerFactors._outputs,
}
_WITH_BIAS = frozenset(_ROWS) - {"kv_b_proj"}


def _moments(keys: Tensor, values: Tensor, seen: LayerStatistics | None) -> Moments:
    """What is known of a layer; what calibration saw gets a ridge (`merge.mixing.RIDGE`), which minds no rotation.

    Without gradients, keys count as much as values do by their mean squares.
    """
    inputs = torch.eye(keys.shape[-1]).to(keys) if seen is None else seen.inputs + ridge(seen.inputs)
    if seen is not None and seen.key_fisher is not None:
        assert seen.value_fisher is not None and seen.still_fisher is not None and seen.still_cross is not None
        on_top = ridge(seen.key_fisher)
        turning = (seen.key_fisher + on_top, seen.still_fisher + on_top, seen.still_cross + on_top)
        return Moments(inputs, *turning, seen.value_fisher + ridge(seen.value_fisher))
    key, value = (
        torch.eye(len(rows)).to(rows) / ((rows @ inputs) * rows).sum().clamp_min(torch.finfo(rows.dtype).tiny)
        for rows in (keys.flatten(0, 1), values.flatten(0, 1))
    )
    return Moments(inputs, key, key, None, value)
