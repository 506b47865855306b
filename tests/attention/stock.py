"""transformers' own attention modules in fp64, driven with our angles and our masks.

Under `sdpa`, as their eager softmax works in fp32, whatever it is given.
"""

from __future__ import annotations

import torch
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaAttention


def llama(num_kv_heads, head_dim, bias):
    config = LlamaConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        attention_bias=bias,
        attn_implementation="sdpa",
    )
    return LlamaAttention(config, 0).double().eval()


def deepseek(q_lora_rank, interleave, bias):
    config = DeepseekV3Config(
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=16,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        rope_interleave=interleave,
        attention_bias=bias,
        attn_implementation="sdpa",
    )
    module = DeepseekV3Attention(config, 0).double().eval()
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        if (theirs := getattr(module, name)) is not None:  # in fp32 too
            ours = torch.nn.RMSNorm(len(theirs.weight), eps=theirs.variance_epsilon, dtype=torch.float64)
            torch.nn.init.uniform_(ours.weight, 0.5, 2.0)
            setattr(module, name, ours)
    return module


def randomise_biases(module):
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)


def forward(module, x, rope, visible):
    """The module's output for `x` [B, T, D] under a boolean mask [B, 1, T, T]."""
    angles = torch.arange(x.shape[1])[:, None] * torch.tensor(rope.frequencies, dtype=torch.float64)
    angles = torch.cat([angles, angles], -1)[None]  # [1, T, 2F]
    return module(x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=visible)[0]


def padded(batch, tokens):
    """A causal mask [B, 1, T, T] of which the first sequence has two tokens of padding at its start."""
    visible = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool).tril()
    visible[0, :, :, :2] = False
    return visible
