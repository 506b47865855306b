"""A model that is known by its config alone: the source of a plan, and what a conversion makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ...common.errors import UserError
from ...common.kvcache import ELEMENT_BYTES
from ...convert.checks import check_convertible, check_latent, check_method, obstacle
from ...convert.demands import violations
from ...convert.families import FAMILIES, Family, Promise, Sizes
from ...convert.latent_families import DEEPSEEK, KNOWN, PREFIX
from ...convert.latent_form import HeadSizes, engine_shape
from ...convert.merge.methods import find_method
from ...convert.mla.budget import Choice, Room, choices
from ...convert.rotary import rotary_of
from ...eval.shape import Shape, shape_of

_DTYPE = "float16"  # of a checkpoint whose config does not say
_STOCK = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LATENT = ("kv_elements", "kv_ratio", "kv_rank", "rope_dim")  # keys of `convert` that say a latent's sizes


@dataclass(frozen=True)
class Planned:
    """A model that is known by its config.

    Attributes:
        config: of transformers.
        row: of its family.
        promises: its tensors, a tied head left out.
        shape: its sizes.
    """

    config: Any
    row: Family
    promises: Mapping[str, Promise]
    shape: Shape


def source_of(config: Any) -> Planned:
    """What the recipe begins with."""
    if reason := obstacle(config):
        raise UserError(f"a {config.model_type} model cannot be converted: {reason}")
    row = FAMILIES[config.model_type]
    return Planned(config, row, _tensors(row, config), shape_of(config, {}))


def result_of(config: Any, convert: Mapping[str, Any]) -> Planned:
    """What the conversion makes, in the form that is trained."""
    source, config = source_of(config), deepcopy(config)
    asked = SimpleNamespace(name=f"a {config.model_type} model", family=source.row, config=source.config)
    if convert.get("to") == "gqa":
        if (kv_heads := convert.get("kv_heads")) is None:
            raise UserError("the section convert says no kv_heads; write kv_heads: 1, or another number")
        check_convertible(asked, kv_heads)
        method = convert.get("method") or "svd"
        check_method(asked, method, find_method(method))
        row, shape = FAMILIES[source.row.becomes or source.row.name], {"num_key_value_heads": kv_heads}
        config.num_key_value_heads = kv_heads
        return Planned(config, row, _tensors(row, config, kv_heads), shape_of(source.config, shape))
    if convert.get("to") != "mla":
        raise UserError(f"the section convert says to: {convert.get('to')}; it must be gqa or mla")
    check_latent(asked, convert.get("form") or "deepseek_v3")
    row = KNOWN[PREFIX + config.model_type]
    choice = _choice(source, convert)
    sizes = {"kv_lora_rank": choice.kv_rank, "qk_rope_head_dim": choice.rope_dim}
    d = Sizes(config)["d"]
    biased = any(".self_attn." in name and name.endswith(".bias") for name in source.promises)
    for name, value in {**sizes, "qk_nope_head_dim": d, "v_head_dim": d, "mla_bias": biased}.items():
        setattr(config, name, value)
    return Planned(config, row, _tensors(row, config), shape_of(source.config, sizes))


def _choice(source: Planned, convert: Mapping[str, Any]) -> Choice:
    """The sizes of the latent; where the conversion would choose, the first that it tries."""
    config, sizes = source.config, Sizes(source.config)
    turning = [2 * len(rotary_of(source.row, config, layer).re) for layer in range(config.num_hidden_layers)]
    room = Room(max(turning), sizes["K"], sizes["D"], still_layers=0 in turning)
    asked = {name: convert.get(name) for name in _LATENT}
    return choices(room, **asked, rope_select=convert.get("rope_select") or "auto")[0]


def cached_numbers(model: Planned, convert: Mapping[str, Any]) -> int:
    """Numbers that the result caches of a token in a layer, as it is written."""
    if model.shape.is_latent and convert.get("pad_to_engine"):
        padded = engine_shape(_head_sizes(model))
        return padded.rank + padded.rope
    return model.shape.kv_elements()


def written_elements(model: Planned, convert: Mapping[str, Any]) -> int:
    """Elements of the result as it is written: of a latent one in the stock form, unless the plain one is asked for."""
    if not model.shape.is_latent or convert.get("form") == "plain":
        return elements(model.promises.values())
    config, sizes = model.config, _head_sizes(model)
    stock = {
        **{name: getattr(config, name) for name in _STOCK},
        **(engine_shape(sizes) if convert.get("pad_to_engine") else sizes).as_config(),
        "model_type": DEEPSEEK.name,
        "num_key_value_heads": config.num_attention_heads,
        "attention_bias": config.mla_bias,
        "tie_word_embeddings": False,
        "q_lora_rank": None,
    }
    demanded = config.mla_bias or any(
        violation.topic == "query rank"
        for reader in _names(convert.get("for"))
        for violation in violations(stock, {}, reader)
    )
    exact = config.hidden_size + config.mla_bias if demanded else None
    stock["q_lora_rank"] = convert.get("q_rank") or exact
    return elements(_tensors(DEEPSEEK, SimpleNamespace(**stock)).values())


def _names(value: Any) -> tuple[str, ...]:
    """What stands there with commas between, or as a list."""
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else tuple(value or ())


def _head_sizes(model: Planned) -> HeadSizes:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return HeadSizes(*(getattr(model.config, name) for name in names))


def _tensors(row: Family, config: Any, kv_heads: int | None = None) -> dict[str, Promise]:
    """The tensors of a model in memory, by name: a tied head once, and no buffers."""
    named = row.weights[0].template  # with its prefix, as transformers has it
    return {name: one for name, one in row.promises(config, (named,), kv_heads).items() if not one.optional}


def elements(promises: Iterable[Promise]) -> int:
    return sum(math.prod(promise.shape) for promise in promises)


def dtype_of(config: Any) -> str:
    """Of the source's weights."""
    said = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return said if said in ELEMENT_BYTES else _DTYPE
