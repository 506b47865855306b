"""Random all-dense DeepSeek-V3 checkpoints: what an engine reads of them says whether it runs right, export aside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..tiny import MODEL_DIR

# What every reader demands of the config, whatever the sizes; see docs/engines.md.
DENSE = {
    "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "moe_layer_freq": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "attention_bias": False, "rope_interleave": True,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
}  # fmt: skip


def make_random(folder: Path, *, seed: int = 0, **sizes: Any) -> Path:
    """Save a random fp32 model with the embedded model's tokenizer, as stock transformers saves it.

    Args:
        folder: where to; made anew.
        sizes: what the config says beside `DENSE`.
    """
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    tokenizer = json.loads((MODEL_DIR / "config.json").read_text())
    special = {name: tokenizer[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")}
    small = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DeepseekV3Config(**{**DENSE, **special, **small, **sizes})
    config.num_key_value_heads = config.num_attention_heads
    config.first_k_dense_replace = config.num_hidden_layers
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # as loud as a trained model's: small ones would hide a fault
            gain = name.endswith("norm.weight")
            weight.normal_(1.0 if gain else 0.0, 0.1 if gain or "bias" in name else weight.shape[-1] ** -0.5)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    for path in MODEL_DIR.glob("tokenizer*"):
        shutil.copy(path, folder)
    # transformers leaves out what is its own default, and engines have other defaults.
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **said, **DENSE, **sizes}, indent=2))
    return folder
