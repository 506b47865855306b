"""Sources on the Hub, against a Hub on this machine; each command in a process of its own."""

import json
import subprocess
import sys

import pytest

from kvfold.common.errors import EnvironmentFailure
from kvfold.convert.checkpoint import Checkpoint
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.inspect import inspect_model

from ..hub import environment, hub_server, use
from .tiny import make_config, make_model


@pytest.fixture(scope="module")
def src(tmp_path_factory):
    folder = tmp_path_factory.mktemp("src")
    make_model(make_config("llama")).save_pretrained(folder, max_shard_size="200KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.gguf").write_text("not needed")
    return folder


@pytest.fixture
def hub(src):
    with hub_server() as hub:
        hub.add("tiny/model").add_folder(src)
        yield hub


def kvfold(hub, home, *args, **options):
    command = [sys.executable, "-m", "kvfold.cli", *map(str, args)]
    env = environment(hub, home, token=False, **options)
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=home, timeout=120)


def test_inspect_fetches_headers_only(src, hub, tmp_path):
    result = kvfold(hub, tmp_path, "inspect", "tiny/model", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    checkpoint = Checkpoint.open(src)
    assert report["parameters"] == sum(info.numel for info in checkpoint.tensors.values())
    assert report["weight_bytes"] == 8 * report["parameters"]
    assert not list(tmp_path.rglob("*.safetensors"))
    # The Hub's client asks for the first 100 kB of a shard at once, whatever the header's length.
    shards = hub.requests("GET /large/")
    assert len(shards) == len({info.shard for info in checkpoint.tensors.values()})
    assert all(request.sent <= 100_001 for request in shards)


def test_convert_downloads_once_and_then_works_offline(src, hub, tmp_path):
    convert_gqa(src, tmp_path / "local", kv_heads=2, method="mean")
    args = ("convert", "gqa", "tiny/model", "folded", "--kv-heads", 2, "--method", "mean", "--revision", "main")
    result = kvfold(hub, tmp_path, *args)
    assert result.returncode == 0, result.stderr
    assert hub.requests("GET .*/resolve/.*/config.json")
    assert not hub.requests("GET .*/resolve/.*/model.gguf")
    again = kvfold(hub, tmp_path, *args, "--overwrite", offline=True)
    assert again.returncode == 0, again.stderr
    for path in (tmp_path / "local").iterdir():
        if path.name not in ("kvfold.json", "model.gguf"):
            assert path.read_bytes() == (tmp_path / "folded" / path.name).read_bytes()
            assert not (tmp_path / "folded" / path.name).is_symlink()
    record = json.loads((tmp_path / "folded/kvfold.json").read_text())
    assert record["source"]["name"] == "tiny/model"
    assert record["source"]["revision"] == hub.repos["tiny/model"].head.oid


@pytest.mark.parametrize("command", [["inspect"], ["eval", "cache"]], ids=" ".join)
def test_repository_that_is_not_there(hub, tmp_path, command):
    result = kvfold(hub, tmp_path, *command, "tiny/other")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "tiny/other is neither" in result.stderr


def test_hub_that_does_not_answer(tmp_path, monkeypatch):
    with hub_server() as hub:
        pass  # the port is closed again
    use(hub, tmp_path, monkeypatch)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's many tries
    with pytest.raises(EnvironmentFailure, match="there is no tiny/model here, and the Hub cannot be reached"):
        inspect_model("tiny/model")
