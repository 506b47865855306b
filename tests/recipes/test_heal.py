"""The healing lanes in small: what they compute from losses, and the whole way from a command to a picture."""

from __future__ import annotations

import json
import math
import re

import pytest

from kvfold.common.errors import UserError
from kvfold.common.text import BUILTIN, builtin_documents
from kvfold.recipes.heal import curves
from kvfold.recipes.heal.looks import Looks, read_looks
from kvfold.recipes.plots import Panel, draw_losses
from kvfold.recipes.real import heal
from kvfold.recipes.timed import Made, run_folder
from kvfold.recipes.tiny import MODEL_DIR
from kvfold.recipes.tiny.train import CONTEXT
from kvfold.recipes.tiny.train import main as train_tiny

SOURCE = 3.0


@pytest.fixture(scope="module")
def short_text(tmp_path_factory):
    """Thirty pages of what the embedded model learnt from."""
    path = tmp_path_factory.mktemp("text") / "short.jsonl"
    pages = builtin_documents(held_out=False, kinds=["topics"])[:30]
    path.write_text("\n".join(json.dumps({"text": page[:600]}) for page in pages))
    return path


def looks(*losses: float, text: str = BUILTIN) -> Looks:
    tokens = tuple(1_228_800 * place for place in range(len(losses)))  # a tenth of what the model was trained on
    return Looks(tokens, {text: losses}, {text: SOURCE}, 60.0)


def test_alpha_is_a_share_of_what_the_embedded_model_was_trained_on():
    usual = {option.name: option.default for option in train_tiny.params}
    assert usual["steps"] * usual["batch_size"] * CONTEXT == curves.PRETRAIN_TOKENS


@pytest.mark.parametrize(
    ("what", "losses", "alpha"),
    [
        ("perplexity", (3.0, 3.5), 0.0),
        ("perplexity", (3.5, SOURCE + math.log(1.0201), SOURCE + math.log(1.0199), 4.0), 0.2),
        ("perplexity", (3.5, 3.1), None),
        ("loss", (3.5, 1.0201 * SOURCE, 1.0199 * SOURCE, 4.0), 0.2),
    ],
)
def test_near_is_within_two_percent(what, losses, alpha):
    assert curves.first_near(looks(*losses), what) == pytest.approx(alpha)


def test_a_curve_is_below_another_only_if_it_is_so_at_every_look():
    names, below = ("svd", "mean"), looks(3.3, 3.2, 3.1)
    assert "throughout, by at least 0.1000" in curves.compare("8 -> 2", below, looks(4.0, 3.4, 3.2), names)
    said = curves.compare("8 -> 2", below, looks(4.0, 3.2, 3.2), names)
    assert said.endswith("does not lie below mean throughout: not at 1,228,800 tokens")


def test_the_table_shows_the_looks_at_its_shares():
    losses = [4 - place / 100 for place in range(17)]
    lines = list(curves.report({2: {"svd": looks(*losses), "mean": looks(*(loss + 1 for loss in losses))}}))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:5]]
    assert cells[0][2:4] == ["0 tokens", "1,228,800 tokens"] and cells[0][7] == "19,660,800 tokens"
    assert cells[3][:2] == ["8 -> 2", "svd"]
    assert cells[3][2:8] == ["4.0000", "3.9900", "3.9800", "3.9600", "3.9200", "3.8400"]
    assert cells[3][8:10] == ["-", "-"] and {len(row) for row in cells} == {11}
    assert lines[5].endswith("at the end: svd, mean") and "by at least 1.0000" in lines[6]


