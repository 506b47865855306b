"""A whole run: it heals, it can be killed anywhere, and what it writes is the checkpoint that came in, trained."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.common.errors import CheckFailed, UserError
from kvfold.common.status import Stopped
from kvfold.uptrain import loop, state
from kvfold.uptrain.history import read_history
from kvfold.uptrain.recipe import Recipe
from kvfold.uptrain.run import uptrain

from .micro import micro_checkpoint, micro_recipe, micro_text

STEPS = 30


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return micro_checkpoint(tmp_path_factory.mktemp("source") / "model", attention_dropout=0.1)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return micro_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def undisturbed(source, text, tmp_path_factory) -> Path:
    """The output of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "out"
    uptrain(micro_recipe(source, text, out))
    return out


def moments(out: Path, step: int = STEPS) -> dict:
    folder = out.with_name(out.name + ".run") / "checkpoints" / f"step-{step:08d}"
    return torch.load(folder / "optimizer.bin", weights_only=True)["state"]


def losses(out: Path) -> list[tuple[int, float]]:
    lines = read_history(out.with_name(out.name + ".run"))
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def assert_same_run(out: Path, other: Path) -> None:
    """The same bits at the end, the same moments, and the same loss at every step: the same windows."""
    ours, theirs = load_file(out / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, msg=name)
    assert losses(out) == losses(other)
    ours, theirs = moments(out), moments(other)
    for number, entries in ours.items():
        for name, tensor in entries.items():
            torch.testing.assert_close(tensor, theirs[number][name], rtol=0, atol=0)


def test_it_learns_and_says_so(undisturbed, source):
    lines = read_history(undisturbed.with_name("out.run"))
    looks = [line["held_out"] for line in lines if "held_out" in line]
    assert [line["step"] for line in lines if "held_out" in line] == [0, 10, 20, 30]
    assert all(list(look) == list(looks[0]) for look in looks)
    (name,) = looks[0]
    assert looks[-1][name] < looks[0][name] - 0.5
    assert [step for step, _ in losses(undisturbed)] == list(range(1, STEPS + 1))
    assert (undisturbed.with_name("out.run") / "loss.png").stat().st_size > 1000


