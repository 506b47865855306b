"""The plain MLA form as transformers classes: for training, and as the exact reference of what is exported.

A plain model is its source's own architecture with another attention in every layer, so norms, MLP, residual scales
and the table of rotary angles (whatever its scaling) stay stock code. Of DeepSeek's attention it differs in four
ways: no norm on the latent, biases allowed, any head sizes, and rotary pairs in halves, each layer with the
frequencies that it keeps of its source's table. The names of its tensors are DeepSeek's.

Importing this module makes the types `mla_llama`, `mla_qwen2`, ... known to AutoConfig and AutoModelForCausalLM.

Legend: B sequences, T new tokens, S cached and new ones, H heads; n = qk_nope_head_dim, d_r = qk_rope_head_dim,
v = v_head_dim, r = kv_lora_rank, F = d_r / 2 rotary pairs.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import eager_attention_forward

from .latent import absorbed_attention, absorbing_pays
from .sdpa import same_width

PREFIX = "mla_"
SOURCES = ("llama", "mistral", "qwen2", "smollm3", "phi3", "stablelm")


class LatentAttention(nn.Module):
    """Multi-head latent attention in the plain form.

    Args:
        config: of a plain model, see `plain_config_class`.
        layer_idx: the layer's number.
        scaling: of the logits; the source's, whatever the sizes here.

    Weights:
        q_proj [H * (n + d_r), D], kv_a_proj_with_mqa [r + d_r, D], kv_b_proj [H * (n + v), r], o_proj [D, H * v];
        all but kv_b_proj with a bias if `config.mla_bias`.
    """

    is_causal = True
    num_key_value_groups = 1  # keys and values are made for every head

    def __init__(self, config: Any, layer_idx: int, scaling: float):
        super().__init__()
        self.config, self.layer_idx, self.scaling = config, layer_idx, scaling
        self.heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.dropout = config.attention_dropout
        size, bias = config.hidden_size, config.mla_bias
        self.q_proj = nn.Linear(size, self.heads * (self.nope + self.rope), bias=bias)
        self.kv_a_proj_with_mqa = nn.Linear(size, self.rank + self.rope, bias=bias)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, size, bias=bias)
        self.frequencies = tuple(config.rope_frequencies[layer_idx])
        self._index: dict[torch.device, Tensor] = {}

    def _turn(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate [B, heads, T, d_r], pair j being j and j + F, by the angles of this layer's frequencies."""
        if not self.frequencies:  # a layer without positions
            return x
        if x.device not in self._index:
            self._index[x.device] = torch.tensor(self.frequencies, device=x.device)
        # The source's tables hold every angle twice, [B, T, 2 * all pairs]: the first half is all there is.
        cos, sin = (
            table[..., : table.shape[-1] // 2].index_select(-1, self._index[x.device])[:, None].to(x.dtype)
            for table in position_embeddings
        )  # [B, 1, T, F]
        re, im = x.chunk(2, dim=-1)
        return torch.cat([re * cos - im * sin, im * cos + re * sin], dim=-1)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = past_key_values if cache is None else cache  # its name in older releases
        batch, new = hidden_states.shape[:2]
        query = self.q_proj(hidden_states).view(batch, new, self.heads, -1).transpose(1, 2)  # [B, H, T, n + d_r]
        q_nope, q_rope = query.split([self.nope, self.rope], dim=-1)
        latent, key_rope = self.kv_a_proj_with_mqa(hidden_states)[:, None].split([self.rank, self.rope], dim=-1)
        q_rope, key_rope = self._turn(q_rope, position_embeddings), self._turn(key_rope, position_embeddings)
        if cache is not None:  # one head, as far as caches are concerned: [B, 1, S, r] and [B, 1, S, d_r]
            latent, key_rope = cache.update(latent, key_rope, self.layer_idx)

        up = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.rank)
        weights = None
        if self._absorbs(new, latent.shape[2]):
            output = absorbed_attention(
                q_nope,
                q_rope,
                latent[:, 0],
                key_rope[:, 0],
                up[:, : self.nope],
                up[:, self.nope :],
                scale=self.scaling,
                mask=attention_mask,
                causal=attention_mask is None,
            ).transpose(1, 2)  # [B, T, H, v]
        else:
            expanded = torch.einsum("bsr,hnr->bhsn", latent[:, 0], up)  # [B, H, S, n + v]
            key_nope, value = expanded.split([self.nope, self.value], dim=-1)
            key = torch.cat([key_nope, key_rope.expand(-1, self.heads, -1, -1)], dim=-1)
            heads = torch.cat([q_nope, q_rope], dim=-1), key, value
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            output, weights = attend(
                self,
                *(same_width(*heads) if self.config._attn_implementation == "sdpa" else heads),
                attention_mask,
                dropout=self.dropout if self.training else 0.0,
                scaling=self.scaling,
                **kwargs,
            )  # [B, T, H, v], or wider
            output = output[..., : self.value]
        return self.o_proj(output.reshape(batch, new, -1)), weights

    def _absorbs(self, new: int, seen: int) -> bool:
        """Whether it is less work to bring few queries to many latents than the other way around."""
        if self.config._attn_implementation != "sdpa" or (self.training and self.dropout):
            return False
        return new < seen and absorbing_pays(new, seen, self.rank, self.nope, self.value)