def test_looks_are_read_from_the_metrics(tmp_path):
    out = tmp_path / "out"
    run_folder(out).mkdir()
    lines = [
        {"step": 0, "tokens": 0, "held_out": {"a": 3.0}, "reference": {"a": 2.0}},
        {"step": 1, "tokens": 8, "loss": 9.0, "seconds": 1.5},
        {"step": 2, "tokens": 16, "loss": 8.0, "seconds": 2.0},
        {"step": 2, "tokens": 16, "held_out": {"a": 2.5}, "reference": {"a": 2.0}},
    ]
    (run_folder(out) / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_looks(out) == Looks((0, 16), {"a": (3.0, 2.5)}, {"a": 2.0}, 3.5)
    assert read_looks(out).points("a") == [(0, 3.0), (16, 2.5)]


def test_the_picture_has_every_curve_and_is_the_same_twice(tmp_path):
    panels = [Panel(title, {"svd": [(0, 3.0), (9, 2.5)]}, 2.0) for title in ("8 -> 2", "8 -> 1")]
    for name in ("a.svg", "b"):
        draw_losses(panels, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert all(f">{text}</text>" in drawn for text in ("svd", "source", "8 -&gt; 2", "8 -&gt; 1"))
    assert drawn == (tmp_path / "b").read_text()


@pytest.mark.parametrize(
    ("steps", "taken"), [(16, 16), (31, 16), (33, 32)], ids=["as many as looks", "a part is left out", "two a look"]
)
def test_looks_are_evenly_spaced(steps, taken):
    plan = curves.Plan(tokens=steps * 8 * 512)
    assert plan.steps == taken == plan.recipe()["eval_every"] * curves.LOOKS
    with pytest.raises(UserError, match="give at least 65,536"):
        _ = curves.Plan(tokens=65_535).steps


def test_the_curves_from_command_to_picture(tmp_path, short_text, monkeypatch, capsys):
    """Two ways of either kind at one size; what is there is not made again."""
    small = {"batch_size": 1, "window": 32, "eval_windows": 2, "calib_windows": 1, "calib_window": 32}
    monkeypatch.setattr(curves, "PLAN", curves.Plan(**small))
    monkeypatch.setattr(curves, "HEADS", {1: "8 -> 1 (MQA)"})
    monkeypatch.setattr(curves, "BUILTIN", str(short_text))  # which takes seconds to read
    picture = tmp_path / "curves.svg"
    command = ["--cache", str(tmp_path / "cache"), "--only", "mean", "--only", "mla", "--tokens", "512"]
    curves.main([*command, "--learning-rate", "5e-4", "--plot", str(picture)])
    said = capsys.readouterr()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.out.splitlines() if line[0] == "|"]
    assert rows[0][2:8] == ["0 tokens", "32 tokens", "64 tokens", "128 tokens", "256 tokens", "512 tokens"]
    assert [row[:2] for row in rows[2:]] == [["8", "source"], ["8 -> 1 (MQA)", "mean"], ["8 -> 1 (MQA)", "mla"]]
    assert all(float(row[2]) > float(rows[2][2]) for row in rows[3:]), "converting costs something"
    assert len({row[2] for row in rows[3:]}) == 2
    assert float(rows[3][7]) < float(rows[3][2]), "sixteen steps of so large a rate heal some of it"
    assert picture.stat().st_size > 1000
    kept = {path.name for path in (tmp_path / "cache" / "curves").iterdir()}
    assert {"mean-1", "mean-1-512-0.0005", "mla-1", "mla-1-512-0.0005"} <= kept
    config = json.loads((tmp_path / "cache" / "curves" / "mla-1-512-0.0005" / "config.json").read_text())
    assert config["model_type"] != "deepseek_v3", "the plain form was trained"

    monkeypatch.setattr("subprocess.Popen", None)  # nothing may be started
    curves.main([*command, "--learning-rate", "5e-4"])
    assert capsys.readouterr().out == said.out
    with pytest.raises(TypeError):
        curves.main([*command, "--learning-rate", "2e-3"])


# A stand-in for the real checkpoint.


@pytest.fixture(scope="module")
def healed(short_text, tmp_path_factory):
    """Cache, texts, plan, and what the lane said of the embedded model folded to one head."""
    cache = tmp_path_factory.mktemp("cache")
    handbook = cache / "handbook.txt"
    handbook.write_text("\n\n".join(builtin_documents(held_out=True, kinds=["topics"]))[:20_000])
    texts = {heal.DOMAIN: str(short_text), heal.OTHER: str(handbook)}
    plan = heal.Plan(
        tokens=8 * 2 * 64, learning_rate=3e-3, layer_share=0.25, batch_size=2, window=64, looks=2, eval_windows=2,
        judge_windows=2, calib_windows=1, data=[str(short_text)],
    )  # fmt: skip
    return cache, texts, plan, heal.run_lane(cache, MODEL_DIR, texts, ["mean"], plan, 1)


def test_a_start_is_judged_before_and_after(healed):
    _, texts, _, (reference, results) = healed
    result = results["mean"]
    assert reference.keys() == result.before.keys() == texts.keys()
    for text, figure in reference.items():
        assert figure < result.after[text] < result.before[text]
    assert result.looks.tokens == (0, 512, 1024)
    assert list(result.looks.losses) == list(texts.values())


def test_both_stages_are_gone_through(healed):
    cache, *_ = healed
    lines = map(json.loads, (cache / "smollm2-135m-instruct-mean-healed.run" / "metrics.jsonl").open())
    assert [line["stage"] for line in lines if "stage" in line] == ["layers"] * 2 + ["loss"] * 6


def test_nothing_is_done_twice(healed, monkeypatch):
    cache, texts, plan, results = healed
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setattr(heal, "perplexity", None)
    assert heal.run_lane(cache, MODEL_DIR, texts, ["mean"], plan, 1) == results


def test_it_says_what_came_of_it(healed):
    *_, (reference, results) = healed
    lines = list(heal.report(reference, results))
    assert {line.count("|") for line in lines[:3]} == {13}
    assert lines[2].startswith("| mean | ") and "| 1,024 |" in lines[2]
    assert re.fullmatch(r"mean, short: nats a token .* at 0, .* at 512, .* at 1,024 \(source .*\)", lines[4])
    assert [panel.title for panel in heal.panels(results)] == ["short", "handbook"]


@pytest.mark.parametrize(
    ("after", "tokens", "word"), [(18.0, 200_000, "reached"), (18.1, 200_000, "MISSED"), (18.0, 200_001, "MISSED")]
)
def test_a_target_is_a_ratio_within_a_budget(after, tokens, word):
    curve = Looks((0, tokens), {}, {}, 0.0)
    result = heal.Healed({}, {heal.DOMAIN: after}, Made(MODEL_DIR, 0, 0), curve)
    assert heal.verdict(result, heal.DOMAIN, 10.0).endswith(word)


def test_the_budget_is_within_what_the_target_allows():
    recipe = heal.Plan().recipe(MODEL_DIR, {})
    assert recipe["steps"] * recipe["batch_size"] * recipe["window"] <= heal.MOST_TOKENS
