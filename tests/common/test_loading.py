"""Models and tokenizers opened from every kind of SOURCE, and every way in which one can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.common.loading import load_model, load_tokenizer

from ..gguf_file import ALPHABET, write_gguf

K_PROJ = "model.layers.0.self_attn.k_proj.weight"


def llama(**settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    base = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**{**base, **settings}))


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A llama in bfloat16 with a byte tokenizer."""
    path = tmp_path / "model"
    llama().bfloat16().save_pretrained(path)
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def configure(checkpoint: Path, **changes) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reweigh(checkpoint: Path, change) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


def refusal(checkpoint: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(checkpoint)
    message = str(caught.value)
    assert "\n" not in message
    assert "checkpoint" in message or str(checkpoint) in message or "model type" in message
    return message


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.float32),
        ("checkpoint", torch.bfloat16),
        ("float16", torch.float16),
        ("float64", torch.float64),
    ],
)
def test_weights_and_dtype(checkpoint, dtype, expected):
    model = load_model(checkpoint, dtype=dtype, device="cpu")
    assert model.dtype == expected
    assert not model.training
    assert model.device == torch.device("cpu")
    stored = load_file(checkpoint / "model.safetensors")[K_PROJ]
    assert torch.equal(model.state_dict()[K_PROJ], stored.to(expected))


def test_a_tied_head_may_be_absent(tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_nothing_is_printed_and_settings_come_back(checkpoint, capfd):
    logging.set_verbosity_warning()
    before = logging.WARNING, logging.is_progress_bar_enabled()
    load_model(checkpoint)
    load_tokenizer(checkpoint)
    reweigh(checkpoint, lambda tensors: tensors.pop(K_PROJ))
    refusal(checkpoint)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_tensors_that_are_missing(checkpoint):
    reweigh(checkpoint, lambda tensors: tensors.pop(K_PROJ))
    assert f"the weights lack {K_PROJ};" in refusal(checkpoint)


def test_an_untied_head_that_is_missing(checkpoint):
    reweigh(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    assert "the weights lack lm_head.weight;" in refusal(checkpoint)


def test_more_layers_than_weights(checkpoint):
    configure(checkpoint, num_hidden_layers=3)
    message = refusal(checkpoint)
    assert "the weights lack model.layers.2.input_layernorm.weight" in message
    assert "and 6 more tensors" in message


def test_tensors_that_have_no_place(checkpoint):
    reweigh(checkpoint, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.bias": torch.ones(16)}))
    assert "the weights hold model.layers.0.self_attn.k_proj.bias," in refusal(checkpoint)


def test_stored_buffers_are_no_surprise(checkpoint):
    reweigh(checkpoint, lambda tensors: tensors.update({"model.rotary_emb.inv_freq": torch.ones(4)}))
    load_model(checkpoint)
    # EleutherAI's own checkpoints hold their causal masks.
    neo = GPTNeoConfig(vocab_size=99, hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["global"], 1]])
    GPTNeoForCausalLM(neo).save_pretrained(checkpoint)
    mask = {"transformer.h.0.attn.attention.bias": torch.ones(1, 1, 8, 8).tril().bool()}
    reweigh(checkpoint, lambda tensors: tensors.update(mask))
    load_model(checkpoint)


def test_shapes_that_do_not_match(checkpoint):
    configure(checkpoint, num_key_value_heads=4)
    message = refusal(checkpoint)
    assert f"{K_PROJ} (and 3 more) is [16, 32] in the weights but [32, 32] by its config" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "did you mean llama?"),
        ({"model_type": "nothing-like-it"}, "a newer one may know it"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}, "brings its own code"),
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "t5"}, "AutoModelForCausalLM"),
        ({"hidden_size": "wide"}, "says hidden_size = 'wide'; it must be a positive number"),
        ({"hidden_act": "nonsense"}, r"\(KeyError\): 'nonsense'"),
    ],
)
def test_configs_that_do_not_fit(checkpoint, changes, message):
    configure(checkpoint, **changes)
    with pytest.raises(UserError, match=message) as caught:
        load_model(checkpoint)
    assert "\n" not in str(caught.value)


def test_files_that_are_broken(checkpoint):
    weights, config = checkpoint / "model.safetensors", checkpoint / "config.json"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "not fully covered" in refusal(checkpoint)
    weights.unlink()
    assert "no file named model.safetensors" in refusal(checkpoint)
    config.write_text("{")
    assert "not valid JSON" in refusal(checkpoint)
    config.unlink()
    assert "no config.json" in refusal(checkpoint)


def test_a_missing_shard_is_named(checkpoint):
    llama().save_pretrained(checkpoint / "sharded", max_shard_size="50KB")
    shard = sorted((checkpoint / "sharded").glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(checkpoint / "sharded")


def test_an_unreadable_file_is_the_machines_fault(checkpoint, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(EnvironmentFailure, match="Input/output error"):
        load_model(checkpoint)


def test_too_little_memory_is_the_machines_fault(checkpoint, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(EnvironmentFailure, match="does not fit into memory"):
        load_model(checkpoint)


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_paths_that_lead_nowhere(load, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="is a file but not GGUF"):
        load(tmp_path / "notes.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentFailure, match="no owner/name here, and the Hub cannot be reached"):
        load("owner/name", revision="main")


def test_a_revision_is_for_hub_ids(checkpoint):
    with pytest.raises(UserError, match="has no revision v2"):
        load_model(checkpoint, revision="v2")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "bf16"}, "did you mean bfloat16"), ({"device": "cda"}, "device 'cda' is not available")],
)
def test_options_that_do_not_exist(checkpoint, options, message):
    with pytest.raises(UserError, match=message):
        load_model(checkpoint, **options)


def test_a_tokenizer_is_the_models_own(checkpoint):
    assert load_tokenizer(checkpoint)("A", add_special_tokens=False)["input_ids"] == [ALPHABET.index("A")]
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(checkpoint)


def test_gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    tensors = write_gguf(path)
    model, tokenizer = load_model(path), load_tokenizer(path)
    assert (model.config.model_type, model.config.num_key_value_heads) == ("llama", 2)
    values = model.state_dict()["model.layers.0.self_attn.v_proj.weight"]
    assert np.array_equal(values.numpy(), tensors["blk.0.attn_v"])
    assert tokenizer("abcab", add_special_tokens=False)["input_ids"] == [259, 258]
    assert tokenizer.bos_token_id == 0


def test_a_broken_gguf(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(10))
    with pytest.raises(UserError, match=r"cannot load .*broken\.gguf"):
        load_model(tmp_path / "broken.gguf")
