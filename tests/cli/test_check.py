"""`kvfold check`: a table for people or one JSON object, and a status that says whether the engine would read it."""

import json
import shutil

import pytest
from click.testing import CliRunner

from kvfold.cli.check import ENGINES, check
from kvfold.common.errors import CheckFailed
from kvfold.convert import demands
from kvfold.recipes.tiny import MODEL_DIR


@pytest.fixture
def broken(tmp_path):
    """The embedded model with a layer more than it has."""
    out = shutil.copytree(MODEL_DIR, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    return out


def run(*arguments):
    return CliRunner().invoke(check, list(map(str, arguments)))


def test_the_command_offers_every_engine_of_the_table():
    assert ENGINES == demands.ENGINES


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_reads_passes(engine):
    result = run(MODEL_DIR, "--engine", engine)
    assert result.exit_code == 0, result.output
    said = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert (said["engine"], said["read_from"], said["passed"]) == (engine, demands.read_from(engine), "yes")
    assert said["checked"].startswith("only that")


def test_what_it_does_not_read_is_said_with_the_mend(broken):
    result = run(broken, "--engine", "vllm")
    assert isinstance(result.exception, CheckFailed)
    assert result.exception.exit_status == 1
    assert "refuse  tensors: tensor model.layers.4." in result.output
    assert "mend: convert the source again" in result.output


def test_json_is_one_object_also_when_it_fails(broken):
    result = run(broken, "--engine", "sglang", "--json")
    report = json.loads(result.output)
    assert isinstance(result.exception, CheckFailed)
    assert report["passed"] is False
    assert report["reason"] == str(result.exception)
    (violation,) = report["violations"]
    assert set(violation) == {"engine", "read_from", "topic", "severity", "wrong", "mend"}


def test_the_engine_must_be_named(broken):
    assert "--engine" in run(broken).output
    assert "'nobody' is not one of" in run(broken, "--engine", "nobody").output
