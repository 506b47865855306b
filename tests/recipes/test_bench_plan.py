"""The lane that holds plans to measured peaks: every command of its table runs, and is planned for."""

import shutil

import pytest
from transformers import LlamaConfig

from kvfold.common.embedded import MODEL_DIR
from kvfold.common.errors import CheckFailed
from kvfold.recipes.bench import plan
from kvfold.recipes.bench.peak import peak_of
from kvfold.recipes.bench.synthetic import CONFIG


@pytest.mark.parametrize("name", plan.CASES)
def test_every_case_is_planned(tmp_path, name):
    LlamaConfig(**CONFIG, num_hidden_layers=2).save_pretrained(tmp_path)
    assert 200e6 < plan.predicted(tmp_path, plan.CASES[name]) < 20e9


def test_a_case_is_measured_and_leaves_nothing(tmp_path):
    model = shutil.copytree(MODEL_DIR, tmp_path / "source")
    found = plan.measured(model, plan.CASES["convert gqa, mean"], tmp_path)
    assert 10e6 < found < 1e9
    assert {path.name for path in tmp_path.iterdir()} == {"source", "text.txt"}


def test_a_command_that_fails_says_so():
    with pytest.raises(CheckFailed, match="ended with status 3"):
        peak_of(["bash", "-c", "exit 3"])
