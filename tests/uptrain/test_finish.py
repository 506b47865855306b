"""What is written is what was trained: the same form, names and dtype, whatever the family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.common.errors import UserError
from kvfold.common.loading import load_model
from kvfold.convert.mla.convert import convert_mla
from kvfold.convert.plain import convert_plain
from kvfold.uptrain.data.store import open_store
from kvfold.uptrain.judge import held_out_losses
from kvfold.uptrain.objective import Trainee
from kvfold.uptrain.recipe import Recipe
from kvfold.uptrain.run import uptrain

from .micro import micro_checkpoint, micro_recipe, micro_text, save


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return micro_text(tmp_path_factory.mktemp("text"))


def heal(source: Path, text: Path, out: Path, **changes) -> Recipe:
    """Train for a few steps, and see that the checkpoint written is as good as the model that was trained."""
    recipe = micro_recipe(source, text, out, **{"steps": 4, "save_every": 0, **changes})
    report = uptrain(recipe)
    (folder,) = recipe.run_folder.glob("tokens-*")
    store = open_store(folder)
    trainee = Trainee(load_model(out, dtype="float32", device="cpu"))
    losses = held_out_losses(trainee, store.held_out, Accelerator(cpu=True), windows=4, micro_batch_size=4)
    assert losses == pytest.approx(report.held_out, rel=1e-5)
    assert report.held_out != pytest.approx(report.held_out_before, rel=1e-3)
    return recipe


def family(folder: Path, kind: str, **changes) -> Path:
    """A random model of a family, saved as transformers saves it."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, vocab_size=2048, **changes)
    return save(AutoModelForCausalLM.from_config(config), folder)


LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "qwen2": LLAMA_LIKE,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi": LLAMA_LIKE,
}


@pytest.mark.parametrize("train", ["attention", "attention+norms", "all"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_keeps_its_names(kind, train, text, tmp_path):
    source = family(tmp_path / "source", kind, **FAMILIES[kind])
    heal(source, text, tmp_path / "out", train=train)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    attention = {name for name in before if "attn" in name or "attention" in name}
    assert attention & changed
    if train == "attention":
        assert changed <= attention
    if train == "all":
        untouched = [name for name in before.keys() - changed if "rotary" not in name and "masked" not in name]
        # Keys' biases drop out of softmax, and an expert may see no token.
        assert all("k_proj.bias" in name or "experts" in name for name in untouched), untouched


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_adapters_are_folded_into_the_weights(kind, text, tmp_path):
    source = family(tmp_path / "source", kind, **FAMILIES[kind])
    heal(source, text, tmp_path / "out", train="attention", lora_rank=4, learning_rate=3e-2)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "attn" in name and name.endswith("weight")}


def sharded(folder: Path) -> Path:
    """The micro checkpoint in several files, with an untied head."""
    source = micro_checkpoint(folder, tie_word_embeddings=False)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return source


def test_shards_stay_as_they_were(text, tmp_path):
    source = sharded(tmp_path / "source")
    heal(source, text, tmp_path / "out")
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == shards


@pytest.fixture(scope="module")
def mha(tmp_path_factory) -> Path:
    return micro_checkpoint(tmp_path_factory.mktemp("mha") / "model", head_dim=16, num_key_value_heads=2)


@pytest.fixture(params=["plain", "deepseek_v3"])
def latent(request, mha, tmp_path) -> Path:
    convert_mla(
        mha, tmp_path / "latent", kv_rank=24, rope_dim=8, rope_select="high", form=request.param, calib=("none",)
    )
    return tmp_path / "latent"


def test_latent_models_keep_their_form(latent, text, tmp_path):
    heal(latent, text, tmp_path / "out", train="attention+norms")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (latent, tmp_path / "out"))
    scales = ("latent_scale", "latent_scales", "query_scales")
    for config in (before, after):
        config["kvfold"] = {key: value for key, value in config["kvfold"].items() if key not in scales}
    assert after == before
    old, new = load_file(latent / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in new.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in old.items()
    }


@pytest.mark.parametrize(("kind", "dtype"), [(torch.float32, "bfloat16"), (torch.bfloat16, None)])
def test_a_stock_export_in_bf16_comes_back_in_bf16(text, tmp_path, kind, dtype):
    """And so does the plain form that is made of it, as it would be of what came in."""
    source = micro_checkpoint(tmp_path / "source", dtype=kind)
    options = {"kv_rank": 24, "rope_dim": 8, "rope_select": "high", "calib": ("none",), "dtype": dtype}
    convert_mla(source, tmp_path / "latent", **options)
    uptrain(micro_recipe(tmp_path / "latent", text, tmp_path / "out", steps=2, train="attention"))
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    for folder in ("latent", "out"):
        convert_plain(tmp_path / folder, tmp_path / f"{folder}-plain")
        tensors = load_file(tmp_path / f"{folder}-plain" / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    said = [json.loads((tmp_path / folder / "config.json").read_text())["kvfold"] for folder in ("latent", "out")]
    assert said[0]["dtype"] == said[1]["dtype"] and said[0]["plain"]["dtype"] == said[1]["plain"]["dtype"]


def test_compressed_queries_are_not_trained(mha, text, tmp_path):
    options = {"kv_rank": 24, "rope_dim": 8, "rope_select": "high", "calib": ("none",)}
    convert_mla(mha, tmp_path / "latent", q_rank=16, **options)
    with pytest.raises(UserError, match=r"compressed queries.*kvfold convert plain"):
        uptrain(micro_recipe(tmp_path / "latent", text, tmp_path / "out", steps=2))
