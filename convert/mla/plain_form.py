"""The plain form of a source: its config.json, and which of its tensors are made of which of the source's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ...attention.plain import plain_config
from ...common.kvcache import head_dim
from ..calibration.reader import full_names
from ..config import from_raw
from ..families import Promise
from ..latent_families import KNOWN
from ..latent_form import plain_block
from ..rotary import rotary_of
from ..source import Source
from ..stream import Output, cast
from .layers import LayerFactors
from .rotation import Channels

# What each projection of the result is computed from first of all; it gives the shard and the dtype.
_MADE_OF = {"q_proj": "Q", "kv_a_proj_with_mqa": "K", "kv_b_proj": "V", "o_proj": "O"}


def config_of(source: Source, channels: Channels, rank: int, *, biased: bool, dtype: str | None) -> dict[str, Any]:
    """The config.json of a source's plain form."""
    config = source.config.full
    d = head_dim(config)
    raw = {key: value for key, value in source.config.raw.items() if key != "auto_map"}
    if dtype is not None:
        raw |= {key: dtype for key in ("dtype", "torch_dtype") if key in raw} or {"dtype": dtype}
    if any(name.endswith("lm_head.weight") for name in source.checkpoint.tensors):
        raw["tie_word_embeddings"] = False  # a head that is stored counts, whatever the config says
    kept = [channel[0] for channel in channels]
    return plain_config(
        raw,
        head_dim=d,
        num_attention_heads=config.num_attention_heads,
        kv_lora_rank=rank,
        qk_nope_head_dim=d,
        qk_rope_head_dim=2 * len(channels),
        v_head_dim=d,
        mla_bias=biased,
        rope_frequencies=[
            kept if rotary_of(source.family, config, layer).re else [] for layer in range(config.num_hidden_layers)
        ],
        **plain_block(source.config.raw),
    )


def plan(
    source: Source, promised: Mapping[str, Promise], factors: LayerFactors, config: dict[str, Any], dtype: str | None
) -> list[Output]:
    """Every tensor of the plain form, in the source's order.

    Args:
        promised: what the source holds, see `checks.account`.
        factors: the layers'.
        config: see `config_of`.
        dtype: of the result's floating-point tensors; the source's own if None.
    """
    stored, family = source.checkpoint.tensors, source.family
    names, target = full_names(promised), KNOWN[config["model_type"]]
    outputs = []
    for name, promise in target.promises(from_raw(config), stored).items():
        origin, make = stored.get(name), None
        layer, _, place = promise.weight.template.format(**promise.slots).removeprefix(family.layers).partition(".")
        attention, _, tensor = place.partition(".")
        if attention == "self_attn":
            term = _MADE_OF[tensor.partition(".")[0]]
            weight = f"{family.layers}{layer}.{factors.places[term].module}.weight"
            origin = stored[names[weight]]
            if term != "O" or factors.biased:
                make = partial(_compute, factors=factors, layer=int(layer), name=tensor)
        if origin is not None:  # a head may be tied
            outputs.append(Output(name, cast(origin.dtype, dtype), promise.shape, (origin,), make))
    order = {name: position for position, name in enumerate(stored)}
    return sorted(outputs, key=lambda output: order[output.sources[0].name])


def _compute(_: list[Tensor], *, factors: LayerFactors, layer: int, name: str) -> Tensor:
    return factors.tensor(layer, name)


def has_attention_bias(stored: Collection[str]) -> bool:
    """Whether any of a source's attention projections has a bias."""
    return any(".self_attn." in name and name.endswith(".bias") for name in stored)
