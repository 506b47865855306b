from __future__ import annotations

import shlex

import click
import pytest

from kvfold.cli import kvfold
from kvfold.eval.report.commands import command_lines

SETTINGS = {
    "text": ("a.txt", "b c.txt"),
    "window": 64,
    "max_windows": None,
    "batch_size": 1,
    "dtype": "checkpoint",
    "device": "cpu",
    "revision": "v1",
    "max_ratio": 1.2,
    "speed": True,
    "context": (),
    "run": ("r",),
    "title": None,
}
TIMED = {"context": [16, 32], "steps": 8, "dtype": "bfloat16"}


def parsed(line):
    """The parameters that the named command takes from a line."""
    words, command = shlex.split(line)[1:], kvfold
    while isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words.pop(0))
    return command.make_context(command.name, words, resilient_parsing=False).params


@pytest.mark.parametrize("models", [("m", "n"), ("-m", "--n")])
def test_each_line_says_what_was_done(models):
    page, compared, first, second, timed = map(parsed, command_lines(models, "o", SETTINGS, cached=512, timed=TIMED))
    source, *outs = models
    scoring = {key: SETTINGS[key] for key in ("text", "window", "batch_size", "dtype", "device", "revision")}
    assert page.items() >= (scoring | {"src": source, "outs": tuple(outs), "overwrite": True, "max_ratio": 1.2}).items()
    assert (page["run"], page["context"], page["speed"]) == (("r",), (), True)
    assert compared.items() >= (scoring | {"src": source, "outs": tuple(outs)}).items()
    assert [each["model"] for each in (first, second)] == list(models)
    assert [each["revision"] for each in (first, second)] == ["v1", None]
    assert {each["context"] for each in (first, second)} == {512}
    expected = {"models": models, "context": (16, 32), "steps": 8, "dtype": "bfloat16", "revision": "v1"}
    assert timed.items() >= expected.items()


def test_without_a_timing_none_is_said():
    lines = command_lines(["m", "n"], "o", SETTINGS, cached=512, timed=None)
    assert not [line for line in lines if "speed" in line]
