"""The recipe: what YAML means, what is refused, and what a checkpoint is held against."""

import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from accelerate.utils import LoggerType

from kvfold.common.errors import UserError
from kvfold.common.typed import kinds_of
from kvfold.uptrain import recipe as module
from kvfold.uptrain.recipe import Recipe, read_recipe

LEAST = ["model=m", "out=o", "steps=10"]


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_a_flat_file(tmp_path):
    path = write(tmp_path, "model: m\nout: o\ntokens: 1_000_000\ndata: [a.txt, hub:b]\nweights: [1, 0.5]\nchat: yes\n")
    expected = Recipe(model="m", out="o", tokens=10**6, data=("a.txt", "hub:b"), weights=(1.0, 0.5), chat=True)
    assert read_recipe(path) == expected


def test_a_section_beside_others(tmp_path):
    path = write(tmp_path, "convert: {kv_heads: 2}\nuptrain:\n  model: m\n  out: o\n  steps: 3\n")
    assert read_recipe(path) == Recipe(model="m", out="o", steps=3)
    assert read_recipe(path, ["uptrain.steps=4", "seed=5"]) == Recipe(model="m", out="o", steps=4, seed=5)


def test_pairs_alone_and_the_last_one_wins():
    assert read_recipe(None, [*LEAST, "steps=11"]) == Recipe(model="m", out="o", steps=11)


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [
        ("1e-4", "learning_rate", 1e-4),  # text in YAML 1.1
        ("3", "learning_rate", 3.0),
        ("1e9", "pretrain_tokens", 10**9),
        ("010", "top_k", 10),  # eight in YAML 1.1
        ("no", "revision", "no"),  # false
        ("0012", "revision", "0012"),  # ten
        ("1e5", "revision", "1e5"),
        ("12:30", "teacher", "12:30"),  # 750
        ("null", "revision", None),
        ("off", "chat", False),
        ("true", "chat", True),
        ("a.txt", "data", ("a.txt",)),
        ("[a.txt, '12']", "data", ("a.txt", "12")),
        ("[]", "eval_text", ()),
        ("'null'", "run_dir", "null"),
    ],
)
def test_a_value_is_what_its_field_takes(tmp_path, written, field, value):
    others = {"teacher": "t"} if field != "teacher" else {}
    others |= {"alpha": "0.1", "pretrain_tokens": "1e9"}
    pairs = [f"{name}={said}" for name, said in others.items() if name != field]
    base = "model: m\nout: o\n"
    from_file = read_recipe(write(tmp_path, f"{base}{field}: {written}\n"), pairs)
    from_pair = read_recipe(write(tmp_path, base), [*pairs, f"{field}={written}"])
    for got in (getattr(from_file, field), getattr(from_pair, field)):
        assert got == value
        assert type(got) is type(value)