def test_the_output_is_the_source_with_other_weights(undisturbed, source):
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in undisturbed.iterdir()} == names | {"kvfold.json"}
    for name in names - {"model.safetensors"}:
        if name != "config.json":
            assert (undisturbed / name).read_bytes() == (source / name).read_bytes(), name
    assert json.loads((undisturbed / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    before, after = load_file(source / "model.safetensors"), load_file(undisturbed / "model.safetensors")
    assert before.keys() == after.keys(), "a tied head stays tied"
    assert all(not torch.equal(before[name], after[name]) for name in before)


class Killed(BaseException):
    pass


def stop_in_the_middle(monkeypatch, step: int) -> None:
    """Let the second micro-batch of a step be the last thing that the process does."""
    backward = loop.Training._backward

    def break_off(self, indices, stage, weight, last):
        if self.step == step and last:
            raise Killed
        return backward(self, indices, stage, weight, last)

    monkeypatch.setattr(loop.Training, "_backward", break_off)


def stop_while_saving(monkeypatch, step: int) -> None:
    """Let a checkpoint lack its marker."""
    hashing = state.hash_files

    def break_off(folder, names, *, hashing):
        if f"{step:08d}" in str(folder):
            raise Killed
        return original(folder, names, hashing=hashing)

    original = hashing
    monkeypatch.setattr(state, "hash_files", break_off)


@pytest.mark.parametrize(
    "breaks",
    [
        [(stop_in_the_middle, 10), (stop_in_the_middle, 20)],
        [(stop_in_the_middle, 5)],
        [(stop_in_the_middle, 14), (stop_in_the_middle, 14), (stop_in_the_middle, 29)],
        [(stop_while_saving, 10), (stop_while_saving, 20), (stop_while_saving, 30)],
    ],
    ids=["on the beat", "before the first checkpoint", "between checkpoints", "while saving"],
)
def test_a_run_that_was_broken_off_ends_with_the_same_bits(breaks, source, text, undisturbed, tmp_path):
    recipe = micro_recipe(source, text, tmp_path / "out")
    for how, step in breaks:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            how(patch, step)
            uptrain(recipe)
        assert not (tmp_path / "out").exists()
    uptrain(recipe)
    assert_same_run(tmp_path / "out", undisturbed)


KILL = """
import os, signal, sys
from kvfold.uptrain import loop, state
from kvfold.uptrain.__main__ import main
where, step = sys.argv[1], int(sys.argv[2])
def kill(): os.kill(os.getpid(), signal.SIGKILL)
if where == "step":
    original = loop.Training._backward
    def backward(self, indices, stage, weight, last):
        if self.step == step and last: kill()
        return original(self, indices, stage, weight, last)
    loop.Training._backward = backward
if where == "save":
    original = state.hash_files
    def hash_files(folder, names, *, hashing):
        if f"{step:08d}" in str(folder): kill()
        return original(folder, names, hashing=hashing)
    state.hash_files = hash_files
main(sys.argv[3:])
"""


def pairs(recipe: Recipe) -> list[str]:
    """The recipe as a command line has it."""
    return [
        f"{field.name}={json.dumps(value) if isinstance(value, list | tuple) else value}"
        for field in dataclasses.fields(recipe)
        if (value := getattr(recipe, field.name)) not in (field.default, None)
    ]


def test_kill_9_in_a_step_and_in_a_save(source, text, undisturbed, tmp_path):
    recipe = micro_recipe(source, text, tmp_path / "out")
    for where, step in (("save", 10), ("step", 17), ("save", 20)):
        command = [sys.executable, "-c", KILL, where, str(step), *pairs(recipe)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == -signal.SIGKILL, done.stderr
    uptrain(recipe)
    assert_same_run(tmp_path / "out", undisturbed)


def test_a_signal_saves_and_the_same_command_goes_on(source, text, undisturbed, tmp_path, monkeypatch):
    recipe = micro_recipe(source, text, tmp_path / "out", save_every=0)
    backward = loop.Training._backward

    def interrupt(self, indices, stage, weight, last):
        if self.step == 12 and last:
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(self, indices, stage, weight, last)

    monkeypatch.setattr(loop.Training, "_backward", interrupt)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        uptrain(recipe)
    assert signal.getsignal(signal.SIGTERM) is before
    assert stopped.value.number == signal.SIGTERM
    assert stopped.value.left == "step 13 of 30 is saved; the same command goes on"
    monkeypatch.undo()
    report = uptrain(recipe)
    assert report.resumed_from == 13
    assert_same_run(tmp_path / "out", undisturbed)


def checkpoints(out: Path) -> list[Path]:
    return sorted((out.with_name(out.name + ".run") / "checkpoints").iterdir())


@pytest.fixture
def stopped_at_20(source, text, tmp_path) -> Recipe:
    recipe = micro_recipe(source, text, tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        stop_in_the_middle(patch, 21)
        uptrain(recipe)
    assert [path.name for path in checkpoints(tmp_path / "out")] == ["step-00000010", "step-00000020"]
    return recipe


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", state.MARKER])
def test_a_truncated_checkpoint_is_passed_over(name, stopped_at_20, undisturbed, tmp_path, capfd):
    broken = checkpoints(tmp_path / "out")[-1] / name
    broken.write_bytes(broken.read_bytes()[:-20])
    report = uptrain(stopped_at_20)
    assert report.resumed_from == 10
    assert f"{broken.parent} is damaged ({'its ' * (name == state.MARKER)}{name}" in capfd.readouterr().err
    assert_same_run(tmp_path / "out", undisturbed)


def test_the_last_checkpoints_are_kept(undisturbed):
    assert [path.name for path in checkpoints(undisturbed)] == ["step-00000020", "step-00000030"]


def test_another_recipe_is_refused(stopped_at_20):
    with pytest.raises(UserError, match=r"of another recipe: learning_rate was 0\.01 and is 0\.02; .*init_from="):
        uptrain(dataclasses.replace(stopped_at_20, learning_rate=2e-2))


def test_what_does_not_change_the_weights_may_change(stopped_at_20, undisturbed, tmp_path):
    changed = dataclasses.replace(stopped_at_20, save_every=7, keep=1, micro_batch_size=4, gradient_checkpointing=True)
    assert uptrain(changed).resumed_from == 20
    for (_, loss), (_, other) in zip(losses(tmp_path / "out"), losses(undisturbed), strict=True):
        assert loss == pytest.approx(other, abs=0.05)


def test_a_checkpoint_without_its_optimizer_is_no_place_to_go_on_from(stopped_at_20, tmp_path):
    last = checkpoints(tmp_path / "out")[-1]
    (last / "optimizer.bin").unlink()
    with pytest.raises(UserError, match=r"no optimizer state .*init_from="):
        uptrain(stopped_at_20)
    anew = dataclasses.replace(stopped_at_20, run_dir=str(tmp_path / "anew"), init_from=str(last))
    assert uptrain(anew).resumed_from == 0
    looks = {line["step"]: line["held_out"] for line in read_history(tmp_path / "out.run") if "held_out" in line}
    anew = {line["step"]: line["held_out"] for line in read_history(tmp_path / "anew") if "held_out" in line}
    assert anew[0] == pytest.approx(looks[20], rel=1e-6)


def test_frozen_tensors_keep_their_bytes_and_the_dtype_stays(text, tmp_path):
    source = micro_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    uptrain(micro_recipe(source, text, tmp_path / "out", train="attention", steps=3))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(tensor, after[name]) == ("self_attn" not in name), name
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == (source / "model.safetensors").stat().st_size


def test_a_broken_model_is_not_trained(text, tmp_path):
    source = micro_checkpoint(tmp_path / "source", initializer_range=1.0)
    with pytest.raises(CheckFailed, match=r"before training the loss on .* is .* nats a token, a guess has 7\.62"):
        uptrain(micro_recipe(source, text, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_reference_that_is_no_better_is_named_instead(text, tmp_path):
    source = micro_checkpoint(tmp_path / "source", initializer_range=1.0)
    with pytest.raises(CheckFailed, match=r"the reference has \d+\.\d+, so it is not the conversion"):
        uptrain(micro_recipe(source, text, tmp_path / "out", reference=str(source)))


@pytest.mark.parametrize(("rate", "loss"), [(1.0, r"\d+\.\d+"), (1e12, "nan")])
def test_what_training_has_broken_is_not_written(source, text, tmp_path, rate, loss):
    recipe = micro_recipe(source, text, tmp_path / "out", learning_rate=rate, warmup_steps=0, steps=1)
    with pytest.raises(CheckFailed, match=rf"training has broken the model: after step 1 the loss .* is {loss} nats"):
        uptrain(recipe)
    assert not (tmp_path / "out").exists() and not checkpoints(tmp_path / "out")


def test_a_broken_reference_is_told_before_the_first_step(source, text, tmp_path):
    broken = micro_checkpoint(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][:] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckFailed, match=r"the loss of .*broken on .* is no number"):
        uptrain(micro_recipe(source, text, tmp_path / "out", reference=str(broken)))


@pytest.mark.parametrize("role", ["teacher", "reference"])
@pytest.mark.parametrize(("change", "said"), [
    ({"vocab_size": 2049}, "other has vocab_size 2049, the student 2048; use a model of the same tokenizer"),
    ({"max_position_embeddings": 16}, "other has a context of 16 tokens, and a window 32; lower window"),
    ("tokenizer", r"other has another tokenizer: 2,0\d\d of 2,048 tokens have another number"),
])  # fmt: skip
def test_a_model_that_is_not_about_the_same_text(source, text, tmp_path, role, change, said):
    other = micro_checkpoint(tmp_path / "other", **(change if isinstance(change, dict) else {}))
    if change == "tokenizer":
        path = other / "tokenizer.json"
        table = json.loads(path.read_text())
        order = list(table["model"]["vocab"])
        table["model"]["vocab"] = {token: place for place, token in enumerate(reversed(order))}
        table["added_tokens"] = []
        path.write_text(json.dumps(table))
    with pytest.raises(UserError, match=said):
        uptrain(micro_recipe(source, text, tmp_path / "out", **{role: str(other)}))


def test_a_run_that_could_not_begin_leaves_no_folder(source, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        uptrain(micro_recipe(source, tmp_path / "nowhere", tmp_path / "deep" / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_changed_is_noticed(source, stopped_at_20, text, tmp_path):
    other = micro_text(tmp_path)
    rows = other.read_text().splitlines()
    other.write_text("\n".join(rows[:-3]))
    with pytest.raises(UserError, match="is of another recipe: data is another"):
        uptrain(dataclasses.replace(stopped_at_20, data=(str(other),)))
    other.write_text("\n".join(rows))
    assert uptrain(dataclasses.replace(stopped_at_20, data=(str(other),))).resumed_from == 20, "it is known by content"


def test_metrics_that_are_lost_do_not_stop_a_run(stopped_at_20, undisturbed, tmp_path):
    (tmp_path / "out.run" / "metrics.jsonl").write_text("3\n")
    report = uptrain(stopped_at_20)
    assert report.held_out_before == {} and report.held_out
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(undisturbed / "model.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    (tmp_path / "out.run" / "metrics.jsonl").unlink()
    again = uptrain(dataclasses.replace(stopped_at_20, overwrite=True))
    assert (again.resumed_from, again.held_out) == (STEPS, report.held_out)


def test_weights_to_begin_with_are_read_once(stopped_at_20, tmp_path):
    last = checkpoints(tmp_path / "out")[-1]
    anew = dataclasses.replace(stopped_at_20, run_dir=str(tmp_path / "anew"), init_from=str(last), steps=4)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        stop_in_the_middle(patch, 3)
        uptrain(dataclasses.replace(anew, save_every=1))
    (last / "model.safetensors").write_bytes(b"cut short")
    assert uptrain(anew).resumed_from > 0
    with pytest.raises(UserError, match=r"init_from .* is damaged"):
        uptrain(dataclasses.replace(anew, out=str(tmp_path / "third"), run_dir=str(tmp_path / "third.run")))


def test_the_seed_draws_adapters(source, text, tmp_path):
    def drawn(seed, name):
        recipe = micro_recipe(source, text, tmp_path / name, lora_rank=2, train="attention", seed=seed, steps=1)
        uptrain(dataclasses.replace(recipe, learning_rate=1e-12, warmup_steps=0, save_every=1))
        weights = load_file(checkpoints(tmp_path / name)[-1] / "model.safetensors")
        return next(tensor for name, tensor in sorted(weights.items()) if "lora_A" in name)

    one, same, other = drawn(0, "one"), drawn(0, "same"), drawn(1, "other")
    assert torch.equal(one, same) and not torch.allclose(one, other)


def test_a_loss_that_is_no_number_stops_the_run(source, text, tmp_path):
    with pytest.raises(CheckFailed, match=r"no finite number at step \d+ on rank 0; it was not taken"):
        uptrain(micro_recipe(source, text, tmp_path / "out", learning_rate=1e15, clip=0.0, warmup_steps=0))
    assert not (tmp_path / "out").exists()


def test_a_teacher_beside(source, text, tmp_path):
    teacher = micro_checkpoint(tmp_path / "teacher", seed=8)
    options = {"layer_share": 0.5, "layer_learning_rate": 1e-2, "steps": 20, "learning_rate": 1e-3}
    recipe = micro_recipe(source, text, tmp_path / "out", teacher=str(teacher), **options)
    report = uptrain(recipe)
    assert report.reference.keys() == report.held_out.keys()
    lines = [line for line in read_history(tmp_path / "out.run") if "loss" in line]
    assert [line["stage"] for line in lines] == ["layers"] * 10 + ["loss"] * 10
    assert lines[9]["divergence"] < 0.7 * lines[0]["divergence"]
    assert all("cross_entropy" in line for line in lines[10:])


def test_a_model_is_its_own_best_teacher(source, text, tmp_path):
    source = micro_checkpoint(tmp_path / "source")
    recipe = micro_recipe(
        source, text, tmp_path / "out", teacher=str(source), layer_share=0.0, steps=2, learning_rate=1e-6
    )
    uptrain(recipe)
    lines = [line for line in read_history(tmp_path / "out.run") if "loss" in line]
    assert lines[0]["loss"] == pytest.approx(0, abs=1e-6)


def test_two_runs_do_not_share_a_folder(source, text, tmp_path, monkeypatch):
    recipe = micro_recipe(source, text, tmp_path / "out")
    with pytest.raises(UserError, match=r"another kvfold is working in .*out\.run"):
        from kvfold.common.atomic import working_folder

        with working_folder(recipe.run_folder):
            uptrain(recipe)
