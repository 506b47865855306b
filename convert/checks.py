"""What can be converted, and whether a checkpoint is whole: everything that is refused before work starts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from ..common.errors import UserError, divisors
from ..common.kvcache import num_attention_heads, num_key_value_heads
from .families import FAMILIES, Family, Promise
from .headers import TensorInfo
from .merge.methods import METHODS, Method
from .rotary import rotary_of
from .source import Source


def obstacle(config: Any) -> str | None:
    """Why a model cannot be converted to fewer KV heads at all, or None."""
    if getattr(config, "kv_lora_rank", None):
        return "its attention is MLA already: it caches one latent a token and has no KV heads to merge"
    if config.model_type not in FAMILIES:
        near = difflib.get_close_matches(config.model_type, FAMILIES, n=1)
        hint = f"the nearest name is {near[0]}" if near else f"known are {', '.join(sorted(FAMILIES))}"
        return f"family {config.model_type!r} is not supported; {hint}"
    if quantization := getattr(config, "quantization_config", None):
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        return f"its weights are quantised ({kind}); convert the unquantised checkpoint"
    heads, groups = num_attention_heads(config), num_key_value_heads(config)
    if heads % groups:
        return f"its {heads} query heads cannot share {groups} KV heads evenly; mend the config"
    for attribute, (value, reason) in FAMILIES[config.model_type].refuses.items():
        if getattr(config, attribute, None) is value:
            return f"{attribute} is {str(value).lower()}: {reason}"
    return None


def kv_head_choices(config: Any, family: Family) -> list[int]:
    """The KV head counts that a model can be converted to, its own included where the target can hold it."""
    choices = divisors(num_key_value_heads(config))
    return [n for n in choices if not family.only_kv_heads or n in family.only_kv_heads]


def one_or_all(family: Family) -> str:
    """What is said of a family whose target is multi-query or nothing."""
    return f"a {family.becomes or family.name} model holds one KV head or all"


def check_convertible(source: Source, kv_heads: int) -> None:
    """Check family, features and head counts, before a tensor is looked at.

    Raises:
        UserError: with the numbers that are possible.
    """
    if reason := obstacle(source.config):
        raise UserError(f"{source.name} cannot be converted: {reason}")
    choices = kv_head_choices(source.config, source.family)
    if kv_heads not in choices:
        heads, try_ = num_key_value_heads(source.config), ", ".join(map(str, choices))
        if source.family.only_kv_heads:
            raise UserError(f"{kv_heads} KV heads are not possible: {one_or_all(source.family)}; try {try_}")
        raise UserError(f"{heads} KV heads cannot form {kv_heads} groups; try {try_}")


def check_method(source: Source, name: str, method: Method) -> None:
    """Refuse a method that does not commute with what the model does between projection and RoPE.

    Raises:
        UserError: names what is in the way, and the methods that remain.
    """
    if not method.mixes_channels:
        return
    if reason := channel_obstacle(source.family, source.config):
        raise UserError(
            f"{name} mixes channels, which {reason} does not allow; use --method mean, best with --refine 64 (also "
            f"allowed: {', '.join(method for method in whole_head_methods() if method != 'mean')})"
        )


def whole_head_methods() -> list[str]:
    """The methods that every model allows."""
    return [name for name, row in METHODS.items() if not row.mixes_channels]


def channel_obstacle(family: Family, config: Any) -> str | None:
    """What in a model does not commute with mixing the channels of its heads, or None."""
    if family.has_qk_norm(config):
        return f"{family.name}'s QK-norm (a norm between projection and RoPE)"
    if getattr(config, "clip_qkv", None):
        return f"clip_qkv = {config.clip_qkv}"
    return None


def account(family: Family, config: Any, stored: Mapping[str, TensorInfo]) -> dict[str, Promise]:
    """Match what is stored against what the family's table promises: each tensor once, none missing.

    Returns:
        The promise for every stored tensor, by name.

    Raises:
        UserError: names the first tensor that is missing, unknown, or of another shape.
    """
    promised = family.promises(config, stored)
    model = f"a {family.name} model with this config"
    for name, info in stored.items():
        if name not in promised:
            near = difflib.get_close_matches(name, promised, n=1)
            hint = f" (the nearest is {near[0]})" if near else ""
            raise UserError(f"tensor {name} has no place in {model}{hint}; remove it, or mend the config")
        promise = promised[name]
        if promise.weight.rule != "drop" and info.shape != promise.shape:
            shapes = f"tensor {name} has shape {list(info.shape)}; the config says {list(promise.shape)}"
            raise UserError(f"{shapes}, which may be another model's: mend it, or fetch both again")
    for name, promise in promised.items():
        if name not in stored and not promise.optional:
            raise UserError(f"tensor {name} is missing; {model} needs it: mend the config, or fetch the weights again")
    return {name: promised[name] for name in stored}


def latent_obstacle(family: Family, config: Any) -> str | None:
    """Why a model cannot be converted to MLA in any form, or None; `obstacle` comes first."""
    if family.rope == "none":
        return f"a {family.name} model has no RoPE: its positions are learnt, and no frequency can be kept"
    if getattr(config, "attn_logit_softcapping", None):
        return (
            "it caps its attention logits (attn_logit_softcapping), which no MLA class does; keep heads instead, with "
            "kvfold convert gqa"
        )
    if reason := channel_obstacle(family, config):
        return f"{reason} does not allow mixing channels; keep heads instead, with kvfold convert gqa --method mean"
    turning = (rotary_of(family, config, layer).re for layer in range(config.num_hidden_layers))
    if not any(turning):
        return "none of its layers has positions, so there is no rotary key to keep"
    if not family.latent:
        known = ", ".join(name for name, row in FAMILIES.items() if row.latent)
        return (
            f"the MLA form of a {family.name} model is not built; it is for {known}. Keep heads instead, with kvfold "
            "convert gqa"
        )
    if not math.isclose(factor := _attention_factor(config), 1, rel_tol=1e-6):
        return f"its RoPE scales what it turns by {factor:g}, which keys that no longer turn would lose"
    if _slides(config):
        return f"its sliding window of {config.sliding_window} tokens has no place in the engines' MLA classes"
    return None


def _attention_factor(config: Any) -> float:
    """What YaRN and longrope multiply turned queries and keys by."""
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind == "default":
        return 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return float(ROPE_INIT_FUNCTIONS[kind](config, "cpu")[1]) if kind in ROPE_INIT_FUNCTIONS else 1.0


def _slides(config: Any) -> bool:
    """Whether any layer looks back over a window only."""
    if not getattr(config, "sliding_window", None):
        return False
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    return getattr(config, "use_sliding_window", True) is not False


def check_latent(source: Source, form: str) -> None:
    """Check that a source can be converted to a form of MLA, before a tensor is looked at.

    Raises:
        UserError: says what is in the way, and what else can be done.
    """
    full = getattr(source.config, "full", source.config)  # of a plan, there is nothing but the whole config
    if reason := obstacle(source.config) or latent_obstacle(source.family, full):
        raise UserError(f"{source.name} cannot be converted to MLA: {reason}")
    if form != "plain" and source.family.latent != "stock":
        raise UserError(
            f"{source.name} cannot be held by DeepSeek's classes: its norm is a LayerNorm; use --form plain"
        )
