"""The benchmark of decoding runs; its figures are for machines at rest."""

from __future__ import annotations

import dataclasses

import pytest

from kvfold.eval.speed import floors
from kvfold.eval.speed.record import SpeedProtocol, SpeedReport, SpeedRow
from kvfold.recipes.bench import decode

SMALL = "--layers 2 --hidden 32 --intermediate 48 --heads 4 --kv-heads 2 --rank 16 --rope 8 --steps 2 --runs 2"


def parts(said: str) -> list[list[list[str]]]:
    """What was said between empty lines: cells of tables, without titles, or sentences."""
    found = []
    for part in said.strip().split("\n\n"):
        lines = part.splitlines()
        lines = lines[2:] if lines[0].startswith("|") else lines
        found.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines])
    return found


def test_it_prints_every_form_at_every_context(capsys, monkeypatch):
    monkeypatch.setitem(floors.COPIED_BYTES, "cpu", 2**20)
    monkeypatch.setitem(floors.MATRIX, "cpu", 64)
    decode.main(["--contexts", "40", "80", "--stock", "--prefill-runs", "1", *SMALL.split()])
    first, table, grouped, *notes, prompts, apart = parts(capsys.readouterr().out)
    assert first[0][0].startswith("2 layers, hidden 32, 4 heads, batch size 1, float32 on ")
    forms = ["MHA", "GQA-2", "MLA 16+8", "MLA stock"]
    assert [row[:2] for row in table] == [[n, form] for n in ("40", "80") for form in forms]
    assert [row[2] for row in table[:4]] == ["heads", "heads", "latent, absorbed", "latent, expanded"]
    assert all(float(cell) > 0 for row in table for cell in row[3:8])
    assert [row[6] for row in table[::4]] == ["1.00", "1.00"]
    for start in (0, 4):  # by the medians beside it
        for row in table[start : start + 4]:
            assert float(row[6]) == pytest.approx(float(row[3]) / float(table[start][3]), abs=0.02)
    assert [row[0] for row in grouped] == ["40", "80"]
    assert [len(row) for row in grouped] == [9, 9]
    assert [row[:2] for row in prompts] == [row[:2] for row in table]
    assert all("is bound by arithmetic here" in line[0] for note in notes for line in note)
    assert 0 < float(apart[0][0].split(" by ")[1].split()[0]) < 1e-4  # another order of sums, hence not quite the same


def test_the_forms_differ_in_nothing_but_attention():
    options = decode.parse(["--contexts", "40", *SMALL.split()])
    models = {name: decode.make_model(config, options) for name, config in decode.configs(options).items()}
    others = {
        name: [(key, list(value.shape)) for key, value in model.named_parameters() if "self_attn" not in key]
        for name, model in models.items()
    }
    assert others["MHA"] == others["GQA-2"] == others["MLA 16+8"]
    assert {model.config._attn_implementation for model in models.values()} == {"sdpa"}
    assert models["MLA 16+8"].config.qk_nope_head_dim == models["MHA"].config.head_dim == 8


def report(**steps: list[tuple[int, int, float]]) -> SpeedReport:
    """A report of made-up rows: context, bytes of the cache and milliseconds, by form; all else is the same."""
    blank = {field.name: 1.0 for field in dataclasses.fields(SpeedRow)}
    rows = [
        SpeedRow(
            **blank
            | {"model": model.replace("_", "-"), "context": context, "read_cache_bytes": cached, "bound": "memory"}
            | {"milliseconds_per_step": ms, "milliseconds_per_step_min": ms - 1, "milliseconds_per_step_max": ms + 1}
        )
        for model, rows in steps.items()
        for context, cached, ms in rows
    ]
    protocol = SpeedProtocol(**{field.name: "" for field in dataclasses.fields(SpeedProtocol)})
    return SpeedReport(rows, 4e9, 1e9, None, protocol)


# MHA takes a millisecond for each million bytes of cache, four times what copying them would, and 10 besides.
@pytest.mark.parametrize(
    ("ms", "by_copying", "by_pace"),
    [
        (19.9, "no slower", "no slower"),
        (21.9, "no slower", "within the spread"),
        (22.1, "no slower", "slower"),
        (42.6, "within the spread", "slower"),
        (44.6, "slower", "slower"),
    ],
)
def test_grouped_heads_are_held_to_their_smaller_cache(ms, by_copying, by_pace):
    rows = report(MHA=[(1, 10**7, 20.0), (4, 4 * 10**7, 50.0)], GQA_8=[(1, 10**6, 1.0), (4, 10**7, ms)])
    *_, last = decode.grouped_table(rows, "GQA-8")
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == ["4", f"{ms:.2f}", f"{ms - 1:.2f}", f"{ms + 1:.2f}", "30.0", "42.50", by_copying, "20.00", by_pace]


def test_it_says_in_words_what_arithmetic_binds():
    rows = report(MHA=[(16384, 3, 10.0)], MLA=[(16384, 1, 13.0)])
    assert not list(decode.arithmetic_notes(rows))
    changed = {"bound": "arithmetic", "flops_per_step": 5.0, "x_first": 1 / 1.3}
    rows = dataclasses.replace(rows, results=[rows.results[0], dataclasses.replace(rows.results[1], **changed)])
    assert list(decode.arithmetic_notes(rows)) == [
        "MLA at 16,384 cached tokens is bound by arithmetic here: it reads 0.50 x and computes 5.00 x what MHA does, "
        "2.5 operations for each byte where this machine has 0.2. It takes 1.30 x MHA's time."
    ]
