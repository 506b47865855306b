"""From an export back to the plain form: every fold undone, so that a published checkpoint can be trained further.

Norm weights and the query's two projections are taken as they stand, so this holds for an export that was trained, too,
as far as its latents' norms are still neutral.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UserError
from ..checkpoint import torch_dtype
from ..config import from_raw
from ..families import Family
from ..headers import FLOATS, TensorInfo
from ..latent_families import PLAIN
from ..latent_form import BLOCK, Form, plain_block
from ..stream import Output
from .folds import multiply


@dataclass(frozen=True)
class Plain:
    """The plain form of an export, to be written: its row of the table, config.json and tensors."""

    family: Family
    config: dict[str, Any]
    outputs: list[Output]


def invert(config: Mapping[str, Any], stored: Mapping[str, TensorInfo], *, dtype: str | None = None) -> Plain:
    """Plan the plain form that a stock checkpoint was exported from.

    Args:
        config: its config.json.
        stored: its tensors by name, matched against the config before.
        dtype: of the result's tensors; what the plain model had if None.

    Raises:
        UserError: kvfold did not write it.
    """
    form = Form.read(config)
    plain = deepcopy(config[BLOCK]["plain"] | plain_block(config[BLOCK].get("source")))
    family = PLAIN.get(plain.get("model_type"))
    if family is None:
        raise UserError(f"the {BLOCK} block names the plain type {plain.get('model_type')!r}; update kvfold")
    wanted = dtype or form.dtype
    if wanted:
        plain |= {key: wanted for key in ("dtype", "torch_dtype") if key in plain} or {"dtype": wanted}
    outputs = []
    for name, promise in family.promises(from_raw(deepcopy(plain)), ["model."]).items():
        if promise.weight.rule == "drop" or (name == "lm_head.weight" and form.tied_head):
            continue
        layer = promise.slots.get("layer", 0)
        unfold, needed = _find(name, f"model.layers.{layer}." if promise.slots else "", form, stored)
        infos = tuple(stored[each] for each in needed)
        kind = next((header for header, known in FLOATS.items() if known == wanted), infos[0].dtype)
        make = partial(_make, unfold, form, layer, torch_dtype(kind)) if unfold else None
        outputs.append(Output(name, kind, promise.shape, infos, make))
    return Plain(family, plain, outputs)


def _make(unfold: Callable[..., Tensor], form: Form, layer: int, dtype: torch.dtype, stored: list[Tensor]) -> Tensor:
    return unfold(form, layer, dtype, *stored)


def deinterleave(x: Tensor) -> Tensor:
    """Rotary rows [..., 2F, X] as neighbours, 2j and 2j + 1, in halves: j and j + F."""
    return torch.cat([x[..., 0::2, :], x[..., 1::2, :]], dim=-2)


def queries(x: Tensor, form: Form) -> Tensor:
    """Query rows [H * (n' + d_r'), X] as [H * (n + d_r), X]."""
    heads = x.double().unflatten(0, (form.heads, -1))  # [H, n' + d_r', X]
    nope, rope = heads.split([form.stock.nope, form.stock.rope], dim=1)
    heads = torch.cat([nope[:, : form.plain.nope], deinterleave(rope[:, : form.plain.rope])], dim=1)
    return heads.flatten(0, 1) / form.logit_factor


def latent_rows(x: Tensor, form: Form, layer: int) -> Tensor:
    """Latent and shared key rows [r' + d_r', X] as [r + d_r, X]."""
    latent, rope = x.double().split([form.stock.rank, form.stock.rope], dim=0)
    latent = latent[: form.plain.rank] / form.latent_scales[layer]
    return torch.cat([latent, deinterleave(rope[: form.plain.rope])])


def expansion(x: Tensor, gain: Tensor, form: Form, layer: int) -> Tensor:
    """Keys and values of a latent, [H * (n' + v'), r'] behind a norm of weight `gain` [r'], as [H * (n + v), r]."""
    columns = (x.double() * _through_norm(gain, form.latent_scales[layer], form.eps))[:, : form.plain.rank]
    heads = columns.unflatten(0, (form.heads, -1))  # [H, n' + v', r]
    nope, value = heads.split([form.stock.nope, form.stock.value], dim=1)
    return torch.cat([nope[:, : form.plain.nope], value[:, : form.plain.value]], dim=1).flatten(0, 1)


def output(x: Tensor, form: Form) -> Tensor:
    """The output projection [D, H * v'] as [D, H * v]."""
    heads = x.double().unflatten(1, (form.heads, -1))  # [D, H, v']
    return heads[:, :, : form.plain.value].flatten(1, 2) / form.residual_factor


def merged_queries(down: Tensor, up: Tensor, gain: Tensor, form: Form, layer: int) -> Tensor:
    """Query rows [H * (n + d_r), X] of their two projections, [q, X] and [H * (n' + d_r'), q], and the norm between."""
    up = up.double() * _through_norm(gain, form.query_scales[layer], form.eps)
    return queries(up @ (down.double() / form.query_scales[layer]), form)


def _through_norm(gain: Tensor, scale: float, eps: float) -> Tensor:
    """What a neutral norm multiplies a latent by, its scale included."""
    return gain.double() * (scale / math.sqrt(eps))


@dataclass(frozen=True)
class Unfold:
    """How a plain tensor is made of stock ones; as `stock.Fold`, with `when` for what else must hold of the form."""

    name: str
    reads: tuple[str, ...]
    make: Callable[..., Tensor] | None = None
    when: Callable[[Form], bool] = lambda form: True


def _residual(form: Form, layer: int, dtype: torch.dtype, x: Tensor) -> Tensor:
    return multiply(x, 1 / form.residual_factor, dtype)


def _column(unfold: Callable[..., Tensor], bias: Tensor, *knobs: Any) -> Tensor:
    return unfold(bias[:, None], *knobs)[:, 0]


def _tied(form: Form, layer: int, dtype: torch.dtype, head: Tensor, embedding: Tensor) -> Tensor:
    """The embedding, which the head is an unscaled copy of.

    Raises:
        UserError: the two went apart in training.
    """
    rounding = 2 * torch.finfo(embedding.dtype).eps
    for ours, theirs in zip(head.split(1024), embedding.split(1024), strict=True):
        back = theirs.double() / form.residual_factor
        if not torch.allclose(back, ours.double(), rtol=rounding, atol=torch.finfo(embedding.dtype).tiny):
            raise UserError(
                "lm_head.weight is no longer a multiple of the embedding, which it was tied to; set tied_head to false "
                f"in config.json's {BLOCK} block, and tie_word_embeddings in the config of its plain"
            )
    return head


_Q_A, _Q_B, _Q_NORM = "~self_attn.q_a_proj", "~self_attn.q_b_proj.weight", "~self_attn.q_a_layernorm.weight"
_KV_A, _KV_B, _KV_NORM = (
    "~self_attn.kv_a_proj_with_mqa",
    "~self_attn.kv_b_proj.weight",
    "~self_attn.kv_a_layernorm.weight",
)
UNFOLDS: tuple[Unfold, ...] = (
    Unfold(
        "model.embed_tokens.weight",
        ("lm_head.weight", "model.embed_tokens.weight"),
        _tied,
        when=lambda form: form.tied_head,
    ),
    Unfold("model.embed_tokens.weight", ("model.embed_tokens.weight",), _residual),
    Unfold("~self_attn.q_proj.weight", ("~self_attn.q_proj.weight",), lambda form, layer, dtype, x: queries(x, form)),
    Unfold(
        "~self_attn.q_proj.weight",
        (f"{_Q_A}.weight", _Q_B, _Q_NORM),
        lambda form, layer, dtype, *x: merged_queries(*x, form, layer),
    ),
    Unfold(
        "~self_attn.q_proj.bias",
        (f"{_Q_A}.bias", _Q_B, _Q_NORM),
        lambda form, layer, dtype, *x: _column(merged_queries, *x, form, layer),
    ),
    Unfold(f"{_KV_A}.weight", (f"{_KV_A}.weight",), lambda form, layer, dtype, x: latent_rows(x, form, layer)),
    Unfold(f"{_KV_A}.bias", (f"{_KV_A}.bias",), lambda form, layer, dtype, x: _column(latent_rows, x, form, layer)),
    Unfold(_KV_B, (_KV_B, _KV_NORM), lambda form, layer, dtype, x, gain: expansion(x, gain, form, layer)),
    Unfold("~self_attn.o_proj.weight", ("~self_attn.o_proj.weight",), lambda form, layer, dtype, x: output(x, form)),
    Unfold("~self_attn.o_proj.bias", ("~self_attn.o_proj.bias",), _residual),
    Unfold(
        "~mlp.gate_up_proj.weight",
        ("~mlp.gate_proj.weight", "~mlp.up_proj.weight"),
        lambda form, layer, dtype, *x: torch.cat(x),
    ),
    Unfold("~mlp.down_proj.weight", ("~mlp.down_proj.weight",), _residual),
)


def _find(
    name: str, prefix: str, form: Form, stored: Mapping[str, TensorInfo]
) -> tuple[Callable[..., Tensor] | None, list[str]]:
    """How a plain tensor is made, and the stock ones that it is made of; by default the one of its own name."""
    for unfold in UNFOLDS:
        needed = [each.replace("~", prefix) for each in unfold.reads]
        if unfold.name.replace("~", prefix) == name and unfold.when(form) and all(each in stored for each in needed):
            return unfold.make, needed
    if name not in stored:
        raise UserError(f"the export has no tensor that {name} could be made of; it is not whole")
    return None, [name]