def test_a_pair_is_taken_as_it_stands():
    assert read_recipe(None, [*LEAST, "data=a #1: b=c.txt"]).data == ("a #1: b=c.txt",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modle: m", "unknown key 'modle'; did you mean model?"),
        ("model: m\nmodel: n", r"key 'model' stands there twice \(line 2\)"),
        ("uptrain: {seed: 1, seed: 2}", "key 'seed' stands there twice"),
        ("steps: many", "steps is 'many'; it must be a whole number"),
        ("steps: 1.5", "steps is '1.5'; it must be a whole number"),
        ("steps: [1, 2]", "it must be a whole number"),
        ("steps: {a: b}", "it must be a whole number"),
        ("steps:", "no budget is given"),
        ("learning_rate: fast", "learning_rate is 'fast'; it must be a number"),
        ("chat: perhaps", "chat is 'perhaps'; it must be true or false"),
        ("data: {a: b}", "data is .*it must be text"),
        ("learning_rate: .inf", "it must be a number"),
        ("learning_rate: inf", "learning_rate is inf"),
        ("learning_rate: nan", "learning_rate is nan"),
        ("tokens: 1e400", "it must be a whole number"),
        ("steps: " + "9" * 5000, "it must be a whole number"),
        ("steps: 1e30", "there is not so much of anything"),
        ("- a\n- b", "is not a table"),
        ("just words", "is not a table"),
        ("a: [1", "is not YAML"),
        ("\ta: 1", "is not YAML"),
        ("a: 1\n---\nb: 2", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("uptrain: 3", "the section uptrain is not a table"),
        ("1: 2", "unknown key '1'"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, text, said):
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=said) as error:
        read_recipe(path, ["out=o"] if "model" in text else ["model=m", "out=o"])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(path)) or "known:" in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_recipe(tmp_path / "no.yaml")
    with pytest.raises(UserError, match="is a directory"):
        read_recipe(tmp_path)
    (tmp_path / "bytes").write_bytes(b"a: \xc3\x28")
    with pytest.raises(UserError, match="not YAML"):
        read_recipe(tmp_path / "bytes")
    with pytest.raises(UserError, match="has no model; write model"):
        read_recipe(write(tmp_path, ""))
    with pytest.raises(UserError, match="has no out"):
        read_recipe(None, ["model=m"])


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("steps", "not a pair"),
        ("stepz=3", "unknown key 'stepz'.*did you mean steps"),
        ("uptrain.steps=3", "unknown key 'uptrain.steps'"),
        ("betas=[1", "value of betas is not YAML"),
    ],
)
def test_a_wrong_pair(pair, said):
    with pytest.raises(UserError, match=said):
        read_recipe(None, [*LEAST, pair])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": None}, "no budget is given"),
        ({"tokens": 5}, "tokens 5 and steps 10 are given"),
        ({"steps": None, "alpha": 0.05}, "alpha 0.05 says nothing without pretrain_tokens"),
        ({"pretrain_tokens": 5}, "pretrain_tokens 5 says nothing without alpha"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"window": 1}, "window is 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be more than 0"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"held_out": 0.0}, "name one as eval_text"),
        ({"betas": (0.9, 1.0)}, "betas is 1.0"),
        ({"betas": (0.9,)}, "1 betas are given"),
        ({"weights": (1.0, 2.0)}, "2 weights are given for 1 texts"),
        ({"weights": (0.0,)}, "weights is 0.0"),
        ({"data": ()}, "data names no text"),
        ({"data": ("a", "a")}, "names a twice"),
        ({"train": "attn"}, "unknown train 'attn'; did you mean attention"),
        ({"schedule": "cosin"}, "did you mean cosine"),
        ({"precision": "int8"}, "unknown precision"),
        ({"track": ("wandbb",)}, "unknown tracker 'wandbb'; did you mean wandb"),
        ({"top_k": 5}, "top_k 5 says nothing without teacher"),
        ({"temperature": 2.0}, "says nothing without teacher"),
        ({"loss_on": "assistant"}, "says nothing without chat"),
        ({"lora_alpha": 4.0}, "says nothing without lora_rank"),
        ({"lora_rank": 4, "train": "all"}, "leave one out"),
        ({"micro_batch_size": 64}, "micro_batch_size 64 is more than the 32"),
        ({"processes": 3}, "batch_size 32 does not divide among 3 processes; try 33"),
        ({"out": "m"}, "out m is the model itself"),
        ({"out": "./t", "teacher": "t"}, "is the teacher itself"),
        ({"out": ""}, "out is empty"),
        ({"out": ".."}, "no name of its own"),
        ({"run_dir": "o/"}, "run_dir o/ is out itself"),
        ({"run_dir": "o/run"}, r"run_dir /.*o/run lies in out /.*o; neither"),
        ({"out": "r/checkpoints", "run_dir": "r"}, r"out /.*r/checkpoints lies in run_dir /.*r; neither"),
        ({"data": ("a\0",)}, "with a NUL in it"),
        ({"held_out": 1e-20}, "held_out is 1e-20; it must be 0, or at least 1e-6"),
        ({"teacher": "t", "temperature": 1e-300}, "temperature is 1e-300; it must be between 0.001 and 1000"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"keep": 0}, "keep is 0"),
    ],
)
def test_values_that_cannot_be(values, said):
    with pytest.raises(UserError, match=said):
        Recipe(**{"model": "m", "out": "o", "steps": 10} | values)


def test_no_input_lies_in_out(tmp_path, monkeypatch):
    """Or replacing `out` would remove it."""
    monkeypatch.chdir(tmp_path)
    for path in ("o/inner", "beside"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "text").write_text("x")
    usual = {"model": "beside", "out": "o", "steps": 1, "overwrite": True}
    for name in ("model", "teacher", "reference", "init_from"):
        with pytest.raises(UserError, match=f"{name} o/inner lies in out o; write the healed model to another"):
            Recipe(**usual | {name: "o/inner"})
    for name in ("data", "eval_text"):
        with pytest.raises(UserError, match=f"{name} o/inner/text lies in out o"):
            Recipe(**usual | {name: ("beside/text", "o/inner/text")})
    (tmp_path / "beside" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"run_dir .*beside is a checkpoint; give the run a folder of its own"):
        Recipe(**usual | {"run_dir": "beside"})


