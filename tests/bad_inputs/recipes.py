"""Recipes that cannot be."""

# ruff: noqa: E501  a row a case, as of any table
from __future__ import annotations

from .case import Case
from .world import RECIPE, Spoil, fifo, put, whole


def recipe(text: str | bytes) -> Spoil:
    return put("recipe.yaml", text)


VALIDATE = "recipes validate recipe.yaml"
UPTRAIN = "uptrain recipe.yaml model=src out=out steps=1"
RECIPES = [
    Case("no such recipe", whole, "recipes show embeded-gqa", "'embeded-gqa'", "did you mean embedded-gqa"),
    Case("no such file", whole, "run no.yaml", "no.yaml does not exist", "kvfold recipes ls"),
    Case("a folder as a recipe", whole, "recipes validate src", "src is a directory", "YAML file"),
    Case("a FIFO as a recipe", lambda f: fifo(f / "r.yaml"), "recipes validate r.yaml", "r.yaml is a device", "YAML file"),
    Case("a device as a recipe", whole, "run /dev/zero", "/dev/zero is a device", "YAML file"),
    Case("an unknown section", recipe(RECIPE + "convrt:\n  to: gqa\n"), VALIDATE, "unknown section 'convrt'", "did you mean convert"),
    Case("an unknown key", recipe(RECIPE + "uptrain:\n  stepz: 3\n"), VALIDATE, "'uptrain.stepz'", "did you mean steps"),
    Case("an unknown key of an uptraining", recipe("sed: 3\n"), UPTRAIN, "unknown key 'sed'", "did you mean seed"),
    Case("a key twice", recipe("seed: 3\nseed: 4\n"), UPTRAIN, "'seed' stands there twice", "remove one"),
    Case("a number that is none", recipe("learning_rate: fast\n"), UPTRAIN, "learning_rate is 'fast'", "must be a number"),
    Case("a number below zero", recipe("batch_size: -4\n"), UPTRAIN, "batch_size is -4", "at least 1"),
    Case("a number that is NaN", recipe("temperature: .nan\n"), UPTRAIN, "temperature", "must be a number"),
    Case("no YAML", recipe("a: [1, 2\nb: }"), VALIDATE, "recipe.yaml is not YAML", "line"),
    Case("a list", recipe("- 1\n- 2\n"), VALIDATE, "recipe.yaml is not a table", "key: value"),
    Case("nested 100,000 deep", recipe("[" * 100_000), VALIDATE, "recipe.yaml is not YAML", "nested too deep; write fewer"),
    Case("binary", recipe(b"\x80\x81\xff" * 100), VALIDATE, "recipe.yaml", "write it as text"),
    Case("empty", recipe(""), VALIDATE, "source.model is missing", "name a directory"),
    Case("YAML that makes objects", recipe("model: !!python/object/apply:os.system ['touch pwned']\nout: out\nsteps: 1\n"), VALIDATE, "model", "must be text"),
    Case("a billion laughs", recipe("a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9))), VALIDATE, "unknown section 'a'", "known"),
    Case("no size", recipe("source:\n  model: src\nconvert:\n  to: gqa\n"), VALIDATE, "size is missing", "convert.kv_heads"),
    Case("a text that is not there", recipe(RECIPE + "eval:\n  text: [no.txt]\n"), VALIDATE, "no.txt does not exist", "give a path"),
    Case("a source that is not there", whole, "run recipe.yaml source.model=no/where/at/all -o out", "no/where/at/all does not exist", "give a checkpoint directory"),
    Case("a stage that there is not", whole, "run recipe.yaml -o out --until the-end", "'the-end'", "known"),
    Case("a pair without a section", whole, "run recipe.yaml kv_heads=2 -o out", "'kv_heads=2' names no section", "convert.kv_heads"),
    Case("a plan for a source that is not there", whole, "plan no/where/at/all", "no/where/at/all does not exist", "give a checkpoint directory"),
]  # fmt: skip
