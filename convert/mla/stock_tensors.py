"""The tensors of the stock form: of which plain ones each is made, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UserError
from ..checkpoint import torch_dtype
from ..config import from_raw
from ..headers import FLOATS
from ..latent_families import DEEPSEEK
from ..latent_form import Form
from ..stream import Output
from . import folds
from .q_lora import QueryFactors, QuerySplit

_SHOWN = 3  # tensors named in a message


@dataclass(frozen=True)
class Folding:
    """What the folds of a model need to know.

    Attributes:
        split: the queries through their latent, if they have one.
        still: the layers without positions.
    """

    form: Form
    split: QuerySplit
    still: frozenset[int]


@dataclass(frozen=True)
class At:
    """Where a fold is: in which layer, and for what dtype."""

    folding: Folding
    layer: int
    dtype: torch.dtype

    @property
    def form(self) -> Form:
        return self.folding.form


@dataclass(frozen=True)
class Fold:
    """How a stock tensor is made of plain ones; `~` stands for its layer.

    Attributes:
        name: the stock tensor's.
        reads: the plain ones'. Of several rows for one name, the first whose `reads` are all there counts.
        make: of the tensors read; None to take the first as it is.
    """

    name: str
    reads: tuple[str, ...]
    make: Callable[..., Tensor] | None = None


def _residual(at: At, x: Tensor) -> Tensor:
    return folds.multiply(x, at.form.residual_factor, at.dtype)


def _factors(at: At, weight: Tensor, bias: Tensor | None = None) -> QueryFactors:
    return at.folding.split(at.layer, weight, bias)


def _latent_rows(at: At, x: Tensor) -> Tensor:
    if at.layer in at.folding.still and x[at.form.plain.rank :].any():
        raise UserError(
            f"layer {at.layer} has no positions, but its shared key's rotary rows are not zero, and the stock form "
            "would turn them; use --form plain"
        )
    return folds.latent_rows(x, at.form, at.layer)


def _column(fold: Callable[..., Tensor], bias: Tensor, *knobs: Any) -> Tensor:
    """A fold of rows, of a bias [S]."""
    return fold(bias[:, None], *knobs)[:, 0]


_Q, _KV_A = "~self_attn.q_proj", "~self_attn.kv_a_proj_with_mqa"
_QUERY = (f"{_Q}.weight", f"{_Q}.bias")
_NORM = ("~input_layernorm.weight",)  # a small tensor for those that are made of none
FOLDS: tuple[Fold, ...] = (
    Fold("model.embed_tokens.weight", ("model.embed_tokens.weight",), _residual),
    # The head reads the stream behind the final norm, which the factor does not reach.
    Fold("lm_head.weight", ("lm_head.weight",)),
    Fold("lm_head.weight", ("model.embed_tokens.weight",)),
    Fold("model.norm.weight", ("model.norm.weight",)),
    Fold("~input_layernorm.weight", _NORM),
    Fold("~post_attention_layernorm.weight", ("~post_attention_layernorm.weight",)),
    Fold(f"{_Q}.weight", (f"{_Q}.weight",), lambda at, x: folds.queries(x, at.form)),
    *(
        fold
        for reads in (_QUERY, _QUERY[:1])
        for fold in (
            Fold(
                "~self_attn.q_a_proj.weight",
                reads,
                lambda at, *x: folds.query_rows(_factors(at, *x).down, at.form, at.layer),
            ),
            Fold(
                "~self_attn.q_b_proj.weight",
                reads,
                lambda at, *x: folds.query_expansion(_factors(at, *x).up, at.form, at.layer),
            ),
        )
    ),
    Fold(
        "~self_attn.q_a_proj.bias",
        _QUERY,
        lambda at, *x: _column(folds.query_rows, _factors(at, *x).constant, at.form, at.layer),
    ),
    Fold("~self_attn.q_a_layernorm.weight", _NORM, lambda at, x: folds.query_gain(at.form, at.layer)),
    Fold(f"{_KV_A}.weight", (f"{_KV_A}.weight",), _latent_rows),
    Fold(f"{_KV_A}.bias", (f"{_KV_A}.bias",), lambda at, x: _latent_rows(at, x[:, None])[:, 0]),
    Fold("~self_attn.kv_a_layernorm.weight", _NORM, lambda at, x: folds.latent_gain(at.form, at.layer)),
    Fold(
        "~self_attn.kv_b_proj.weight",
        ("~self_attn.kv_b_proj.weight",),
        lambda at, x: folds.expansion(x, at.form, at.layer),
    ),
    Fold("~self_attn.o_proj.weight", ("~self_attn.o_proj.weight",), lambda at, x: folds.output(x, at.form)),
    Fold("~self_attn.o_proj.bias", ("~self_attn.o_proj.bias",), _residual),
    Fold("~mlp.gate_proj.weight", ("~mlp.gate_proj.weight",)),
    Fold("~mlp.gate_proj.weight", ("~mlp.gate_up_proj.weight",), lambda at, x: x.chunk(2)[0]),
    Fold("~mlp.up_proj.weight", ("~mlp.up_proj.weight",)),
    Fold("~mlp.up_proj.weight", ("~mlp.gate_up_proj.weight",), lambda at, x: x.chunk(2)[1]),
    Fold("~mlp.down_proj.weight", ("~mlp.down_proj.weight",), _residual),
)


def stock_outputs(
    config: Mapping[str, Any], tensors: Mapping[str, Output], folding: Folding, dtype: str | None
) -> list[Output]:
    """Every tensor that the stock form has.

    Args:
        config: the stock form's config.json.
        tensors: the plain ones, by their names in the family's table.
        dtype: of the result; the plain tensors' own if None.

    Raises:
        UserError: the stock form has no place for a plain tensor.
    """
    promised = DEEPSEEK.promises(from_raw(deepcopy(dict(config))), ["model."])
    outputs, read = [], set()
    for name, promise in promised.items():
        if promise.weight.rule == "drop":
            continue
        prefix = f"model.layers.{promise.slots['layer']}." if promise.slots else ""
        fold, needed = _find(name, prefix, tensors)
        read |= set(needed)
        plains = [tensors[each] for each in needed]
        outputs.append(_compose(name, promise.shape, fold, plains, folding, promise.slots.get("layer", 0), dtype))
    if homeless := [name for name in tensors if name not in read]:
        more = f" and {len(homeless) - _SHOWN} more" if len(homeless) > _SHOWN else ""
        raise UserError(
            f"DeepseekV3ForCausalLM has no place for {', '.join(homeless[:_SHOWN])}{more}; only --form plain holds them"
        )
    return outputs


def _find(name: str, prefix: str, tensors: Mapping[str, Output]) -> tuple[Fold, list[str]]:
    """The row for a stock tensor, and the plain ones that it reads."""
    for fold in FOLDS:
        needed = [each.replace("~", prefix) for each in fold.reads]
        if fold.name.replace("~", prefix) == name and all(each in tensors for each in needed):
            return fold, needed
    raise UserError(f"the plain model has no tensor that {name} could be made of; it is not whole")


def _compose(
    name: str,
    shape: tuple[int, ...],
    fold: Fold,
    plains: Sequence[Output],
    folding: Folding,
    layer: int,
    dtype: str | None,
) -> Output:
    first = plains[0]
    kind = first.dtype if dtype is None else next(header for header, known in FLOATS.items() if known == dtype)
    if fold.make is None:
        return Output(name, kind, shape, first.sources, first.make)
    make = partial(_make, plains, partial(fold.make, At(folding, layer, torch_dtype(kind))))
    return Output(name, kind, shape, tuple(info for plain in plains for info in plain.sources), make)


def _make(plains: Sequence[Output], fold: Callable[..., Tensor], stored: list[Tensor]) -> Tensor:
    """A stock tensor of what the plain tensors it needs are made of, without rounding in between."""
    made, at = [], 0
    for plain in plains:
        sources = stored[at : at + len(plain.sources)]
        made.append(plain.make(sources) if plain.make else sources[0])
        at += len(plain.sources)
    return fold(*made)
