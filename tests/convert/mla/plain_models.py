"""Tiny models in the plain form, and stock modules that compute in fp64 all through."""

from __future__ import annotations

from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvfold.attention.plain import plain_config
from kvfold.convert.mla.stock import plain_model
from kvfold.convert.source import open_source
from kvfold.convert.stream import compute

BASE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {
    "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, "mla_bias": False,
    "rope_frequencies": [[0, 2], [0, 2]],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

# Name of the case -> model type, and what its config says beside BASE and SIZES.
CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-high": ("llama", {"rope_frequencies": [[0, 1], [0, 1]]}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"mla_bias": True, "use_sliding_window": False, "rms_norm_eps": 1e-6}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "rope_frequencies": [[0, 2], []], "tie_word_embeddings": True}),
    "phi3": ("phi3", {"sliding_window": None}),
    "stablelm": ("stablelm", {}),
}


def make_plain(folder, case="llama", *, dtype=torch.float64, **extra):
    """A random plain model saved in `folder`; weights, biases and gains all large enough to matter."""
    kind, own = CASES[case]
    source = AutoConfig.for_model(kind, **{**BASE, **{k: v for k, v in own.items() if k not in SIZES}, **extra})
    sizes = {key: {**SIZES, **own, **extra}[key] for key in SIZES}
    config = plain_config(source.to_dict(), **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
        for layer, kept in enumerate(sizes["rope_frequencies"]):
            if not kept:  # a layer without positions
                attention = model.model.layers[layer].self_attn
                attention.kv_a_proj_with_mqa.weight[sizes["kv_lora_rank"] :] = 0
    model.to(dtype).save_pretrained(folder)
    return folder


def multiply(folder, end, factor):
    """Multiply the stored tensors whose names end so by `factor`: a number, or a tensor that broadcasts."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensor * factor for name, tensor in tensors.items() if name.endswith(end)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def opened(folder):
    """The plain model in a folder, for export."""
    with open_source(str(folder)) as source:
        return plain_model(source)


def load(folder):
    """The model in a folder, in fp64, computing as exactly as fp64 does."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    return exact(model)


def build(stock, checkpoint):
    """The stock model that an export describes, in fp64, without a file in between."""
    config = AutoConfig.for_model(**stock.config)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    state = {out.name: compute(out, checkpoint) for out in stock.outputs}
    model.load_state_dict(state, strict=True)
    return exact(model)


class _Angles(nn.Module):
    """transformers' own tables of angles, but fp64."""

    def __init__(self, theirs):
        super().__init__()
        init = ROPE_INIT_FUNCTIONS.get(theirs.rope_type) or theirs.compute_default_rope_parameters
        with patch.object(torch, "float", torch.float64):
            self.inv_freq, self.scaling = init(theirs.config, device="cpu")
        assert self.inv_freq.dtype == torch.float64

    def forward(self, x, position_ids):
        angles = position_ids[..., None].double() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def exact(model):
    """The model with norms and angles in fp64, which transformers computes in fp32 whatever the weights are."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                ours = nn.RMSNorm(len(child.weight), eps=child.variance_epsilon, dtype=torch.float64)
                ours.weight = child.weight
                setattr(module, name, ours)
    model.model.rotary_emb = _Angles(model.model.rotary_emb)
    return model


@torch.no_grad()
def logits(model, tokens=201):
    """Of one sequence, positions 0 to 200."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1))
    return model(ids, use_cache=False).logits


def difference(ours, theirs):
    """The largest difference, relative to the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
