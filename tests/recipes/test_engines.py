"""The engines lane without its engines: stock transformers stands in for one, and what it does wrong must be seen."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvfold.common.errors import CheckFailed
from kvfold.convert.check import check
from kvfold.convert.demands import ENGINES
from kvfold.recipes.engines import lane
from kvfold.recipes.engines.cases import CASES, EXPORTS, SOURCES, TOLERANCES, Case, Export
from kvfold.recipes.engines.compare import Answer, Tolerance, compare, fault
from kvfold.recipes.engines.environments import requirements
from kvfold.recipes.engines.synthetic import make_random

SIZES = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 48}


def make_answer(seed=0, tokens=(3, 1, 2, 0)):
    scores = np.random.default_rng(seed).normal(size=(9, 7))
    rows = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return Answer("an engine", np.array(tokens), rows[:5], rows[5:], 32.0)


def test_an_equal_answer_is_right_also_when_its_sums_round():
    truth = make_answer()
    off = replace(truth, prompt=truth.prompt + 1e-4, decode=truth.decode - 1e-4)  # not quite probabilities
    figures = compare(off, truth, 32)
    assert max(figures.prompt, figures.decode) < 1e-12
    assert (figures.greedy, figures.new_tokens) == (4, 4)
    assert fault(figures, Tolerance(1e-6, 4)) == ""


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"prompt": make_answer(1).prompt}, "differ by .* over the prompt"),
        ({"decode": make_answer(1).decode}, "differ by .* over the decode"),
        ({"prompt": np.full((5, 7), np.nan)}, "differ by nan"),
        ({"tokens": np.array([3, 1, 0, 0])}, "2 of 4 greedy tokens are equal, 4"),
        ({"cached": 64.0}, "it caches 64 elements a token and layer, the config says 32"),
    ],
)
def test_a_wrong_answer_is_a_fault(change, wrong):
    figures = compare(replace(make_answer(), **change), make_answer(), 32)
    assert re.search(wrong, fault(figures, Tolerance(1e-3, 4)))


def test_answers_of_other_shapes_do_not_compare():
    with pytest.raises(CheckFailed, match="answered decode of shape"):
        compare(replace(make_answer(), decode=np.zeros((3, 7))), make_answer(), 32)


def test_every_case_names_what_there_is():
    for case in CASES.values():
        assert case.engine in ENGINES
        assert case.engine in lane._RUN
        assert case.weights in TOLERANCES
        assert {case.export, case.reference or case.export} <= set(EXPORTS)
    for export in EXPORTS.values():
        assert export.source in (*SOURCES, "random")
        assert set(export.options.get("--for", "vllm").split(",")) <= set(ENGINES)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.export.startswith("random")])
def test_check_says_of_the_random_checkpoints_what_the_engines_do(name, tmp_path):
    case = CASES[name]
    report = check(make_random(tmp_path / "random", **EXPORTS[case.export].sizes), engine=case.engine)
    assert report.passed is not case.broken, report.reason


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A lane of one case, whose engine is transformers on a copy of the checkpoint that a test may spoil."""
    spoiled = {"sizes": SIZES, "runs": 0}

    def run(cache, case, checkpoint, request, scratch):
        spoiled["runs"] += 1
        folder = make_random(scratch / "copy", **spoiled["sizes"])
        return lane._drive(Path(sys.executable), "run_transformers.py", {**request, "model": str(folder)}, scratch)

    monkeypatch.setitem(EXPORTS, "mine", Export("random", SIZES))
    monkeypatch.setitem(CASES, "mine", Case("mine", "llama.cpp"))
    monkeypatch.setitem(lane._RUN, "llama.cpp", run)
    return spoiled


def test_the_lane_finds_a_right_engine_right_and_does_not_ask_twice(stand_in, tmp_path, capsys):
    lane.main(["--cache", str(tmp_path), "--only", "mine"])
    assert "| mine | transformers" in (out := capsys.readouterr().out)
    assert "| 32/32 | 32 | right |" in out
    lane.main(["--cache", str(tmp_path), "--only", "mine"])
    assert capsys.readouterr().out == out
    assert stand_in["runs"] == 1


def test_the_lane_fails_where_an_engine_turns_the_wrong_channels(stand_in, tmp_path, capsys):
    stand_in["sizes"] = {**SIZES, "rope_interleave": False}
    with pytest.raises(SystemExit, match=r"1 of 1 results are wrong; mine: log-probabilities differ"):
        lane.main(["--cache", str(tmp_path), "--only", "mine"])
    assert "| right |" not in capsys.readouterr().out


def test_what_check_refuses_no_engine_is_asked(stand_in, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(EXPORTS, "mine", Export("random", {**SIZES, "q_lora_rank": None}))
    with pytest.raises(SystemExit) as ended:
        lane.main(["--cache", str(tmp_path), "--only", "mine"])
    assert ended.value.code == 1
    assert "q_lora_rank is null" in capsys.readouterr().err
    assert stand_in["runs"] == 0


def test_a_checkpoint_is_asked_about_again_when_it_changes(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(lane, "_drive", lambda *arguments: make_answer())
    lane.run_case(tmp_path, "mine", CASES["mine"])
    folder = tmp_path / "engines" / "checkpoints" / "mine"
    config = json.loads((folder / "config.json").read_text())
    for runs, said in ((1, config), (2, {**config, "use_cache": False})):
        (folder / "config.json").write_text(json.dumps(said, indent=2))
        lane.run_case(tmp_path, "mine", CASES["mine"])
        assert stand_in["runs"] == runs


def test_what_a_wheel_requires_on_a_cpu():
    metadata = "Name: x\nRequires-Dist: numpy>=2\nRequires-Dist: torch==2.13.0\nRequires-Dist: ray; extra == 'ray'\n"
    assert requirements(metadata) == ["numpy>=2"]
