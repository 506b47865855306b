"""From a checkpoint and text to statistics, and from there to a conversion: once computed, and never with NaN."""

import argparse
import inspect
import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.common.errors import UserError
from kvfold.convert.calibration import calibrate as module
from kvfold.convert.calibration.calibrate import Runner, calibrate
from kvfold.convert.calibration.knobs import Calibration
from kvfold.convert.calibration.statistics import LayerStatistics
from kvfold.convert.calibration.store import Statistics
from kvfold.convert.calibration.text import CalibText
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.source import open_source
from kvfold.convert.verify import verify
from kvfold.recipes.tiny import MODEL_DIR

from ...eval.conftest import make_model, make_tokenizer
from ...gguf_file import write_gguf

LAYERS, HIDDEN = 2, 32
WINDOWS, WINDOW = 6, 40
MOMENTS = tuple(field.name for field in fields(LayerStatistics))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "argparse.txt"
    path.write_text(inspect.getsource(argparse))
    return str(path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return save(make_model("llama"), tmp_path_factory.mktemp("src"))


def save(model, folder):
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "statistics"


@pytest.fixture
def knobs(text):
    return {"calib": [text], "calib_builtin": False, "calib_windows": WINDOWS, "calib_window": WINDOW}


@pytest.fixture
def no_model(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("the model was run")

    return lambda: monkeypatch.setattr(module, "collect", fail)


def logits(path):
    ids = torch.arange(60)[None]
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits


# kvfold calibrate.


def test_report(shared, text, knobs, tmp_path):
    stages = []

    @contextmanager
    def progress(label):
        yield lambda done, total: stages.append((label, done, total))

    out = tmp_path / "s.safetensors"
    report = calibrate(shared, str(out), **knobs, progress=progress)
    assert (report.model, report.source) == (str(out), str(shared))
    assert (report.windows, report.tokens, report.kinds) == (WINDOWS, WINDOWS * WINDOW, {"argparse.txt": WINDOWS})
    assert (report.fisher, report.dtype, report.hidden_size, report.reused) == (True, "float32", HIDDEN, False)
    assert report.effective_ranks[-1] == HIDDEN + 1  # the first layer has as many as there are different tokens
    assert report.bytes == out.stat().st_size
    statistics = Statistics.open(out)
    assert (statistics.about.key, statistics.effective_ranks()) == (report.key, report.effective_ranks)
    for number in range(LAYERS):
        layer = statistics.layer(number)
        assert float(layer.inputs[-1, -1]) == pytest.approx(1, abs=1e-6)
        assert all(getattr(layer, name).diagonal().min() > 0 for name in MOMENTS if name != "still_cross")
    assert stages[-1] == ("calibrating", LAYERS * WINDOWS, LAYERS * WINDOWS)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_second_time_the_model_is_not_run(shared, knobs, tmp_path, no_model):
    out = tmp_path / "s.safetensors"
    first = calibrate(shared, out, **knobs)
    no_model()
    for faster in ({}, {"batch_size": 4}, {"offload": True}, {"overwrite": True}):  # which decide nothing
        assert calibrate(shared, out, **knobs, **faster) == replace(first, reused=True)


def test_the_name_of_a_text_decides_nothing(shared, text, knobs, tmp_path, no_model):
    first = calibrate(shared, tmp_path / "s", **knobs)
    (tmp_path / "other.txt").write_bytes(Path(text).read_bytes())
    no_model()
    again = calibrate(shared, tmp_path / "s", **(knobs | {"calib": [str(tmp_path / "other.txt")]}))
    assert again == replace(first, kinds={"other.txt": WINDOWS}, reused=True)


@pytest.mark.parametrize(
    "other",
    [{"calib_window": 39}, {"calib_windows": 5}, {"fisher": False}, {"dtype": "float64"}, {"calib": [__file__]}],
    ids=str,
)
def test_other_statistics_need_another_name_or_overwrite(other, shared, knobs, tmp_path, no_model):
    out = tmp_path / "s.safetensors"
    first = calibrate(shared, out, **knobs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "collect", None)  # not even begun
        with pytest.raises(UserError, match="exists; choose another name, or replace it with --overwrite"):
            calibrate(shared, out, **(knobs | other))
    second = calibrate(shared, out, **(knobs | other), overwrite=True)
    assert second.key != first.key
    assert not second.reused
    assert Statistics.open(out).about.key == second.key


def test_key_is_of_the_weights_and_the_config(shared, tmp_path):
    def key(path):
        with open_source(str(path)) as source:
            runner = Runner(source, Calibration(CalibText((__file__,), 2, 30, builtin=False)))
            return runner.about(runner.windows()).key

    first = key(shared)
    assert key(save(make_model("llama"), tmp_path / "copy")) == first
    model = make_model("llama")
    model.model.norm.weight.data[3] += 1e-3
    assert key(save(model, tmp_path / "weights")) != first
    assert key(save(make_model("llama", rms_norm_eps=1e-4), tmp_path / "config")) != first


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_overwrite_spares_what_is_no_statistics(name, shared, knobs, tmp_path, no_model):
    precious = tmp_path / name
    precious.write_bytes((shared / name).read_bytes())
    no_model()
    with pytest.raises(UserError, match="holds no statistics, so --overwrite does not replace it"):
        calibrate(shared, precious, **knobs, overwrite=True)
    assert precious.read_bytes() == (shared / name).read_bytes()


def test_a_run_that_ends_early_leaves_nothing(shared, knobs, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "collect", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate(shared, tmp_path / "new/s.safetensors", **knobs)
    assert not list(tmp_path.iterdir())


def test_offload_and_batches_give_the_same(shared, knobs, tmp_path):
    calibrate(shared, tmp_path / "a", **knobs, dtype="float64")
    calibrate(shared, tmp_path / "b", **knobs, dtype="float64", offload=True, batch_size=4)
    one, other = (Statistics.open(tmp_path / name) for name in ("a", "b"))
    for number in range(LAYERS):
        for field in MOMENTS:
            pair = getattr(one.layer(number), field), getattr(other.layer(number), field)
            torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6 * float(pair[0].max()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calib": ["none"]}, "--calib none is for convert"),
        ({"batch_size": 0}, "batch of 0 windows"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"calib_windows": 0}, "0 calibration windows"),
        ({"calib_window": 65}, "window 65 is longer than the model's context 64"),
    ],
)
def test_refused_before_the_model_is_run(options, message, shared, knobs, tmp_path, no_model):
    no_model()
    with pytest.raises(UserError, match=message):
        calibrate(shared, tmp_path / "s", **(knobs | options))
    assert not list(tmp_path.iterdir())


def test_a_device_without_float64_is_refused(shared, knobs, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "resolve_device", lambda _: "mps")
    with pytest.raises(UserError, match="mps has no float64"):
        calibrate(shared, tmp_path / "s", **knobs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_overflow_names_the_layer(dtype, knobs, tmp_path):
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(6e4 if dtype == "float16" else 1e38)
    save(model.to(torch.bfloat16), tmp_path / "src")
    with pytest.raises(UserError, match="layer 1 gives NaN or Inf; calibrate in a wider dtype, or mend the source"):
        calibrate(tmp_path / "src", tmp_path / "s", **knobs, dtype=dtype)
    assert not (tmp_path / "s").exists()


def test_gguf(knobs, tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    report = calibrate(tmp_path / "tiny.gguf", tmp_path / "s", **(knobs | {"calib_window": 8}))
    assert (report.windows, report.hidden_size) == (WINDOWS, Statistics.open(tmp_path / "s").about.hidden_size)


# kvfold convert.


def test_conversions_share_what_one_of_them_computed(shared, text, knobs, own_cache, tmp_path, no_model):
    first = convert_gqa(shared, tmp_path / "svd", kv_heads=1, **knobs)
    assert (first.calib_tokens, first.calib_kinds) == (WINDOWS * WINDOW, {"argparse.txt": WINDOWS})
    (kept,) = own_cache.iterdir()
    assert first.stats == str(kept)
    assert json.loads((tmp_path / "svd/kvfold.json").read_text())["recipe"]["calibration"]["tokens"] == WINDOWS * WINDOW
    no_model()
    second = convert_gqa(shared, tmp_path / "aligned", kv_heads=1, method="aligned", grouping="similar", **knobs)
    assert second.stats == first.stats
    assert convert_gqa(shared, tmp_path / "mean", kv_heads=1, method="mean").stats == ""  # needs none
    assert list(own_cache.iterdir()) == [kept]


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: data[:-9000] + b"\xff" * 400 + data[-8600:]])
def test_a_damaged_file_in_the_cache_is_made_again(damage, shared, knobs, own_cache, tmp_path):
    convert_gqa(shared, tmp_path / "one", kv_heads=1, **knobs)
    (kept,) = own_cache.iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    convert_gqa(shared, tmp_path / "two", kv_heads=1, **knobs)
    assert torch.equal(logits(tmp_path / "one"), logits(tmp_path / "two"))


def test_statistics_of_a_file(shared, knobs, own_cache, tmp_path, no_model):
    convert_gqa(shared, tmp_path / "cached", kv_heads=1, **knobs)
    for path in own_cache.iterdir():
        path.unlink()
    calibrate(shared, tmp_path / "s", **knobs)
    no_model()
    report = convert_gqa(shared, tmp_path / "out", kv_heads=1, stats=tmp_path / "s")
    assert (report.stats, report.calib_tokens) == (str(tmp_path / "s"), WINDOWS * WINDOW)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "cached"))
    assert not list(own_cache.iterdir())


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_file_without_gradients_is_told(dry_run, shared, knobs, tmp_path):
    calibrate(shared, tmp_path / "s", fisher=False, **knobs)
    options = {"kv_heads": 1, "stats": tmp_path / "s", "dry_run": dry_run, "overwrite": True}
    (warning,) = convert_gqa(shared, tmp_path / "out", **options).warnings
    assert "hold no Fisher moments, so the result is worse; make them anew with kvfold calibrate" in warning
    assert convert_gqa(shared, tmp_path / "out", **options, fisher=False).warnings == []
    del options["stats"]
    assert convert_gqa(shared, tmp_path / "out", **options, **knobs).warnings == []


