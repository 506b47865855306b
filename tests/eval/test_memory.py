from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoConfig

from kvfold.cli.eval.calculators import memory as command
from kvfold.common.errors import UserError
from kvfold.common.kvcache import kv_bytes
from kvfold.eval.memory import memory, memory_of
from kvfold.eval.shape import shape_of

from ..gguf_file import write_gguf
from .conftest import LLAMA_LIKE, make_model

GIB = 2**30
SEVEN_B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
WHOLE = {**SEVEN_B, "intermediate_size": 11008, "vocab_size": 32000}


@pytest.mark.parametrize(("kv_heads", "kind", "gib"), [(None, "MHA", 4.0), (4, "GQA", 0.5), (1, "MQA", 0.125)])
def test_caches_of_the_books(kv_heads, kind, gib):
    report = memory(context=8192, num_key_value_heads=kv_heads, **SEVEN_B)
    assert report.kv_bytes == gib * GIB
    assert (report.attention_kind, report.dtype) == (kind, "float16")
    assert memory(context=8192, num_key_value_heads=kv_heads, batch_size=3, **SEVEN_B).kv_bytes == 3 * gib * GIB


def test_scores_of_the_books():
    report = memory(context=131_072, num_attention_heads=32)
    assert f"{report.attention_score_bytes_per_head / 1e9:.2f}" == "34.36"
    assert report.attention_score_bytes == 32 * report.attention_score_bytes_per_head
    assert report.kv_bytes is None


def test_a_model_of_seven_billion_parameters():
    """Llama-2-7B has 6,738,415,616."""
    report = memory(context=1000, batch_size=2, dtype="float32", **WHOLE)
    assert report.parameters == 6_738_415_616
    assert report.weight_bytes == 4 * report.parameters
    assert report.logit_bytes == 4 * 2 * 1000 * 32000
    assert report.total_bytes == report.weight_bytes + report.kv_bytes
    assert report.missing == ""
    tied = memory(context=1000, tie_word_embeddings=True, gated_mlp=False, **WHOLE)
    assert report.parameters - tied.parameters == 4096 * 32000 + 32 * 4096 * 11008


def test_a_latent_by_hand():
    report = memory(context=100, kv_lora_rank=512, qk_rope_head_dim=64, **WHOLE)
    assert report.kv_bytes == 100 * 32 * 576 * 2
    assert (report.weight_bytes, report.missing) == (None, "give --qk-nope-head-dim, --v-head-dim")
    assert memory(context=1, kv_lora_rank=512, **WHOLE).kv_bytes is None


def test_what_is_missing_is_said_and_the_rest_comes():
    report = memory(context=10, num_key_value_heads=2, head_dim=8, num_hidden_layers=3)
    assert report.kv_bytes == 10 * 3 * 2 * 2 * 8 * 2
    assert report.weight_bytes is report.total_bytes is report.logit_bytes is None
    assert report.missing == "give --hidden-size, --num-attention-heads, --intermediate-size, --vocab-size"


def test_a_checkpoint_counts_in_its_own_dtype(llama, save):
    path = save(llama.bfloat16(), tokenizer=False)
    report = memory(path, context=10)
    assert (report.model, report.dtype) == (path, "bfloat16")
    assert report.weight_bytes == report.stored_weight_bytes == 2 * llama.num_parameters()
    wide = memory(path, context=10, dtype="float32", num_key_value_heads=4)
    assert wide.stored_weight_bytes == report.stored_weight_bytes
    assert wide.kv_bytes == 4 * report.kv_bytes


def test_a_config_is_enough(tmp_path):
    AutoConfig.for_model("llama", **LLAMA_LIKE).save_pretrained(tmp_path)
    report = memory(tmp_path, context=10)
    assert (report.stored_weight_bytes, report.missing, report.dtype) == (None, "", "float16")


def test_another_number_of_layers_has_its_own_norms():
    deeper = AutoConfig.for_model("llama", **{**LLAMA_LIKE, "num_hidden_layers": 5, "hidden_size": 40})
    given = {"num_hidden_layers": 5, "hidden_size": 40, "head_dim": 10}
    shape = shape_of(AutoConfig.for_model("llama", **LLAMA_LIKE), given)
    assert shape.parameters() == shape_of(deeper, {}).parameters()


def test_a_gguf_file(tmp_path):
    tensors = write_gguf(tmp_path / "m.gguf").values()
    report = memory(tmp_path / "m.gguf", context=10)
    assert report.parameters == sum(tensor.size for tensor in tensors)
    assert report.stored_weight_bytes == sum(tensor.nbytes for tensor in tensors)


def test_windows_come_round_where_there_are_more_layers(tmp_path):
    windowed = {"sliding_window": 16, "head_dim": 8}
    shape = shape_of(AutoConfig.for_model("gemma2", **LLAMA_LIKE, **windowed), {"num_hidden_layers": 5})
    five = AutoConfig.for_model("gemma2", **{**LLAMA_LIKE, **windowed, "num_hidden_layers": 5})
    assert (
        memory_of(shape, context=40).kv_bytes
        == kv_bytes(five, 40, 2)
        < memory_of(replace(shape, windows=(None,)), context=40).kv_bytes
    )


def test_of_a_type_without_a_table_the_cache_is_known(save):
    model = make_model("falcon", multi_query=False, num_key_value_heads=None)
    report = memory(save(model, tokenizer=False), context=10)
    assert report.kv_bytes == kv_bytes(model.config, 10, 4)
    assert report.stored_weight_bytes == 4 * model.num_parameters()
    assert report.parameters is report.total_bytes is None
    assert "no table of falcon models" in report.missing


def test_the_report_is_flat(llama, save):
    report = json.loads(json.dumps(asdict(memory(save(llama, tokenizer=False), context=10))))
    assert all(isinstance(value, int | str | None) for value in report.values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "flout16", **SEVEN_B}, "did you mean float16"),
        ({"context": 0}, "--context is 0"),
        ({}, "too few sizes to size anything; give --hidden-size, .* or a MODEL"),
        ({"hidden_size": 64}, "too few sizes to size anything; give --num-hidden-layers, "),
    ],
)
def test_what_cannot_be(wrong, message):
    with pytest.raises(UserError, match=message):
        memory(**{"context": 10, **wrong})


def test_a_hub_id_gives_its_config(monkeypatch, tmp_path):
    AutoConfig.for_model("llama", **LLAMA_LIKE).save_pretrained(tmp_path)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **options: str(tmp_path / "config.json"))
    report = memory("org/model", context=10, revision="main")
    assert report.weight_bytes == memory(Path(tmp_path), context=10).weight_bytes
    assert report.stored_weight_bytes is None


def test_people_read_units():
    args = "--hidden-size 4096 --num-hidden-layers 32 --num-attention-heads 32 --context 8192"
    result = CliRunner().invoke(command, args.split(), catch_exceptions=False)
    assert "4,294,967,296 (4.00 GiB" in result.stdout
