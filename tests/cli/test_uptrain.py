"""`kvfold uptrain`: what it hands on, and what it says without starting anything."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest
from click.testing import CliRunner

from kvfold.cli.uptrain import uptrain
from kvfold.common.errors import UserError
from kvfold.uptrain import launch as module
from kvfold.uptrain.recipe import Recipe, read_recipe

PAIRS = ["model=org/m", "out=o", "steps=10"]


@pytest.fixture
def started(monkeypatch):
    """The commands that would have been started, each ending with status 3."""
    commands = []
    monkeypatch.setattr(module, "_count_gpus", lambda: 0)
    monkeypatch.setattr(module, "launch_run", lambda command: commands.append(command) or 3)
    return commands


def test_a_recipe_and_pairs(started, tmp_path):
    recipe = tmp_path / "a=b.yaml"
    recipe.write_text("model: org/m\nout: o\n")
    result = CliRunner().invoke(uptrain, [str(recipe), "steps=3", "--num-processes", "2", "--dry-run", "--json"])
    assert result.exit_code == 3
    end = ("kvfold.uptrain", "--config", str(recipe), "steps=3", "processes=2", "--dry-run", "--json")
    assert started[0].argv[-len(end) :] == end
    assert result.output == ""


def test_pairs_alone(started):
    assert CliRunner().invoke(uptrain, [*PAIRS, "--accelerate", "cpu"]).exit_code == 3
    assert started[0].argv[-5:] == ("kvfold.uptrain", *PAIRS, "processes=1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "has no model"),
        (["nowhere.yaml"], "nowhere.yaml does not exist"),
        (["model=m", "recipe.yaml"], "'recipe.yaml' is neither the recipe, which comes first, nor a pair"),
        ([*PAIRS, "sed=3"], "unknown key 'sed'"),
        ([*PAIRS, "--accelerate", "ddpp"], "did you mean ddp"),
        ([*PAIRS, "batch_size=3", "--num-processes", "2"], "batch_size 3 does not divide among 2 processes"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(started, words, said):
    result = CliRunner().invoke(uptrain, words)
    assert isinstance(result.exception, UserError)
    assert said in str(result.exception)
    assert not started


def test_every_key_is_listed(started, tmp_path):
    said = CliRunner().invoke(uptrain, ["--keys"])
    assert said.exit_code == 0 and not started
    lines = said.output.splitlines()
    assert [line.partition(":")[0] for line in lines] == [field.name for field in fields(Recipe)]
    assert "betas: [0.9, 0.95]  # AdamW's two averaging factors." in lines
    assert any(line.startswith("train: attention  # ") and line.endswith("attention+norms, all.") for line in lines)
    (tmp_path / "recipe.yaml").write_text(said.output)
    recipe = read_recipe(tmp_path / "recipe.yaml", ["model=m", "out=o", "steps=3"])
    assert recipe == Recipe(model="m", out="o", steps=3), "what is listed are the defaults"
    table = json.loads(CliRunner().invoke(uptrain, ["--keys", "--json"]).output)
    assert {"name": "seed", "default": "0"}.items() <= next(k for k in table["keys"] if k["name"] == "seed").items()


def test_a_wrong_recipe_is_told_without_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from kvfold.cli.uptrain import uptrain\n"
        f"uptrain({[*PAIRS, 'seed=-1']}, standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "seed is -1; it must be at least 0" in done.stderr.splitlines()[-1]
