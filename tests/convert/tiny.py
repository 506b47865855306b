"""Tiny models of every family row, in fp64, with weights that make every head and every bias matter."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

HEADS = 4
_BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "vocab_size": 97, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT2 = {
    "n_embd": 64, "n_layer": 2, "n_head": HEADS, "vocab_size": 97, "n_positions": 512, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "num_local_experts": 3}

# The grouped matrix product of the default experts has no fp64 form.
EAGER_EXPERTS = {"experts_implementation": "eager"}

# Name of the case -> model_type and what its config says beside _BASE.
CASES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 64}),
    "mixtral": ("mixtral", _MOE),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24, "attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "qwen3_moe-dense": (
        "qwen3_moe",
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 16}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 64, "query_pre_attn_scalar": 16}),
    "olmo": ("olmo", {"clip_qkv": 2.0}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "phi": ("phi", {}),
    "phi-qk-norm": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {}),
    "starcoder2": ("starcoder2", {"use_bias": True}),
    "starcoder2-plain": ("starcoder2", {"use_bias": False}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-qk-norm": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "cohere": ("cohere", {"attention_bias": True}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True}),
    "granite": ("granite", {"attention_bias": True, "logits_scaling": 4.0}),
}


def make_config(case: str, kv_heads: int = HEADS):
    """The tiny config of a case, with the given number of KV heads."""
    kind, extra = CASES[case]
    return AutoConfig.for_model(kind, **{**_BASE, "num_key_value_heads": kv_heads, **extra})


def make_gpt2(**extra):
    return AutoConfig.for_model("gpt2", **{**_GPT2, **extra})


def make_model(config, seed: int = 0) -> PreTrainedModel:
    """A model in fp64 whose weights, biases and gains are all random and large enough to matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **EAGER_EXPERTS).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    return model


def repeat_heads(narrow: PreTrainedModel, wide_config, *, interleaved: bool = False) -> PreTrainedModel:
    """A model with more KV heads that computes what `narrow` does, found without the tables of kvfold.

    Whatever changes its shape with the number of KV heads holds KV heads: each is repeated in place (or, with
    `interleaved`, the whole sequence of heads is, which stock attention reads in the wrong order).
    """
    wide = make_model(wide_config)
    few, many = narrow.config.num_key_value_heads, wide_config.num_key_value_heads
    head_dim = getattr(narrow.config, "head_dim", None) or narrow.config.hidden_size // HEADS
    state = dict(narrow.state_dict())
    with torch.no_grad():
        for name, target in wide.state_dict().items():
            if "k_layernorm.norms." in name:  # stablelm: one tensor a head
                prefix, head, suffix = (
                    name.rpartition(".norms.")[0],
                    *name.rpartition(".norms.")[2].split("."),
                )
                origin = int(head) % few if interleaved else int(head) // (many // few)
                target.copy_(state[f"{prefix}.norms.{origin}.{suffix}"])
                continue
            source = state[name]
            if source.shape != target.shape:
                query = source.shape[0] - 2 * few * head_dim if "qkv" in name else 0
                source = torch.cat(
                    [
                        source[:query],
                        *(_repeat(part, few, many, interleaved) for part in _kv_parts(source, query)),
                    ]
                )
            target.copy_(source)
    return wide


def _kv_parts(source: torch.Tensor, query: int):
    return source[query:].chunk(2) if query else [source]


def _repeat(rows: torch.Tensor, few: int, many: int, interleaved: bool) -> torch.Tensor:
    heads = rows.unflatten(0, (few, -1))  # [few, d, ...]
    if interleaved:
        return heads.repeat(many // few, *[1] * (heads.ndim - 1)).flatten(0, 1)
    return heads.repeat_interleave(many // few, dim=0).flatten(0, 1)
