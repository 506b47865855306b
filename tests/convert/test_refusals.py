"""Wrong input: one line that names the tensor or gives the valid numbers, and nothing written."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.convert.gqa import convert_gqa

from .tiny import make_config, make_gpt2, make_model

K1 = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def src(tmp_path):
    """A whole, sharded checkpoint for a test to damage."""
    make_model(make_config("llama")).to(torch.bfloat16).save_pretrained(tmp_path / "src", max_shard_size="30KB")
    return tmp_path / "src"


def refuse(src, tmp_path, match, error=UserError, **options):
    out = tmp_path / "out"
    with pytest.raises(error, match=match) as caught:
        convert_gqa(src, out, **{"kv_heads": 2, "method": "mean", **options})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not out.exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def shard_of(src, name):
    return src / json.loads((src / "model.safetensors.index.json").read_text())["weight_map"][name]


def edit(src, name, change):
    """Change one tensor in its shard; None removes it."""
    state = load_file(shard_of(src, name))
    state[name] = change(state[name])
    save_file({k: v for k, v in state.items() if v is not None}, shard_of(src, name), metadata={"format": "pt"})


def edit_config(src, **changes):
    config = json.loads((src / "config.json").read_text()) | changes
    (src / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_index(src, change):
    path = src / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("kv_heads", [0, -1, 3, 5, 8])
def test_heads_that_do_not_divide(src, tmp_path, kv_heads):
    refuse(src, tmp_path, f"4 KV heads cannot form {kv_heads} groups; try 1, 2, 4", kv_heads=kv_heads)


def test_gpt2_only_becomes_mqa(tmp_path):
    make_model(make_gpt2()).save_pretrained(tmp_path / "src")
    refuse(
        tmp_path / "src", tmp_path, "2 KV heads are not possible: a gpt_bigcode model holds one KV head or all; try 1$"
    )


def test_unknown_method_suggests_the_nearest(src, tmp_path):
    refuse(src, tmp_path, "unknown method 'maen'; did you mean mean?", method="maen")
    refuse(src, tmp_path, "unknown method 'xyz'; known: aligned, first, mean, random, svd", method="xyz")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(src, tmp_path, bad):
    edit(src, K1, lambda tensor: tensor.index_fill(0, torch.tensor([3]), bad))
    refuse(src, tmp_path, f"tensor {re.escape(K1)} holds 64 NaN or Inf values")


def test_wrong_shape(src, tmp_path):
    edit(src, K1, lambda tensor: tensor[:32].clone())
    refuse(src, tmp_path, rf"tensor {re.escape(K1)} has shape \[32, 64\]; the config says \[64, 64\]")


def test_wrong_shape_of_an_untouched_tensor(src, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    edit(src, name, lambda tensor: tensor.T.contiguous())
    refuse(src, tmp_path, rf"tensor {re.escape(name)} has shape \[96, 64\]; the config says \[64, 96\]")


def test_reinitialised_heads_are_a_shape_mismatch(src, tmp_path):
    edit_config(src, num_key_value_heads=2)
    refuse(src, tmp_path, r"k_proj.weight has shape \[64, 64\]; the config says \[32, 64\]", kv_heads=1)


def test_missing_tensor(src, tmp_path):
    edit(src, K1, lambda tensor: None)
    refuse(src, tmp_path, f"the index promises tensor {re.escape(K1)}")
    edit_index(src, lambda weight_map: weight_map.pop(K1))
    refuse(src, tmp_path, f"tensor {re.escape(K1)} is missing; a llama model with this config needs it")


def test_unknown_tensor(src, tmp_path):
    edit(src, K1, lambda tensor: tensor)
    state = load_file(shard_of(src, K1))
    state["model.layers.1.self_attn.k_norm.weight"] = torch.ones(16)
    save_file(state, shard_of(src, K1))
    refuse(src, tmp_path, "holds tensor model.layers.1.self_attn.k_norm.weight, which the index does not name")
    edit_index(src, lambda weight_map: weight_map.update({"model.layers.1.self_attn.k_norm.weight": weight_map[K1]}))
    refuse(src, tmp_path, "tensor model.layers.1.self_attn.k_norm.weight has no place in a llama model")


def test_bias_that_the_config_denies(src, tmp_path):
    name = "model.layers.1.self_attn.k_proj.bias"
    state = load_file(shard_of(src, K1)) | {name: torch.ones(64)}
    save_file(state, shard_of(src, K1))
    edit_index(src, lambda weight_map: weight_map.update({name: weight_map[K1]}))
    refuse(src, tmp_path, f"tensor {re.escape(name)} has no place")


def test_more_layers_than_the_config_says(src, tmp_path):
    edit_config(src, num_hidden_layers=1)
    refuse(src, tmp_path, r"tensor model\.layers\.1\..* has no place")


def test_missing_shard(src, tmp_path):
    shard = shard_of(src, K1)
    shard.unlink()
    refuse(src, tmp_path, f"1 of .* shards missing: {shard.name}")


@pytest.mark.parametrize("target", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", 3])
def test_index_that_points_outside(src, tmp_path, target):
    edit_index(src, lambda weight_map: weight_map.update({K1: target}))
    refuse(src, tmp_path, f"puts tensor {re.escape(K1)} into .*outside the checkpoint's folder")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_broken_index(src, tmp_path, text):
    (src / "model.safetensors.index.json").write_text(text)
    refuse(src, tmp_path, "index")


def test_key_twice_in_the_index(src, tmp_path):
    path = src / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"weight_map": {', f'"weight_map": {{"{K1}": "x.safetensors",'))
    refuse(src, tmp_path, "twice")


def header(table, body=b""):
    raw = json.dumps(table).encode()
    return struct.pack("<Q", len(raw)) + raw + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 64,
        struct.pack("<Q", 10) + b"not json!!",
        header([]),
        header({"a": {}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 4),  # truncated
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 12),  # too long
        header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"\0" * 8),  # shape too large
        header({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}}),
        header({"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}, b"\0" * 8),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", 8]}}, b"\0" * 8),
        header({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, b"\0" * 8),
        header({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 8),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, b"\0" * 8),
        header({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}}, b"\0" * 6),
        header({"a": 3}),
        header({"__metadata__": 3}),
        header(
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},  # overlap
            },
            b"\0" * 12,
        ),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    ],
)
def test_damaged_shard(src, tmp_path, data):
    shard_of(src, K1).write_bytes(data)
    refuse(src, tmp_path, shard_of(src, K1).name)


def test_unreadable_dtype(src, tmp_path):
    shard_of(src, K1).write_bytes(header({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"\0"))
    refuse(src, tmp_path, "tensor a has dtype F4")


def test_integer_heads(src, tmp_path):
    edit(src, K1, lambda tensor: tensor.to(torch.int32))
    refuse(src, tmp_path, f"tensor {re.escape(K1)} is I32")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": ...}, "names no model_type"),
        ({"model_type": "lama"}, "family 'lama' is not supported; the nearest name is llama"),
        ({"model_type": "bloom"}, "family 'bloom' is not supported"),
        ({"model_type": "gpt_neox"}, "family 'gpt_neox' is not supported"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 16}, "MLA already"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
        ({"num_attention_heads": "many"}, "says num_attention_heads = 'many'; it must be a positive number"),
        ({"num_attention_heads": 0}, "says num_attention_heads = 0"),
        ({"num_key_value_heads": 0}, "says num_key_value_heads = 0"),
        ({"num_hidden_layers": -1}, "says num_hidden_layers = -1"),
        ({"head_dim": 2.5}, "says head_dim = 2.5"),
        ({"num_attention_heads": 6, "head_dim": 16}, "its 6 query heads cannot share 4 KV heads evenly"),
    ],
)
def test_configs_that_cannot_be(src, tmp_path, changes, match):
    edit_config(src, **changes)
    refuse(src, tmp_path, match)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "\x00", "{" * 100_000])
def test_broken_config(src, tmp_path, text):
    (src / "config.json").write_text(text)
    refuse(src, tmp_path, "config")


def test_gpt2_features_without_a_place(tmp_path):
    make_model(make_gpt2(scale_attn_by_inverse_layer_idx=True)).save_pretrained(tmp_path / "src")
    refuse(tmp_path / "src", tmp_path, "scale_attn_by_inverse_layer_idx is true", kv_heads=1)


def test_sources_that_are_none(src, tmp_path):
    refuse(tmp_path / "nowhere", tmp_path, "does not exist")
    refuse("a/b/c", tmp_path, "does not exist")
    refuse("some/repo", tmp_path, "some/repo .*Hub cannot be reached", error=EnvironmentFailure)
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", tmp_path, "config")
    (tmp_path / "file.txt").write_text("hello")
    refuse(tmp_path / "file.txt", tmp_path, "GGUF")
    (tmp_path / "file.gguf").write_bytes(b"GGUF\x03\0\0\0")
    refuse(tmp_path / "file.gguf", tmp_path, "file.gguf cannot be read as GGUF: it ends within its header")
    for path in src.glob("*.safetensors*"):
        path.unlink()
    refuse(src, tmp_path, "holds no weights")
    (src / "config.json").unlink()
    (src / "adapter_config.json").write_text("{}")
    refuse(src, tmp_path, "PEFT adapter")


def test_source_under_a_name_that_the_work_uses(src, tmp_path):
    for part in ("new", "old"):
        hidden = src.rename(tmp_path / f".out.kvfold-{part}")
        with pytest.raises(UserError, match="inside one another"):
            convert_gqa(hidden, tmp_path / "out", kv_heads=2, method="mean")
        src = hidden.rename(tmp_path / "src")
    convert_gqa(src, tmp_path / "out", kv_heads=2, method="mean")


@pytest.mark.parametrize("paths", [("", "out"), ("src", "")])
def test_empty_names(src, tmp_path, paths, monkeypatch):
    """An unset shell variable is not the current directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is empty"):
        convert_gqa(*paths, kv_heads=2, method="mean", overwrite=True)


def test_links_that_lead_nowhere(tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("dangling", "loop"):
        refuse(tmp_path / name, tmp_path, "leads nowhere")


def test_dry_run_refuses_what_the_run_would(src, tmp_path):
    edit(src, K1, lambda tensor: tensor.to(torch.float8_e4m3fn))
    refuse(src, tmp_path, f"tensor {re.escape(K1)} is F8_E4M3", dry_run=True)


def test_out_inside_source_or_around_it(src, tmp_path):
    for out in (src / "gqa", src, tmp_path):
        with pytest.raises(UserError, match=r"inside one another|exists"):
            convert_gqa(src, out, kv_heads=2, method="mean")
        with pytest.raises(UserError, match=r"inside one another|not a checkpoint"):
            convert_gqa(src, out, kv_heads=2, method="mean", overwrite=True)
    assert (src / "config.json").exists()


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"max_shard_size": 0}, {"max_shard_size": -5}])
def test_bad_options(src, tmp_path, options):
    refuse(src, tmp_path, str(next(iter(options.values()))), **options)
