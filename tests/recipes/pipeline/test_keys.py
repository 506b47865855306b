"""The sections of a recipe are the flags of the commands that they stand for."""

import click
import pytest

from kvfold.cli import kvfold
from kvfold.common.typed import kinds_of
from kvfold.convert.demands import ENGINES
from kvfold.convert.merge.layers import GROUPINGS
from kvfold.convert.merge.methods import METHODS
from kvfold.convert.mla.convert import FORMS
from kvfold.convert.mla.rotation import SELECTS
from kvfold.recipes.pipeline.keys import CONVERSIONS, FILLED_IN, SECTIONS
from kvfold.uptrain.recipe import Recipe

# What a pipeline says itself to every command.
ITS_OWN = {"json", "help", "dry_run", "out"}
COMMANDS = {
    "calibrate": ("calibrate", SECTIONS["calibrate"], {"overwrite", "revision"}),
    "convert gqa": ("convert gqa", CONVERSIONS["gqa"], {"overwrite", "revision"}),
    "convert mla": ("convert mla", CONVERSIONS["mla"], {"overwrite", "revision"}),
    "eval": ("verify", SECTIONS["eval"], {"revision"}),
    "tasks": ("eval tasks", SECTIONS["tasks"], {"revision"}),
    "report": ("report", SECTIONS["report"], {"overwrite", "revision", "run"}),
    "publish": ("publish", SECTIONS["publish"], {"report", "recipe", "folder"}),
}


def options_of(words):
    command = kvfold
    for word in words.split():
        command = command.commands[word]
    return {
        name.removeprefix("--").replace("-", "_"): option
        for option in command.params
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("--")
    }


@pytest.mark.parametrize("section", COMMANDS)
def test_the_keys_are_the_flags(section):
    words, keys, filled_in = COMMANDS[section]
    options = options_of(words)
    assert {*keys, *filled_in} - {"repo_id"} == options.keys() - ITS_OWN
    for name, kind in keys.items():
        if name != "repo_id":
            option = options[name]
            assert option.multiple == (kind.many and name != "for"), name
            assert (option.is_flag or option.flag_value is False) == (kind.of is bool), name
            if isinstance(option.type, click.Choice):
                assert set(kind.choices) == set(option.type.choices), name
            elif kind.of in (int, float):
                assert isinstance(option.type.convert("2", None, None), kind.of), name


def test_what_a_pipeline_fills_in_of_an_uptraining():
    known = kinds_of(Recipe)
    assert known.keys() > FILLED_IN
    assert SECTIONS["uptrain"].keys() == known.keys() - FILLED_IN


@pytest.mark.parametrize(
    ("to", "key", "known"),
    [
        ("gqa", "method", METHODS),
        ("gqa", "grouping", GROUPINGS),
        ("mla", "form", FORMS),
        ("mla", "rope_select", ("auto", *SELECTS)),
        ("mla", "for", ENGINES),
    ],
)
def test_choices_are_those_of_the_conversion(to, key, known):
    assert set(CONVERSIONS[to][key].choices) == set(known)
