"""GGUF files as sources: described by their headers, dequantised for conversion."""

import json

import numpy as np
import torch
from transformers import AutoTokenizer

from kvfold.convert.checkpoint import Checkpoint
from kvfold.convert.gguf import shortest
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.inspect import inspect_model

from ..gguf_file import write_gguf


def test_inspect(tmp_path):
    tensors = write_gguf(tmp_path / "tiny.gguf")
    report = inspect_model(tmp_path / "tiny.gguf")
    assert (report.family, report.attention_kind, report.num_key_value_heads) == ("llama", "GQA", 2)
    assert report.parameters == sum(tensor.size for tensor in tensors.values())
    assert (report.dtype, report.attention_biases) == ("float32", "none")
    assert [row.kv_heads for row in report.conversions] == [[], [1], []]


def test_convert(tmp_path):
    tensors = write_gguf(tmp_path / "tiny.gguf")
    report = convert_gqa(tmp_path / "tiny.gguf", tmp_path / "out", kv_heads=1, method="mean")
    assert (report.source_num_key_value_heads, report.num_key_value_heads) == (2, 1)
    checkpoint = Checkpoint.open(tmp_path / "out")
    values = checkpoint.tensor(checkpoint.tensors["model.layers.0.self_attn.v_proj.weight"])
    expected = tensors["blk.0.attn_v"].reshape(2, 8, 32).mean(0, dtype=np.float64).astype(np.float32)
    assert torch.equal(values, torch.from_numpy(expected))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert "quantization_config" not in config
    assert json.loads((tmp_path / "out/kvfold.json").read_text())["source"]["name"] == "tiny.gguf"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("abcab", add_special_tokens=False)["input_ids"] == [259, 258]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]  # nothing else is left


def test_shortest_decimal_of_an_fp32_number():
    value = float(np.float32(1e-5))
    assert value != 1e-5
    assert shortest({"eps": value, "deep": {"theta": 1e6}, "n": 3, "flag": True}) == {
        "eps": 1e-5, "deep": {"theta": 1e6}, "n": 3, "flag": True
    }  # fmt: skip