def test_one_file_under_two_names_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("x")
    with pytest.raises(UserError, match=r"data names \./a twice; give it once, with a weight|data names a twice"):
        Recipe(model="m", out="o", steps=1, data=("a", "./a"))


def test_home_is_written_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    recipe = Recipe(model="~/m", out="~/o", steps=1, data=("~/t", "hub:a"), teacher="~nobody-of-that-name/t")
    assert (recipe.model, recipe.out, recipe.data) == ("/home/me/m", "/home/me/o", ("/home/me/t", "hub:a"))
    assert recipe.teacher == "~nobody-of-that-name/t"


def test_a_bomb_of_anchors_is_named_in_a_line(tmp_path):
    lists = ["&a0 [x, x, x, x, x, x, x, x, x]"]
    lists += [f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    anchors = "".join(f"  - {each}\n" for each in lists)
    (tmp_path / "bomb.yaml").write_text(f"model: m\nout: o\nsteps: 1\ndata:\n{anchors}")
    with pytest.raises(UserError, match=r"data is .*; it must be text") as caught:
        read_recipe(tmp_path / "bomb.yaml")
    assert len(str(caught.value)) < 300


def test_every_number_has_a_range_and_every_rule_a_field():
    kinds = kinds_of(Recipe)
    numbers = {name for name, kind in kinds.items() if kind.of in (int, float)}
    assert set(module._RANGES) == numbers
    named = {*module.CHOICES, *module._NEEDS, *module._NEEDS.values(), *module._BESIDE_THE_WEIGHTS}
    assert named <= set(kinds)


def test_every_key_is_explained():
    said = Recipe.__doc__.split("Args:")[1].split("Raises:")[0]
    explained = {line.split(":")[0].strip() for line in said.splitlines() if line.startswith("        ")}
    assert {field.name for field in fields(Recipe)} <= explained


def test_trackers_are_those_of_accelerate():
    assert set(module.TRACKERS) == {name.value for name in LoggerType} - {"all"}


def test_steps_of_a_budget():
    recipe = Recipe(model="m", out="o", tokens=1000, batch_size=4)
    assert recipe.steps_of(50) == 5
    assert recipe.steps_of(99) == 2  # 1.2 steps more would be more than the budget
    with pytest.raises(UserError, match=r"1,000 tokens is less than one step of 4 windows of 251 \(1,004\)"):
        recipe.steps_of(251)
    assert Recipe(model="m", out="o", steps=7).steps_of(10**6) == 7
    assert Recipe(model="m", out="o", alpha=0.05, pretrain_tokens=10**6, batch_size=10).steps_of(100) == 50


def test_the_run_folder():
    assert Recipe(model="m", out="a/o/", steps=1).run_folder == Path("a/o.run")
    assert Recipe(model="m", out="o", run_dir="r", steps=1).run_folder == Path("r")


def test_identity_is_what_determines_the_weights():
    recipe = Recipe(model="m", out="o", steps=10)
    identity = recipe.identity()
    assert json.loads(json.dumps(identity)) == identity
    for values in ({"out": "p"}, {"micro_batch_size": 2}, {"processes": 2}, {"save_every": 1}, {"device": "cpu"}):
        assert replace(recipe, **values).identity() == identity
    for values in ({"seed": 1}, {"batch_size": 16}, {"data": ("a",)}, {"learning_rate": 1e-3}, {"init_from": "c"}):
        assert replace(recipe, **values).identity() != identity
    assert set(identity) | module._BESIDE_THE_WEIGHTS == set(asdict(recipe))


def test_lists_of_a_caller_in_python():
    assert Recipe(model="m", out="o", steps=1, data=["a", "b"], betas=[0.5, 0.6]).data == ("a", "b")
    assert Recipe(model="m", out="o", steps=1, data="builtin").data == ("builtin",)


def test_reading_needs_no_torch(tmp_path):
    import subprocess

    code = (
        "import sys; sys.modules['torch'] = sys.modules['accelerate'] = None\n"
        "from kvfold.uptrain.recipe import read_recipe\n"
        "import kvfold.uptrain.launch\n"
        f"read_recipe(None, {LEAST})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
