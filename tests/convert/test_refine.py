"""Refinement: nearer to the source in every layer, and nothing touched but attention."""

import argparse
import inspect
import json
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.common.errors import UserError
from kvfold.convert import refine, request
from kvfold.convert.calibration.knobs import RefineKnobs
from kvfold.convert.checkpoint import Checkpoint
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.refine import token_errors
from kvfold.convert.verify import verify
from kvfold.recipes.tiny import MODEL_DIR

from ..eval.conftest import VOCABULARY, make_tokenizer
from .tiny import EAGER_EXPERTS, make_config, make_gpt2, make_model, repeat_heads

WINDOW = 48


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "argparse.txt"
    path.write_text(inspect.getsource(argparse))
    return str(path)


@pytest.fixture
def convert(text):
    """Convert with few windows of that text."""
    knobs = {"calib": [text], "calib_builtin": False, "calib_windows": 8, "calib_window": WINDOW}
    return lambda src, out, kv_heads, **options: convert_gqa(src, out, kv_heads=kv_heads, **(knobs | options))


def config_of(case, kv_heads=4):
    if case == "gpt2":
        return make_gpt2(vocab_size=VOCABULARY)
    config = make_config(case, kv_heads)
    config.vocab_size = VOCABULARY
    return config


def save(model, folder):
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def stored(path):
    """Every tensor of a checkpoint: its dtype and bytes."""
    checkpoint = Checkpoint.open(path)
    return {
        name: (info.dtype, b"".join(map(bytes, checkpoint.pieces(info)))) for name, info in checkpoint.tensors.items()
    }


def load(path):
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True, **EAGER_EXPERTS)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]), info
    return model.eval()


def logits(path):
    with torch.no_grad():
        return load(path)(torch.arange(3, 203)[None, :WINDOW]).logits


