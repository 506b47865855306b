"""What `inspect` says of every family, from headers alone."""

import json
import struct
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.common.errors import UserError
from kvfold.convert import checkpoint
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.inspect import inspect_model

from .tiny import CASES, make_config, make_gpt2, make_model


@pytest.fixture
def inspected(tmp_path):
    """Save a model and inspect it; further arguments go to `inspect_model`."""

    def inspect(model, **options):
        model.save_pretrained(tmp_path / "model")
        return inspect_model(tmp_path / "model", **options)

    return inspect


def conversions(report):
    return {row.to: row.kv_heads for row in report.conversions}


@pytest.mark.parametrize("case", CASES)
def test_every_family(case, inspected):
    model = make_model(make_config(case, 2))
    report = inspected(model)
    assert report.supported
    assert (report.family, report.architecture) == (CASES[case][0], type(model).__name__)
    assert (report.num_attention_heads, report.num_key_value_heads, report.attention_kind) == (4, 2, "GQA")
    assert report.parameters == sum(p.numel() for p in model.parameters())
    assert report.weight_bytes == 8 * report.parameters
    assert report.dtype == "float64"
    assert report.kv_elements_per_token_per_layer == 2 * 2 * report.head_dim
    assert report.kv_bytes_per_token == report.kv_elements_per_token_per_layer * 2 * 8
    assert conversions(report) == {"gqa": [], "mqa": [1], "mla": []}
    attention = model.model.layers[0].self_attn
    biased = {n for n, m in attention.named_children() if "norm" not in n and getattr(m, "bias", None) is not None}
    assert set(report.attention_biases.split(", ")) == (biased or {"none"})
    assert (report.qk_norm != "no") == any("norm" in name for name, _ in attention.named_children())
    assert report.tied_head == model.config.tie_word_embeddings


@pytest.mark.parametrize(("case", "kind"), [("qwen3", "head"), ("stablelm-qk-norm", "heads"), ("olmo2", "all")])
def test_qk_norm_and_what_it_means(case, kind, inspected):
    report = inspected(make_model(make_config(case)))
    assert report.qk_norm == kind
    assert "does not allow mixing channels" in report.conversions[0].reason


def test_rope_of_every_kind(inspected):
    report = inspected(make_model(make_config("gemma3_text")))
    assert report.rope_theta == "1000000.0 (full_attention), 10000.0 (sliding_attention)"
    assert report.rope_type == "default"
    report = inspected(make_model(make_config("stablelm")))
    assert (report.rotary_dim, report.head_dim) == (4, 16)
    report = inspected(make_model(make_config("smollm3")))
    assert report.nope_layers == 1
    assert inspected(make_model(make_config("cohere"))).rope_pairing == "interleaved"
    report = inspected(make_model(make_gpt2()))
    assert (report.rope_type, report.rotary_dim, report.nope_layers) == ("none", 0, 2)
    config = make_config("llama")
    config.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    assert inspected(make_model(config)).rope_type == "llama3"


def test_sliding_window_bounds_the_cache(inspected):
    report = inspected(make_model(make_config("mistral")), context=1000)
    assert (report.sliding_window, report.sliding_layers) == (64, 2)
    assert report.kv_bytes == 63 * report.kv_bytes_per_token
    report = inspected(make_model(make_config("llama")), context=1000)
    assert (report.sliding_window, report.sliding_layers) == (None, 0)
    assert report.kv_bytes == 1000 * report.kv_bytes_per_token
    with pytest.raises(UserError, match="context of 0"):
        inspected(make_model(make_config("llama")), context=0)


def test_mha_choices_and_gpt2(inspected):
    assert conversions(inspected(make_model(make_config("llama")))) == {"gqa": [2], "mqa": [1], "mla": []}
    report = inspected(make_model(make_gpt2()))
    assert conversions(report) == {"gqa": [], "mqa": [1], "mla": []}
    assert report.conversions[0].reason == "a gpt_bigcode model holds one KV head or all"
    assert report.conversions[1].reason == "the result is a gpt_bigcode model"
    assert report.attention_biases == "c_attn, c_proj"


def test_result_of_a_conversion(tmp_path):
    make_model(make_gpt2()).save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=1, method="mean")
    report = inspect_model(tmp_path / "out")
    assert (report.family, report.attention_kind, report.num_key_value_heads) == ("gpt_bigcode", "MQA", 1)
    assert "single KV head" in report.conversions[0].reason


@pytest.mark.parametrize("kind", ["gpt_neox", "falcon", "deepseek_v3"])
def test_families_without_a_row_are_described_all_the_same(kind, inspected):
    extra = {"deepseek_v3": {"kv_lora_rank": 24, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                             "v_head_dim": 16, "n_routed_experts": 2, "n_group": 1, "topk_group": 1,
                             "num_experts_per_tok": 1, "first_k_dense_replace": 2}}  # fmt: skip
    config = AutoConfig.for_model(
        kind, hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=97, intermediate_size=96,
        **extra.get(kind, {}),
    )  # fmt: skip
    report = inspected(AutoModelForCausalLM.from_config(config))
    assert not report.supported
    assert not any(row.possible for row in report.conversions)
    if kind == "deepseek_v3":
        assert (report.attention_kind, report.kv_elements_per_token_per_layer) == ("MLA", 32)
        assert "MLA already" in report.conversions[0].reason
    else:
        assert f"family {kind!r} is not supported" in report.conversions[0].reason


def test_quantised_source_is_no_candidate(tmp_path):
    make_model(make_config("llama")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "quantised (gptq)" in inspect_model(tmp_path).conversions[0].reason


def test_edited_config_is_no_candidate(tmp_path):
    """Told before the work: `convert` would refuse it."""
    make_model(make_config("llama")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = inspect_model(tmp_path)
    assert not any(row.possible for row in report.conversions)
    assert "the config says [32, 64]" in report.conversions[0].reason


def test_reads_headers_only(tmp_path, monkeypatch):
    """A terabyte of (sparse) weights is described in no time, and no tensor is read."""
    config = make_config("llama")
    config.save_pretrained(tmp_path)
    tensors, end = {}, 0
    for number in range(4):
        tensors[f"t{number}"] = {"dtype": "BF16", "shape": [1 << 37], "data_offsets": [end, end + (1 << 38)]}
        end += 1 << 38
    raw = json.dumps(tensors).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    monkeypatch.setattr(checkpoint.Checkpoint, "pieces", None)
    monkeypatch.setattr(checkpoint.Checkpoint, "tensor", None)
    start = time.monotonic()
    assert inspect_model(tmp_path).parameters == 1 << 39
    assert time.monotonic() - start < 5


def test_bin_checkpoint(tmp_path):
    model = make_model(make_config("llama"))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    report = inspect_model(tmp_path)
    assert report.parameters == sum(p.numel() for p in model.parameters())
    assert report.weight_bytes == 8 * report.parameters