@pytest.mark.parametrize("other", ["checkpoint", "file"])
def test_statistics_of_something_else_are_refused(other, shared, knobs, tmp_path):
    if other == "checkpoint":
        model = make_model("llama")
        model.lm_head.weight.data += 1e-3
        calibrate(save(model, tmp_path / "other"), tmp_path / "s", **knobs)
    else:
        (tmp_path / "s").write_bytes((shared / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="another checkpoint" if other == "checkpoint" else "holds no statistics"):
        convert_gqa(shared, tmp_path / "out", kv_heads=1, stats=tmp_path / "s")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["svd", "aligned"])
def test_forward_passes_only(method, shared, knobs, own_cache, tmp_path):
    report = convert_gqa(shared, tmp_path / "out", kv_heads=1, method=method, fisher=False, **knobs)
    statistics = Statistics.open(own_cache / report.stats)
    assert not statistics.about.fisher
    assert statistics.layer(0).key_fisher is None
    whole = convert_gqa(shared, tmp_path / "whole", kv_heads=1, method=method, **knobs)
    assert whole.stats != report.stats
    assert not torch.equal(logits(tmp_path / "out"), logits(tmp_path / "whole"))


@pytest.mark.parametrize("fisher", [True, False])
@pytest.mark.parametrize("method", ["svd", "aligned"])
def test_three_tokens_are_enough(method, fisher, shared, text, knobs, own_cache, tmp_path):
    few = knobs | {"calib_windows": 1, "calib_window": 3, "fisher": fisher}
    report = convert_gqa(shared, tmp_path / "out", kv_heads=1, method=method, **few)
    assert report.calib_tokens == 3
    assert all(1 <= rank <= 3 for rank in Statistics.open(own_cache / report.stats).effective_ranks())
    assert logits(tmp_path / "out").isfinite().all()
    verified = verify(shared, tmp_path / "out", text=[text], max_windows=3, window=WINDOW)
    assert 0 < verified.kl < 100


