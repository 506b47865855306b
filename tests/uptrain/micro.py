"""A checkpoint that trains in milliseconds, with the embedded model's tokenizer, and a text for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvfold.common.text import builtin_documents
from kvfold.recipes.tiny import MODEL_DIR
from kvfold.uptrain.recipe import Recipe

WINDOW = 32


def micro_checkpoint(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 7, **changes) -> Path:
    """A Llama of two layers that has seen very little."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": 2048,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            **changes,
        }
    )
    return save(LlamaForCausalLM(config), folder, dtype)


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Teach a random model which tokens are frequent, so that it guesses better than even, and save it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    text = " ".join(text[:600] for text in builtin_documents(held_out=False, kinds=["topics"])[30:40])
    ids = torch.tensor(tokenizer(text)["input_ids"][: 16 * WINDOW]).view(-1, WINDOW)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(5):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def micro_text(folder: Path) -> Path:
    """Some twenty-five documents of prose, of which a few are held out."""
    path = folder / "text.jsonl"
    lines = [json.dumps({"text": text[:600]}) for text in builtin_documents(held_out=False, kinds=["topics"])[:25]]
    path.write_text("\n".join(lines))
    return path


def micro_recipe(model: Path, text: Path, out: Path, **changes) -> Recipe:
    """Thirty steps over about two epochs."""
    return Recipe(
        **{
            "model": str(model),
            "out": str(out),
            "data": [str(text)],
            "window": WINDOW,
            "held_out": 0.1,
            "steps": 30,
            "batch_size": 4,
            "micro_batch_size": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 3,
            "eval_every": 10,
            "eval_windows": 4,
            "save_every": 10,
            "train": "all",
            "device": "cpu",
            **changes,
        }
    )