@pytest.mark.parametrize(
    ("case", "method", "kv_heads"),
    [
        ("llama-bias", "svd", 2),
        ("mixtral", "svd", 1),
        ("gemma2", "svd", 2),
        ("phi", "svd", 2),
        ("phi3", "svd", 1),
        ("cohere", "aligned", 2),
        ("cohere-qk-norm", "mean", 2),
        ("qwen3", "mean", 2),
        ("olmo2", "mean", 2),
        ("stablelm-qk-norm", "mean", 2),
        ("gpt2", "svd", 1),
    ],
)
def test_every_kind_of_layer_gets_nearer(case, method, kv_heads, convert, tmp_path):
    src = save(make_model(config_of(case)).float(), tmp_path / "src")
    # Methods on whole heads read no text, and refuse one.
    (convert_gqa if method == "mean" else convert)(src, tmp_path / "plain", kv_heads=kv_heads, method=method)
    report = convert(src, tmp_path / "out", kv_heads, method=method, refine=8, refine_passes=3)
    assert (report.refine_windows, report.refine_passes) == (8, 3)
    assert len(report.layer_errors_before) == len(report.layer_errors_after) == 2
    assert mean(report.layer_errors_after) < 0.95 * mean(report.layer_errors_before)
    before, after = stored(tmp_path / "plain"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(before[name][0] == after[name][0] for name in before)
    changed = {name for name in before if before[name] != after[name]}
    attention = {name for name in before if ".self_attn." in name or ".attn." in name}
    assert {name for name in attention if name.endswith("weight") and "norm" not in name} <= changed <= attention
    assert logits(tmp_path / "out").isfinite().all()


def test_the_embedded_model(convert, text, tmp_path):
    options = {"calib_window": 128}
    convert(MODEL_DIR, tmp_path / "plain", 1, **options)
    report = convert(MODEL_DIR, tmp_path / "out", 1, refine=8, refine_passes=2, **options)
    assert mean(report.layer_errors_after) < 0.9 * mean(report.layer_errors_before)
    assert {dtype for dtype, _ in stored(tmp_path / "out").values()} == {"BF16"}
    knobs = {"text": [text], "window": 128, "max_windows": 8}
    plain, refined = (verify(MODEL_DIR, tmp_path / name, **knobs) for name in ("plain", "out"))
    assert refined.kl < 0.9 * plain.kl
    recipe = json.loads((tmp_path / "out/kvfold.json").read_text())["recipe"]
    assert (recipe["refine"]["windows"], recipe["refine"]["passes"]) == (8, 2)


@pytest.mark.parametrize("case", ["llama", "qwen3", "phi"])
def test_what_is_exact_already_stays(case, convert, tmp_path):
    wide = repeat_heads(make_model(config_of(case, 2), seed=1), config_of(case))
    src = save(wide, tmp_path / "src")
    report = convert(
        src, tmp_path / "out", 2, method="mean", refine=8, refine_passes=3, calib_dtype="float64", dtype="float64"
    )
    assert max(report.layer_errors_before + report.layer_errors_after) < 1e-9
    torch.testing.assert_close(logits(tmp_path / "out"), logits(src), rtol=0, atol=1e-6)


def test_a_token_that_is_far_off_already_is_not_called_back(convert, tmp_path, monkeypatch):
    src = save(make_model(config_of("llama")).float(), tmp_path / "src")

    def errors(far):
        monkeypatch.setattr(refine, "FAR", far)
        return convert(src, tmp_path / f"{far}", 1, refine=4, refine_passes=1).layer_errors_before

    all_called_back, none = errors(torch.inf), errors(-1)
    assert none[0] == pytest.approx(all_called_back[0])  # the streams begin alike
    assert none[1] < 0.9 * all_called_back[1]


def test_same_command_same_bytes(convert, tmp_path):
    src = save(make_model(config_of("llama")).float(), tmp_path / "src")
    for name in ("one", "two"):
        convert(src, tmp_path / name, 2, refine=4, refine_passes=1)
    assert stored(tmp_path / "one") == stored(tmp_path / "two")


def test_hidden_states_in_files_change_nothing(convert, tmp_path, monkeypatch):
    src = save(make_model(config_of("llama")).float(), tmp_path / "src")
    convert(src, tmp_path / "memory", 2, refine=4, refine_passes=1)
    monkeypatch.setattr(refine, "LIMIT", 0)
    convert(src, tmp_path / "files", 2, refine=4, refine_passes=1)
    assert stored(tmp_path / "memory") == stored(tmp_path / "files")


def test_a_layer_that_diverges_stays_as_it_was(convert, tmp_path, monkeypatch):
    src = save(make_model(config_of("llama")).float(), tmp_path / "src")
    convert(src, tmp_path / "plain", 2)
    monkeypatch.setattr(request, "RefineKnobs", lambda *knobs, **_: RefineKnobs(*knobs, learning_rate=1e38))
    report = convert(src, tmp_path / "out", 2, refine=4, refine_passes=2)
    assert report.layer_errors_after == report.layer_errors_before
    assert stored(tmp_path / "out") == stored(tmp_path / "plain")


def test_a_source_that_overflows_is_refused(convert, tmp_path):
    model = make_model(config_of("llama")).float()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 1e30
    src = save(model, tmp_path / "src")
    with pytest.raises(UserError, match="layer 1 gives NaN or Inf"):
        convert(src, tmp_path / "out", 2, method="mean", refine=4)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kv_heads", "options", "message"),
    [
        (4, {"refine": 4}, "has 4 KV heads already, so --refine has nothing to do"),
        (2, {"refine": 4, "calib": ["none"], "calib_builtin": True}, "--calib none leaves --refine no text"),
        (2, {"refine": -1}, "-1 windows refine nothing"),
        (2, {"refine": 4, "refine_passes": 0}, "0 passes refine nothing"),
    ],
)
def test_refused_before_any_work(kv_heads, options, message, convert, tmp_path):
    src = save(make_model(config_of("llama")).float(), tmp_path / "src")
    with pytest.raises(UserError, match=message):
        convert(src, tmp_path / "out", kv_heads, **options)
    assert not (tmp_path / "out").exists()


def test_token_errors_are_squares_relative_to_the_target():
    target = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    errors = token_errors(target + torch.tensor([[0.0, 5.0], [0.0, 0.0]]), target)
    assert errors.tolist() == [1.0, 0.0]