@pytest.mark.parametrize("method", ["svd", "aligned"])
def test_a_dead_channel(method, knobs, own_cache, tmp_path):
    model = make_model("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter[:, 5] = 0
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[5] = 0
    save(model, tmp_path / "src")
    report = convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=1, method=method, **knobs)
    statistics = Statistics.open(own_cache / report.stats)
    assert not statistics.layer(0).inputs[5].any()
    assert statistics.effective_ranks()[-1] == HIDDEN  # all but that one, and the 1
    assert logits(tmp_path / "out").isfinite().all()


# Several processes.


LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def launch(*command):
    done = subprocess.run(
        [*LAUNCH, "-m", "kvfold.cli", *map(str, command), "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, done.stdout
    return json.loads(done.stdout)


def test_every_window_is_one_process_s(shared, knobs):
    with open_source(str(shared)) as source:
        runner = Runner(source, Calibration(CalibText((knobs["calib"][0],), 5, WINDOW, builtin=False)))
        windows = runner.windows()
        runner.workers.size = 3
        shares = runner.shares(windows)
    assert [len(share) for share in shares] == [2, 2, 1]
    assert sorted(ids.tolist() for share in shares for ids in share.ids) == sorted(ids.tolist() for ids in windows.ids)
    assert all(len(share.ids) == len(share.kinds) for share in shares)


@pytest.mark.parametrize("windows", [1, 5])
def test_two_processes_give_what_one_gives(windows, text, tmp_path):
    options = {"calib_windows": windows, "calib_window": 64}
    alone = calibrate(MODEL_DIR, tmp_path / "one", calib=[text], calib_builtin=False, **options)
    flags = ["--calib", text, "--no-calib-builtin", "--calib-windows", windows, "--calib-window", 64]
    report = launch("calibrate", MODEL_DIR, "-o", tmp_path / "two", *flags)
    assert report == {**vars(alone), "model": str(tmp_path / "two")}
    one, two = (Statistics.open(tmp_path / name) for name in ("one", "two"))
    for number in range(4):
        for name in MOMENTS:
            expected, found = (getattr(statistics.layer(number), name) for statistics in (one, two))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.max()))


@pytest.mark.parametrize("windows", [1, 5])
def test_two_processes_convert_and_refine(windows, text, tmp_path):
    """Three windows for one process and two for the other, or one and none."""
    flags = ["--calib", text, "--no-calib-builtin", "--calib-windows", windows, "--calib-window", 64]
    command = ["convert", "gqa", MODEL_DIR, tmp_path / "out", "--kv-heads", 2, *flags]
    report = launch(*command, "--refine", windows, "--refine-passes", 1)
    assert (report["refine_windows"], len(report["layer_errors_after"])) == (windows, 4)
    assert sum(report["layer_errors_after"]) < sum(report["layer_errors_before"])
    assert logits(tmp_path / "out").isfinite().all()
