from __future__ import annotations

import json
import os

import pytest

from kvfold.common.errors import UserError
from kvfold.eval.report.runs import POINTS, describe, recipes, uptraining

HEAL = {
    "command": "uptrain",
    "clip": 1.0,
    "learning_rate": 1e-4,
    "steps": 300,
    "teacher": "source",
    "held_out": {"a": 3.25},
}
FOLD = {"command": "convert gqa", "kv_heads": 4, "method": "svd", "refine": {"windows": 32}, "dtype": None, "seed": 0}


@pytest.fixture
def healed(tmp_path):
    """A checkpoint that was converted and then healed."""
    folder = tmp_path / "healed"
    folder.mkdir()
    record = {"recipe": HEAL, "source": {"name": "gqa", "record": {"recipe": FOLD, "source": {"name": "model"}}}}
    (folder / "kvfold.json").write_text(json.dumps(record))
    return folder


def write_run(folder, end=3.25, steps=300):
    folder.mkdir()
    lines = [{"step": 0, "tokens": 0, "held_out": {"a": 4.0}, "reference": {"a": 3.0}}]
    lines += [{"step": n, "tokens": 10 * n, "cross_entropy": float(n)} for n in range(1, steps + 1)]
    lines += [{"step": steps, "tokens": 10 * steps, "held_out": {"a": end}, "reference": {"a": 3.0}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def curves(healed, runs=()):
    return uptraining({"healed": str(healed)}, {"healed": recipes(str(healed))}, runs)


def test_how_it_was_made_is_said_oldest_first(healed):
    assert [describe(recipe) for recipe in recipes(str(healed))] == [
        "convert gqa: kv_heads 4, method svd, refine windows 32",
        "uptrain: learning_rate 0.0001, steps 300, teacher source",
    ]
    assert recipes(str(healed / "elsewhere")) == []


def test_a_run_beside_its_result_is_found(healed):
    write_run(healed.with_name("healed.run"))
    (curve,), warnings = curves(healed)
    assert not warnings
    assert curve.steps_averaged == 3 and len(curve.tokens) == 100 <= POINTS
    assert curve.training_loss[:2] == [2.0, 5.0] and curve.tokens[-1] == 3000  # means of 1, 2, 3 and 4, 5, 6
    (held,) = curve.held_out
    assert (held.text, held.tokens, held.loss, held.reference) == ("a", [0, 3000], [4.0, 3.25], 3.0)


def test_a_run_elsewhere_is_named(healed, tmp_path):
    run = write_run(tmp_path / "elsewhere")
    found, warnings = curves(healed)
    assert not found and "name its folder with --run" in warnings[0]
    (curve,), warnings = curves(healed, [run])
    assert curve.run == str(run) and not warnings


def test_a_run_that_ended_otherwise_is_not_its_run(healed, tmp_path):
    write_run(healed.with_name("healed.run"), end=3.2500001)
    found, warnings = curves(healed)
    assert not found and len(warnings) == 1
    with pytest.raises(UserError, match="made none of the results"):
        curves(healed, [healed.with_name("healed.run")])


def test_a_run_that_another_wrote_gives_a_warning(healed):
    run = write_run(healed.with_name("healed.run"))
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"cross_entropy": 5.0', '"cross_entropy": "5"'))
    found, warnings = curves(healed)
    assert not found and len(warnings) == 1
    metrics.unlink()
    os.mkfifo(metrics)  # which nobody writes to
    assert curves(healed) == (found, warnings)


def test_a_folder_without_a_run(healed, tmp_path):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        curves(healed, [tmp_path])
