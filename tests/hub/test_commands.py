"""Every command that takes a model takes the id of one on the Hub, and --revision; the failures of it are one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvfold.cli import kvfold
from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.common.loading import load_model, load_tokenizer
from kvfold.common.sources import check_there
from kvfold.convert.check import check
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.inspect import inspect_model
from kvfold.convert.mla.convert import convert_mla
from kvfold.convert.source import fetch
from kvfold.eval.shape import read_any_config
from kvfold.recipes.tiny import MODEL_DIR
from kvfold.uptrain.recipe import Recipe
from kvfold.uptrain.run import uptrain

from . import Fault, hub_server, use
from .store import Blob

TASK = {
    "task": "colours",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": ["red", "blue"],
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc"}],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """What stands in place of {these} in a command."""
    folder = tmp_path_factory.mktemp("files")
    convert_gqa(MODEL_DIR, folder / "out", kv_heads=2, method="mean")
    (folder / "text.txt").write_text("Once upon a time there was a small model. " * 100)
    (folder / "data.jsonl").write_text(json.dumps({"question": "Which?"}) + "\n")
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}}
    (folder / "task.yaml").write_text(yaml.safe_dump(task))
    return {"here": str(folder), "text": f"--text {folder}/text.txt --window 32 --max-windows 1"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub with two models, of which only the tag v1 has the files, and others that cannot be had."""
    folder = tmp_path_factory.mktemp("hub")
    convert_mla(MODEL_DIR, folder / "mla", kv_rank=64, rope_dim=16, rope_select="high", calib=("none",))
    with hub_server() as hub, pytest.MonkeyPatch.context() as patch:
        use(hub, folder / "home", patch)
        for name, source in {"me/model": Path(MODEL_DIR), "me/mla": folder / "mla"}.items():
            repo = hub.add(name)
            repo.tags["v1"] = repo.add_folder(source).oid
            repo.add("main", {"README.md": Blob(b"moved", large=False)}, "empty it")
        hub.add("other/gated", gated=True).add_folder(Path(MODEL_DIR))
        hub.add("other/private", private=True)
        yield hub


@pytest.mark.parametrize(
    "command",
    [
        "inspect me/model",
        "calibrate me/model -o {here}/stats --calib {here}/text.txt --calib-windows 1 --calib-window 32",
        "convert gqa me/model {here}/gqa --kv-heads 2 --method mean",
        "convert mla me/model {here}/latent --kv-rank 64 --rope-dim 16 --rope-select high --calib none",
        "convert plain me/mla {here}/plain",
        "check me/mla --engine transformers",
        "verify me/model {here}/out {text}",
        "report me/model {here}/out -o {here}/report {text} --no-speed",
        "eval ppl me/model {text}",
        "eval cache me/model --context 32",
        "eval compare me/model {here}/out {text}",
        "eval long me/model {here}/out {text} --keys 0",
        "eval speed me/model {here}/out --context 8 --steps 1 --runs 1",
        "eval flops me/model --context 32",
        "eval memory me/model --context 32",
        "eval tasks me/model --task {here}/task.yaml",
    ],
    ids=lambda command: " ".join(command.split(" ")[:2]),
)
def test_commands(hub, files, command):
    if "tasks" in command:
        pytest.importorskip("lm_eval")
    words = command.format(**files).format(**files).split()
    result = CliRunner().invoke(kvfold, [*words, "--revision", "v1", "--json"])
    assert not result.exception, result.exception
    assert isinstance(json.loads(result.stdout), dict)


def test_uptraining(hub, files):
    here = Path(files["here"])
    model = {"model": "me/mla", "revision": "v1", "teacher": "me/model", "teacher_revision": "v1"}
    budget = {"steps": 1, "window": 32, "batch_size": 1, "eval_windows": 1}
    report = uptrain(Recipe(**model, **budget, data=(str(here / "text.txt"),), out=str(here / "healed")))
    assert report.steps == 1
    assert json.loads((here / "healed/config.json").read_text())["model_type"] == "deepseek_v3"


READERS = {
    **{
        read.__name__: read for read in (inspect_model, load_model, load_tokenizer, read_any_config, fetch, check_there)
    },
    "check": partial(check, engine="vllm"),
}


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("other/gated", None, "other/gated is gated; ask for access on its page, then run hf auth login"),
        ("other/private", None, "other/private is neither a path here nor a model on the Hub"),
        ("me/missing", None, "me/missing is neither a path here nor a model on the Hub"),
        ("me/model", "v2", "me/model has no such revision; see its branches and tags on the Hub"),
    ],
)
@pytest.mark.parametrize("reader", READERS)
def test_refusals(hub, reader, name, revision, said):
    if (reader, name) == ("check_there", "other/gated"):
        pytest.skip("that it is there, anybody may see")
    with pytest.raises(UserError, match=said):
        READERS[reader](name, revision=revision)


@pytest.mark.parametrize("reader", READERS)
def test_a_token_that_the_hub_does_not_take(hub, reader, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_Wrong0123456789")
    with pytest.raises(UserError, match="the Hub does not take the token, to see me/model; run hf auth login"):
        READERS[reader]("me/model", revision="main")


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("reader", READERS)
def test_a_hub_in_trouble(hub, reader, status, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's tries
    monkeypatch.setattr(hub, "faults", [Fault(".*me/later", status=status, times=99)])
    with pytest.raises(EnvironmentFailure, match=rf"the Hub is busy or in trouble \(HTTP {status}\)"):
        READERS[reader]("me/later", revision="main")
