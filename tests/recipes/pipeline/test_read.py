"""Recipes of pipelines: what they may say, what is wrong with others, and the catalogue."""

import json

import pytest

from kvfold.common.embedded import MODEL_DIR
from kvfold.common.errors import UserError
from kvfold.recipes.pipeline.catalogue import copy_recipe, entries, find_recipe, recipe_names
from kvfold.recipes.pipeline.keys import SECTIONS
from kvfold.recipes.pipeline.read import read_pipeline, validate
from kvfold.uptrain.recipe import read_recipe

WHOLE = """# A title
#
# More of the head
source:
  model: embedded
convert:
  to: gqa
  kv-heads: 2
uptrain:
  teacher: source
  steps: 8
eval:
  text: [builtin, builtin:code]
  max_ratio: 1.5
publish:
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text=WHOLE, name="whole.yaml"):
        (tmp_path / name).write_text(text)
        return name

    return write


def test_a_whole_recipe(write):
    pipeline = read_pipeline(write())
    assert pipeline.name == "whole"
    assert pipeline.head.splitlines() == ["# A title", "#", "# More of the head"]
    assert pipeline.sections == {
        "source": {"model": "embedded"},
        "convert": {"to": "gqa", "kv_heads": 2},
        "uptrain": {"teacher": "source", "steps": 8},
        "eval": {"text": ("builtin", "builtin:code"), "max_ratio": 1.5},
        "publish": {},
    }
    assert pipeline.model == str(MODEL_DIR)
    assert pipeline.uptraining("in", "out").teacher == str(MODEL_DIR)
    assert list(pipeline.sections) == [name for name in SECTIONS if name in pipeline.sections]


def test_pairs_win_and_may_add_sections(write):
    pairs = ["source.model=org/other", "source.revision=v1", "convert.to=mla", "convert.kv_elements=64"]
    pairs += ["convert.for=[transformers, vllm]", "uptrain.steps=3", "uptrain.steps=4", "report.no-speed=true"]
    text = WHOLE.replace("  kv-heads: 2\n", "")
    pipeline = read_pipeline(write(text), pairs)
    assert pipeline.sections["convert"] == {"to": "mla", "kv_elements": 64, "for": ("transformers", "vllm")}
    assert pipeline.sections["uptrain"]["steps"] == 4
    assert pipeline.sections["report"] == {"no_speed": True}
    healed = pipeline.uptraining("in", "out")
    assert (healed.teacher, healed.teacher_revision) == ("org/other", "v1")


def test_uptrain_reads_its_section_of_it(write):
    recipe = read_recipe(write(), ["model=folded", "out=healed", "uptrain.steps=5"])
    assert (recipe.teacher, recipe.steps) == (str(MODEL_DIR), 5)
    with pytest.raises(UserError, match=r"no model; .*kvfold run fills in model and out"):
        read_recipe(write())


@pytest.mark.parametrize(
    ("change", "pairs", "message"),
    [
        (("kv-heads", "kv_haeds"), [], r"unknown key 'convert\.kv_haeds'; did you mean kv_heads\?"),
        (("kv-heads: 2", "kv_elements: 2"), [], r"unknown key 'convert\.kv_elements'"),
        (("uptrain:", "uptrian:"), [], r"unknown section 'uptrian'; did you mean uptrain\?"),
        (("to: gqa", "to: gpa"), [], r"unknown .*convert\.to 'gpa'; did you mean gqa\?"),
        (("to: gqa", "to: [gqa]"), [], r"convert\.to is \['gqa'\]; it must be text"),
        (("to: gqa", "to: {a: b}"), [], r"convert\.to is \{'a': 'b'\}; it must be text"),
        (("  to: gqa\n", ""), [], "convert.to is missing; one of gqa, mla"),
        (("  kv-heads: 2\n", ""), [], "its size is missing; write convert.kv_heads"),
        (("kv-heads: 2", "kv-heads: two"), [], "convert.kv-heads is 'two'; it must be a whole number"),
        (("kv-heads: 2", "kv-heads: 0"), [], "convert.kv-heads is 0; it must be at least 1"),
        (("kv-heads: 2", "kv-heads: 2\n  kv_heads: 2"), [], "twice, once with hyphens"),
        (("kv-heads: 2", "kv-heads: 2\n  method: svt"), [], r"unknown .*method 'svt'; did you mean svd\?"),
        (("  model: embedded\n", ""), [], "source.model is missing"),
        (("steps: 8", "steps: -8"), [], "uptrain: steps is -8; it must be at least 1"),
        (("steps: 8", "steps: 8\n  tokens: 9"), [], "uptrain: tokens 9 and steps 8 are given"),
        (("steps: 8", "steps: 8\n  out: there"), [], r"unknown key 'uptrain\.out'"),
        (("max_ratio: 1.5", "max_ratio: -1"), [], "eval.max_ratio is -1.0; it must be more than 0"),
        (("builtin:code", "there.txt"), [], "eval.text: text there.txt does not exist"),
        ((WHOLE[WHOLE.index("eval:") :], "eval: 3"), [], "the section eval is not a table"),
        (
            ("eval:\n", "calibrate:\n  calib: [gone.txt]\neval:\n"),
            [],
            r"calibrate\.calib: text gone\.txt does not exist",
        ),
        (("publish:", "tasks:"), [], "tasks.task is missing"),
        (("", ""), ["steps=3"], r"'steps=3' names no section; .*; uptrain\.steps=\.\.\."),
        (("", ""), ["uptrain.stebs=3"], r"unknown key 'stebs' .*did you mean steps\?"),
        (("", ""), ["uptrane.steps=3"], r"unknown section 'uptrane'; did you mean uptrain\?"),
        (("", ""), ["uptrain.steps"], "is not a pair"),
        (("", ""), ["convert.stats=a", "calibrate.chat=true"], "contradict each other"),
    ],
)
def test_what_is_wrong_is_named(write, change, pairs, message):
    with pytest.raises(UserError, match=message):
        read_pipeline(write(WHOLE.replace(*change)), pairs)


def test_recipes_of_either_kind_are_validated(write):
    assert validate(write()) == ["source", "convert", "uptrain", "eval", "publish"]
    flat = write("model: m\nout: o\nsteps: 3\n", "flat.yaml")
    assert validate(flat) == ["uptrain"]
    with pytest.raises(UserError, match="of an uptraining alone; kvfold uptrain runs it"):
        read_pipeline(flat)
    with pytest.raises(UserError, match="unknown key 'stepps'"):
        validate(write("model: m\nout: o\nstepps: 3\n", "flat.yaml"))


def test_files_in_strange_letters(tmp_path):
    (tmp_path / "r.yaml").write_bytes(WHOLE.replace("A title", "\u00dcber").encode("utf-16"))
    assert read_pipeline(tmp_path / "r.yaml").sections["convert"]["kv_heads"] == 2
    (tmp_path / "r.yaml").write_bytes(b"\xff" + WHOLE.encode())
    with pytest.raises(UserError, match="is not YAML in UTF-8"):
        read_pipeline(tmp_path / "r.yaml")


def test_a_folder_of_a_run_is_not_taken_for_its_recipe(write, tmp_path):
    (tmp_path / "embedded-gqa").mkdir()
    assert read_pipeline("embedded-gqa").name == "embedded-gqa"


def test_no_such_recipe(write):
    with pytest.raises(UserError, match=r"no recipe 'embeded-gqa'; did you mean embedded-gqa\?"):
        find_recipe("embeded-gqa")
    with pytest.raises(UserError, match=r"recipe gone\.yaml does not exist; kvfold recipes ls"):
        read_pipeline("gone.yaml")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_validates(name):
    pipeline = read_pipeline(name)
    assert pipeline.name == name
    assert {"source", "convert", "uptrain", "eval", "publish"} <= pipeline.sections.keys()
    assert f"kvfold run {name}" in pipeline.head


def test_the_catalogue(tmp_path):
    found = {entry.name: entry for entry in entries()}
    assert sorted(found) == recipe_names()
    assert found["embedded-gqa"].was_run
    copy = copy_recipe("embedded-gqa", tmp_path)
    assert copy.read_bytes() == find_recipe("embedded-gqa").read_bytes()
    with pytest.raises(UserError, match="exists"):
        copy_recipe("embedded-gqa", tmp_path)
    with pytest.raises(UserError, match="no recipe"):
        copy_recipe("../tiny", tmp_path)
    with pytest.raises(UserError, match="is a file; name the folder"):
        copy_recipe("embedded-gqa", copy)
    assert json.dumps(found["embedded-gqa"].to)
