"""The benchmark of rolling perplexity runs, and finds one figure by both; its times are for machines at rest."""

import pytest

pytest.importorskip("lm_eval")

from kvfold.common.loading import load_tokenizer
from kvfold.recipes.bench import ppl
from kvfold.recipes.tiny import MODEL_DIR

TEXT = "A window holds tokens, and each of them is scored once. " * 40


@pytest.mark.parametrize("windows", [[], ["--windows", "3"]])
def test_both_sides_find_the_same(windows, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    knobs = ["--window", "32", "--batch-size", "2", "--runs", "1"]
    ppl.main([str(MODEL_DIR), "--text", str(tmp_path / "text.txt"), *knobs, *windows])
    said = capsys.readouterr().out.splitlines()
    tokens = int(said[0].split()[0])
    assert said[0].endswith("tokens in windows of 32, 2 at a time, in torch.float32 on cpu, 1 alternating runs")
    assert abs(tokens - 96) < 3 if windows else tokens > 200
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in said if line.startswith("|")][2:]
    assert [row[0] for row in rows] == ["lm-eval", "kvfold"]
    losses = [float(row[1]) for row in rows]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert float(said[-1].split(": ")[1]) == pytest.approx(losses[1] - losses[0], abs=2e-8)
    assert rows[0][-1] == "1.00"
    assert float(rows[1][-1]) > 0


def test_a_text_is_cut_where_a_token_ends():
    tokenizer = load_tokenizer(MODEL_DIR)
    beginning = ppl.cut(tokenizer, TEXT, 10)
    assert TEXT.startswith(beginning) and len(tokenizer(beginning, add_special_tokens=False)["input_ids"]) == 10
    with pytest.raises(ValueError, match="and 100000 are asked for"):
        ppl.cut(tokenizer, TEXT, 100_000)
