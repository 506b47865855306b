"""The rotary frequencies of a plain model as the one series that a stock DeepSeek config can say.

That series is `theta^(-2j/d_r)`, j < d_r/2: it starts at 1, and its ratio is free through theta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...common.errors import UserError
from ..families import Family
from ..rotary import turning_of

_CLOSE = 1e-6  # relative, of frequencies that transformers computes in fp32
_POINTWISE = (
    "llama3",
    "linear",
)  # kinds of scaling that look at one frequency at a time, so that a series may carry them
_BY_LENGTH = ("dynamic", "longrope")  # kinds whose frequencies change with the text's length
_LARGEST_THETA = 1e30  # readers raise it to powers in fp32


def stock_rope(
    family: Family, config: Any, kept: Sequence[Sequence[int]], rope_dim: int, stock_dim: int
) -> dict[str, Any]:
    """The rope_parameters of the stock form.

    Args:
        family: of the plain model.
        config: its transformers config.
        kept: for each layer the frequencies that it keeps, as places in the source's table; none where it has no
            positions.
        rope_dim, stock_dim: rotary numbers before and after padding.

    Raises:
        UserError: they are not one such series, or their scaling cannot be said.
    """
    parameters = dict(config.rope_parameters)
    kind, theta = parameters.get("rope_type", "default"), parameters["rope_theta"]
    if kind in _BY_LENGTH:
        raise UserError(f"rope type {kind} has other frequencies for longer texts, which the stock form cannot; {_OUT}")
    parameters.pop("partial_rotary_factor", None)  # of the source's heads; some classes store it and ignore it
    turning = turning_of(family, config)  # where only a part of a head turns, the series runs over that part
    places = _shared_places(kept, rope_dim // 2)
    step = places[1] if len(places) > 1 else 1
    if list(places) != [step * j for j in range(len(places))]:
        raise UserError(
            f"the kept frequencies {_shown(places)} are not every n-th from 0, so no rope_theta describes them; choose "
            "--rope-select high or stride"
        )
    series = {"rope_type": "default"}
    if kind != "default" and not _are_untouched(config, kind, places, theta, turning):
        if kind not in _POINTWISE:
            raise UserError(f"rope type {kind} changes the kept frequencies, which the stock form cannot say; {_OUT}")
        series = parameters
    theta = padded_theta(series_theta(theta, step, turning, rope_dim), rope_dim, stock_dim)
    if not theta < _LARGEST_THETA:
        raise UserError(
            f"padding {rope_dim} rotary numbers to {stock_dim} needs rope_theta {theta:.0e}, too large for float32; "
            "keep more frequencies, or leave --pad-to-engine out"
        )
    return {**series, "rope_theta": theta}


_OUT = "use --form plain"


def series_theta(theta: float, step: int, turning: int, rope_dim: int) -> float:
    """The theta of a series of d_r/2 that takes every `step`-th frequency of one of `turning`/2."""
    return theta ** (step * rope_dim / turning) if rope_dim else theta


def padded_theta(theta: float, rope_dim: int, padded: int) -> float:
    """The theta of a longer series that begins with the same frequencies."""
    return theta ** (padded / rope_dim) if rope_dim else theta


def _shared_places(kept: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    """What all layers with positions keep.

    Raises:
        UserError: they differ.
    """
    first = next((layer for layer, places in enumerate(kept) if places), None)
    if first is None:
        return ()
    for layer, places in enumerate(kept):
        if places and tuple(places) != tuple(kept[first]):
            raise UserError(
                f"layer {layer} keeps other rotary frequencies ({_shown(places)}) than layer {first} "
                f"({_shown(kept[first])}), and the stock form has one series for all layers; use --form plain"
            )
    if len(kept[first]) != count:
        raise UserError(
            f"rope_frequencies names {len(kept[first])} frequencies, qk_rope_head_dim says {count}; mend config.json"
        )
    return tuple(kept[first])


def _are_untouched(config: Any, kind: str, places: Sequence[int], theta: float, turning: int) -> bool:
    """Whether a scaling leaves the kept frequencies alone.

    Raises:
        UserError: it is unknown, or changes the logits as well.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise UserError(f"rope type {kind!r} is unknown to transformers; {_OUT}")
    scaled, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    if not math.isclose(attention_factor, 1.0, rel_tol=_CLOSE):
        raise UserError(
            f"rope type {kind} scales logits by {attention_factor:g} squared, which is not exported; {_OUT}"
        )
    plain = torch.tensor([theta ** (-2 * place / turning) for place in places], dtype=torch.float64)
    return torch.allclose(scaled.double()[list(places)], plain, rtol=_CLOSE, atol=0)


def _shown(places: Sequence[int]) -> str:
    return ", ".join(map(str, places[:6])) + (", ..." if len(places) > 6 else "")
