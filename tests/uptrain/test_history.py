"""The metrics of a run: what is written is read, and a kill leaves neither half lines nor steps twice."""

import json
import math

import pytest

from kvfold.uptrain.history import NAME, History, draw, read_history


def write(folder, steps):
    history = History(folder, 0)
    for step in steps:
        history.add(step=step, loss=1 / step)
    return history


def test_what_is_written_is_read(tmp_path):
    history = write(tmp_path, range(1, 4))
    assert read_history(tmp_path) == history.lines == [{"step": step, "loss": 1 / step} for step in (1, 2, 3)]


def test_there_is_no_history_at_first(tmp_path):
    assert read_history(tmp_path) == []
    assert History(tmp_path, 0).lines == []


def test_steps_that_will_be_taken_again_are_forgotten(tmp_path):
    write(tmp_path, range(1, 8))
    history = History(tmp_path, 5)
    assert history.lines == read_history(tmp_path)
    assert [line["step"] for line in history.lines] == [*range(1, 6)]
    history.add(step=6, loss=0.5)
    assert [line["step"] for line in read_history(tmp_path)] == [*range(1, 7)]
    assert {path.name for path in tmp_path.iterdir()} == {NAME}


@pytest.mark.parametrize("left", range(1, len('{"step": 3, "loss": 0.3333333333333333}\n')))
def test_a_last_line_that_was_torn(tmp_path, left):
    """Wherever a kill cuts it, it is read as a whole or not at all, and what is added stands on a line of its own."""
    write(tmp_path, [1, 2])
    line = json.dumps({"step": 3, "loss": 1 / 3}) + "\n"
    with (tmp_path / NAME).open("a") as file:
        file.write(line[:left])
    whole = [1, 2, 3] if left == len(line) - 1 else [1, 2]
    assert [line["step"] for line in read_history(tmp_path)] == whole
    History(tmp_path, 3).add(step=4, loss=0.25)
    assert [line["step"] for line in read_history(tmp_path)] == [*whole, 4]


def test_a_last_line_of_zeros(tmp_path):
    """What some file systems leave when the power goes."""
    write(tmp_path, [1, 2])
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"\0" * 30)
    assert [line["step"] for line in read_history(tmp_path)] == [1, 2]


def test_figures_that_are_no_number_are_left_out(tmp_path):
    History(tmp_path, 0).add(step=1, tokens=8, loss=math.nan, grad_norm=math.inf, cross_entropy=2.0, reference=None)
    assert read_history(tmp_path) == [{"step": 1, "tokens": 8, "cross_entropy": 2.0}]


def test_a_held_out_loss_that_is_no_number(tmp_path):
    """A model that is broken before the first step is judged, and said to be."""
    History(tmp_path, 0).add(step=0, tokens=0, held_out={"a": math.nan, "b": 1.0}, reference={})
    assert read_history(tmp_path) == [{"step": 0, "tokens": 0, "held_out": {"b": 1.0}, "reference": {}}]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "[" * 100_000,
        '{"step": true}',
        '{"step": -1}',
        '{"step": 3.0}',
        '{"step": 3, "cross_entropy": 2.0}',
        '{"step": 3, "tokens": "8", "cross_entropy": 2.0}',
        '{"step": 3, "tokens": 8, "cross_entropy": NaN}',
        '{"step": 3, "tokens": 8, "cross_entropy": "2.0"}',
        f'{{"step": 3, "tokens": 8, "cross_entropy": 1{"0" * 400}}}',
        '{"step": 3, "tokens": 8, "held_out": [2.0]}',
        '{"step": 3, "tokens": 8, "held_out": {"a": null}}',
        '{"step": 3, "tokens": 8, "held_out": {"a": 2.0}, "reference": {"a": Infinity}}',
        '{"step": 3, "held_out": {"a": 2.0}}',
    ],
)
def test_a_line_that_another_wrote_ends_what_is_read(tmp_path, line):
    write(tmp_path, [1, 2])
    with (tmp_path / NAME).open("a") as file:
        file.write(line + '\n{"step": 4}\n')
    assert [line["step"] for line in read_history(tmp_path)] == [1, 2]


LINES = [
    {"step": 0, "tokens": 0, "held_out": {"prose": 3.0}, "reference": {"prose": 2.0}},
    {"step": 1, "tokens": 10, "stage": "layers", "loss": 0.4},  # no head, no cross entropy
    {"step": 2, "tokens": 20, "stage": "loss", "loss": 0.3, "cross_entropy": 2.5},
    {"step": 2, "tokens": 20, "held_out": {"prose": 2.2}, "reference": {"prose": 2.0}},
]


PICTURED = {
    "nothing": [],
    "one look": LINES[:1],
    "all": LINES,
    "no reference": [{**LINES[0], "reference": {}}, *LINES[1:]],
    "a look that found no number": [*LINES, {**LINES[3], "held_out": {}}],
}


@pytest.mark.parametrize("lines", PICTURED.values(), ids=PICTURED)
def test_the_picture(tmp_path, lines, recwarn):
    assert draw(lines, "$title_$ 題", tmp_path / "loss.png") == ""
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not recwarn.list
