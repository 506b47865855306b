"""Sources on the Hub, against a Hub on this machine; each command in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from kvfold.convert.checkpoint import Checkpoint
from kvfold.convert.gqa import convert_gqa

from .hub import COMMIT, local_hub
from .tiny import make_config, make_model


@pytest.fixture(scope="module")
def src(tmp_path_factory):
    folder = tmp_path_factory.mktemp("src")
    make_model(make_config("llama")).save_pretrained(folder, max_shard_size="200KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.gguf").write_text("not needed")
    return folder


def kvfold(endpoint, home, *args, offline="0"):
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline}
    command = [sys.executable, "-m", "kvfold.cli", *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=home, timeout=120)


def test_inspect_fetches_headers_only(src, tmp_path):
    with local_hub(src) as (endpoint, log):
        result = kvfold(endpoint, tmp_path, "inspect", "tiny/model", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    checkpoint = Checkpoint.open(src)
    assert report["parameters"] == sum(info.numel for info in checkpoint.tensors.values())
    assert report["weight_bytes"] == 8 * report["parameters"]
    assert not list(tmp_path.rglob("*.safetensors"))
    # The Hub's client asks for the first 100 kB of a shard at once, whatever the header's length.
    assert all(sent <= 100_001 for _, name, sent in log if name.endswith(".safetensors"))


def test_convert_downloads_once_and_then_works_offline(src, tmp_path):
    convert_gqa(src, tmp_path / "local", kv_heads=2, method="mean")
    with local_hub(src) as (endpoint, log):
        args = ("convert", "gqa", "tiny/model", "folded", "--kv-heads", 2, "--method", "mean", "--revision", "main")
        result = kvfold(endpoint, tmp_path, *args)
        assert result.returncode == 0, result.stderr
        fetched = {name for method, name, _ in log if method == "GET"}
        assert "model.gguf" not in fetched
    again = kvfold(endpoint, tmp_path, *args, "--overwrite", offline="1")
    assert again.returncode == 0, again.stderr
    for path in (tmp_path / "local").iterdir():
        if path.name not in ("kvfold.json", "model.gguf"):
            assert path.read_bytes() == (tmp_path / "folded" / path.name).read_bytes()
            assert not (tmp_path / "folded" / path.name).is_symlink()
    record = json.loads((tmp_path / "folded/kvfold.json").read_text())
    assert record["source"]["name"] == "tiny/model"
    assert record["source"]["revision"] == COMMIT


@pytest.mark.parametrize("command", [["inspect"], ["eval", "cache"]], ids=" ".join)
def test_repository_that_is_not_there(src, tmp_path, command):
    with local_hub(src) as (endpoint, _):
        result = kvfold(endpoint, tmp_path, *command, "tiny/other")
        assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
        assert "tiny/other is neither" in result.stderr


def test_hub_that_does_not_answer(src, tmp_path):
    with local_hub(src) as (endpoint, _):
        pass  # the port is closed again
    result = kvfold(endpoint, tmp_path, "inspect", "tiny/model")
    assert (result.returncode, result.stderr.count("\n")) == (3, 1), result.stderr
    assert "Hub cannot be reached" in result.stderr
