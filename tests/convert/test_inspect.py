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
from kvfold.convert.mla.convert import convert_mla

from .mla.plain_models import LLAMA3, make_plain
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
    config.rope_parameters = LLAMA3
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
    assert report.source_kv_elements_per_token_per_layer is None
    assert (report.form, report.readers) == (None, None)
    if kind == "deepseek_v3":
        assert (report.attention_kind, report.kv_elements_per_token_per_layer) == ("MLA", 32)
        assert "MLA already" in report.conversions[0].reason
        assert "has no kvfold block" in report.conversions[-1].reason
        assert report.unpadded_kv_elements_per_token_per_layer == 32
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


STOCK, PLAIN = ["deepseek_v3", "plain"], ["plain"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
# Case of `tiny` -> what its config says beside, the forms of MLA that it can have, and why not all.
FORMS_OF = {
    "llama": ({}, STOCK, ""),
    "llama-head-dim": ({}, STOCK, ""),
    "llama-tied": ({}, STOCK, ""),
    "llama3": ({"rope_parameters": LLAMA3}, STOCK, ""),
    "qwen2": ({}, STOCK, ""),
    "smollm3": ({}, STOCK, ""),
    "phi3": ({"sliding_window": None}, STOCK, ""),
    "mistral": ({"sliding_window": None}, STOCK, ""),
    "mistral-window": ({}, [], "its sliding window of 64 tokens has no place"),
    "llama-bias": ({}, PLAIN, "has no place for model.layers.0.mlp.down_proj.bias"),
    "llama-yarn": ({"rope_parameters": YARN}, [], "its RoPE scales what it turns by 1.13863"),
    "stablelm": ({}, PLAIN, "its norm is a LayerNorm"),
    "qwen3": ({}, [], "QK-norm"),
    "olmo2": ({}, [], "QK-norm"),
    "gemma2": ({}, [], "attn_logit_softcapping"),
    "phi": ({}, [], "the MLA form of a phi model is not built; it is for llama,"),
}


@pytest.mark.parametrize("case", FORMS_OF)
def test_forms_of_latent_attention_are_those_that_conversion_gives(case, tmp_path):
    said, forms, reason = FORMS_OF[case]
    base = case if case in CASES else {"llama3": "llama", "mistral-window": "mistral", "llama-yarn": "llama"}[case]
    config = make_config(base, 2)
    for name, value in said.items():
        setattr(config, name, value)
    make_model(config).save_pretrained(tmp_path / "src")
    row = inspect_model(tmp_path / "src").conversions[-1]
    assert (row.to, row.possible, row.forms) == ("mla", bool(forms), forms)
    assert (reason in row.reason) if reason else not row.reason
    for form in STOCK:
        arguments = {"kv_rank": 8, "rope_dim": 4, "rope_select": "high", "calib": ["none"], "dry_run": True}
        if form in forms:
            convert_mla(tmp_path / "src", tmp_path / "out", form=form, **arguments)
            continue
        with pytest.raises(UserError):
            convert_mla(tmp_path / "src", tmp_path / "out", form=form, **arguments)


def test_gpt2_has_no_frequency_to_keep(inspected):
    assert "no RoPE" in inspected(make_model(make_gpt2())).conversions[-1].reason


def test_plain_form(tmp_path):
    report = inspect_model(make_plain(tmp_path, "smollm3"))
    assert (report.family, report.supported, report.attention_kind) == ("mla_smollm3", True, "MLA")
    assert report.architecture == "MlaSmolLM3ForCausalLM"
    sizes = (report.kv_lora_rank, report.qk_nope_head_dim, report.qk_rope_head_dim, report.v_head_dim)
    assert (sizes, report.q_lora_rank) == ((12, 6, 4, 7), None)
    assert (report.head_dim, report.rotary_dim, report.rope_pairing, report.nope_layers) == (10, 4, "half", 1)
    assert (report.form, report.readers) == ("plain", None)
    assert report.kv_elements_per_token_per_layer == report.unpadded_kv_elements_per_token_per_layer == 16
    assert report.kv_bytes_per_token == 16 * 2 * 8
    *heads, mla, plain = report.conversions
    assert not any(row.possible for row in heads)
    assert (mla.possible, mla.forms, mla.reason) == (True, ["deepseek_v3"], "as it is")
    assert (plain.possible, plain.reason) == (False, "it is in the plain form already")


@pytest.mark.parametrize(
    ("case", "extra", "reason"),
    [
        ("stablelm", {}, "LayerNorm"),
        ("llama", {"rope_frequencies": [[1, 2], [1, 2]]}, "not every n-th from 0"),
        ("llama", {"rope_frequencies": [[0, 2], [0, 1]]}, "layer 1 keeps other rotary frequencies"),
    ],
)
def test_plain_form_that_cannot_be_exported(case, extra, reason, tmp_path):
    row = inspect_model(make_plain(tmp_path, case, **extra)).conversions[2]
    assert (row.to, row.possible) == ("mla", False)
    assert reason in row.reason


@pytest.mark.parametrize("pad", [False, True])
def test_stock_form(pad, tmp_path):
    """An export knows what it was made from, and says when it caches more than that."""
    config = make_config("smollm3", 2)  # 64 elements a token and layer
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10.0}
    make_model(config).save_pretrained(tmp_path / "src")
    sizes = {"kv_rank": 16, "rope_dim": 8, "rope_select": "high", "calib": ["none"]}
    readers = ["transformers", "vllm"] if pad else ["sglang"]
    convert_mla(tmp_path / "src", tmp_path / "out", pad_to_engine=pad, readers=readers, **sizes)
    report = inspect_model(tmp_path / "out")
    assert (report.form, report.readers) == ("deepseek_v3", readers)
    assert (report.family, report.supported, report.attention_kind) == ("deepseek_v3", True, "MLA")
    assert (report.rope_pairing, report.nope_layers, report.tied_head) == ("interleaved", 1, False)
    assert (report.rotary_dim, report.head_dim) == ((64, 128) if pad else (8, 24))
    assert report.kv_elements_per_token_per_layer == (576 if pad else 24)
    assert report.unpadded_kv_elements_per_token_per_layer == 24
    assert report.source_kv_elements_per_token_per_layer == 64
    assert [("576 elements" in line, "more than the 64 of" in line) for line in report.warnings] == [(True, True)] * pad
    assert [row.to for row in report.conversions if row.possible] == ["plain"]


def test_damaged_export_is_no_candidate(tmp_path):
    make_model(make_config("llama")).save_pretrained(tmp_path / "src")
    convert_mla(tmp_path / "src", tmp_path / "out", kv_rank=16, rope_dim=8, rope_select="high", calib=["none"])
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 95}))
    row = inspect_model(tmp_path / "out").conversions[-1]
    assert not row.possible
    assert "config.json says intermediate_size = 95 where the export said something else" in row.reason
    del config["kvfold"]["latent_scales"]
    path.write_text(json.dumps(config))
    assert "block of config.json is damaged" in inspect_model(tmp_path / "out").conversions[-1].reason
