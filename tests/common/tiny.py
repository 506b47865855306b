"""Tiny causal language models, one of each thing that a stock class does to its logits."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# One of each thing that a stock class does to its logits, and of each way it names its parts.
FAMILIES = {
    "llama": COMMON,
    "gemma2": {**COMMON, "head_dim": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {**COMMON, "head_dim": 8, "final_logit_softcapping": 3.0},
    "cohere": {**COMMON, "logit_scale": 0.25},
    "granite": {**COMMON, "logits_scaling": 7.0},
    "phi": COMMON,
    "mixtral": {**COMMON, "num_local_experts": 4, "output_router_logits": True},
    "deepseek_v3": {
        **COMMON,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 2,
    },
    "gpt_neox": {**COMMON, "num_key_value_heads": None},
    "opt": {**COMMON, "ffn_dim": 64, "word_embed_proj_dim": 16, "pad_token_id": 1},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
}


def make_model(model_type: str, **extra):
    """A random model in evaluation mode; `extra` goes into its config."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **FAMILIES[model_type] | extra))
    with torch.no_grad():
        for parameter in model.parameters():  # biases too, which start at zero
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()