def plain_config(config: dict[str, Any], **sizes: Any) -> dict[str, Any]:
    """The config.json of a plain model.

    Args:
        config: the source's config.json, every value spelled out that could default otherwise.
        sizes: the attributes of `plain_config_class`.
    """
    kind = config["model_type"]
    return {
        **config,
        "model_type": PREFIX + kind,
        "architectures": [class_name(kind, "ForCausalLM")],
        "num_key_value_heads": config["num_attention_heads"],
        **sizes,
    }


def class_name(kind: str, end: str) -> str:
    """What the plain class of a source's model type is called."""
    return "Mla" + CONFIG_MAPPING[kind].__name__.removesuffix("Config") + end


def plain_config_class(kind: str) -> type:
    """The config of plain models whose source's model type is `kind`: the source's, and

    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: as in DeepSeek's.
    mla_bias: whether queries, latent and output have biases.
    rope_frequencies: for every layer the F frequencies that it keeps, as places in the source's table of angles; a
        layer without positions has none, and zeros in its rotary rows.
    """
    base = CONFIG_MAPPING[kind]
    body = {
        "__module__": __name__,
        "__doc__": plain_config_class.__doc__,
        "__annotations__": {
            **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), int),
            "mla_bias": bool,
            "rope_frequencies": list,
        },
        "model_type": PREFIX + kind,
        # Rules for sharding the projections that are no longer there.
        "base_model_tp_plan": {k: v for k, v in (base.base_model_tp_plan or {}).items() if "self_attn" not in k},
        **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0),
        "mla_bias": False,
        "rope_frequencies": (),
    }
    return type(class_name(kind, "Config"), (base,), body)


def plain_model_class(kind: str, config_class: type) -> type:
    """The causal language model of plain models whose source's model type is `kind`."""
    stock = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    base = getattr(
        importlib.import_module(CONFIG_MAPPING[kind].__module__.replace("configuration_", "modeling_")), stock
    )

    def __init__(self: Any, config: Any) -> None:
        base.__init__(self, config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = LatentAttention(config, number, layer.self_attn.scaling)
        self.post_init()

    body = {
        "__module__": __name__,
        "__doc__": f"{stock} with `LatentAttention`.",
        "__init__": __init__,
        "config_class": config_class,
        "_supports_flash_attn": False,  # keys and values differ in size
        "_supports_flex_attn": False,
    }
    return type(class_name(kind, "ForCausalLM"), (base,), body)


def _register() -> None:
    for kind in SOURCES:
        config_class = plain_config_class(kind)
        model_class = plain_model_class(kind, config_class)
        for made in (config_class, model_class):
            globals()[made.__name__] = made  # where pickle looks for them
        AutoConfig.register(PREFIX + kind, config_class)
        AutoModelForCausalLM.register(config_class, model_class)


_register()
