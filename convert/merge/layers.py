"""The merge of every layer of a source: made when it is first asked for, and kept while its tensors pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from ...common.errors import UserError, did_you_mean
from ..families import Sizes
from ..rotary import Rotary, rotary_of
from ..source import Source
from .apply import KV_TERMS, QUERY_TERMS, Groups, Merge, Mixed, contiguous
from .methods import Method
from .whole_heads import Knobs, WholeHeads

if TYPE_CHECKING:
    from torch import Tensor

    from ..calibration.store import Statistics
    from .mixing import GroupMoments

GROUPINGS = ("contiguous", "similar")


class LayerMerges:
    """What becomes of each layer's heads under a method.

    Args:
        read: gives a tensor of the source by its full name, None where there is none.
        kv_heads: of the result.
        grouping: one of `GROUPINGS`.
        knobs: for methods on whole heads.
        statistics: of the source; None for a merge by weights alone.
        device: where to compute.

    Raises:
        UserError: the grouping is unknown, or the method cannot tell which heads are similar.
    """

    def __init__(
        self,
        source: Source,
        method: Method,
        read: Callable[[str], Tensor | None],
        *,
        kv_heads: int,
        grouping: str = "contiguous",
        knobs: Knobs,
        statistics: Statistics | None = None,
        device: str = "cpu",
    ):
        if grouping not in GROUPINGS:
            raise UserError(f"unknown grouping {grouping!r}{did_you_mean(grouping, GROUPINGS)}")
        if grouping == "similar" and method.mix is None:
            raise UserError("fresh heads are similar to none; leave --grouping similar out")
        self.source, self.method, self.read, self.knobs = source, method, read, knobs
        self.statistics, self.device = statistics, device
        self.sizes = Sizes(source.config)
        self.neighbours = contiguous(self.sizes["G"], kv_heads)
        self.similar = grouping == "similar"
        self._lock = Lock()  # two threads write tensors, often of one layer
        self._moments = lru_cache(1)(self._compute_moments)
        self._groups = lru_cache(None)(self._compute_groups)
        self._merge = lru_cache(4)(self._compute_merge)

    @property
    def terms(self) -> frozenset[str]:
        """The terms (see `families`) of the axes that change in any layer."""
        if len(self.neighbours) == self.sizes["G"]:
            return frozenset()
        if self.similar:
            return KV_TERMS | QUERY_TERMS
        return WholeHeads.terms if self.method.fold else Mixed.terms

    def groups(self, layer: int) -> Groups:
        """The KV heads behind each KV head of the result."""
        with self._lock:
            return self._groups(layer)

    def merge(self, layer: int) -> Merge:
        """What becomes of a layer's heads."""
        with self._lock:
            return self._merge(layer)

    def _compute_groups(self, layer: int) -> Groups:
        if not self.similar:
            return self.neighbours
        from .grouping import pair_losses, similar

        merge = self.method.compare or self.method.mix
        assert merge is not None
        losses = pair_losses(merge(), self._moments(layer), self._rotary(layer))
        return similar(losses, len(self.neighbours))

    def _compute_merge(self, layer: int) -> Merge:
        groups = self._groups(layer)
        if self.method.fold is not None:
            return WholeHeads(groups, self.method.fold, self.knobs)
        from .mixing import Mixing, group_moments

        assert self.method.mix is not None
        mix, rotary, moments = self.method.mix(), self._rotary(layer), self._moments(layer)
        mixings = []
        for group in groups:
            maps = mix(group_moments(moments, group, rotary.head_dim), len(group), rotary)
            mixings.append(Mixing(maps.key_in.cpu(), maps.key_out.cpu(), maps.value_in.cpu(), maps.value_out.cpu()))
        return Mixed(groups, mixings)

    def _rotary(self, layer: int) -> Rotary:
        return rotary_of(self.source.family, self.source.config.full, layer)

    def _compute_moments(self, layer: int) -> GroupMoments:
        import torch

        from ..projections import projections, read_heads
        from .mixing import layer_moments

        places, prefix = projections(self.source.family, self.sizes), f"{self.source.family.layers}{layer}."
        keys, values = (
            read_heads(places[term], prefix, self.read, self.sizes["d"], torch.float64).to(self.device)
            for term in ("K", "V")
        )
        if self.statistics is None:
            return layer_moments(keys, values)
        seen = self.statistics.layer(layer, self.device)
        return layer_moments(keys, values, seen.inputs, seen.key_fisher, seen.value_fisher)
