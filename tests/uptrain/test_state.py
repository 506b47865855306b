"""A checkpoint is whole or not there, gives back the bits that were saved, and is refused where it does not belong."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.uptrain import state
from kvfold.uptrain.state import MARKER, Checkpoints, check_recipe, clear

IDENTITY = {"model": "abc", "betas": (0.9, 0.95), "seed": 0}  # a tuple comes back as a list


class Setting:
    """Two layers, of which the second is trained, with an optimizer that has taken a step."""

    def __init__(self, folder: Path, *, drawn_from: int = 0, keep: int = 2, **identity):
        torch.manual_seed(drawn_from)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[0].requires_grad_(False)
        self.accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model[1].parameters())
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.checkpoints = Checkpoints(folder, IDENTITY | identity, self.accelerator, ["1.weight", "1.bias"], keep)
        self.said: list[str] = []

    def step(self) -> None:
        self.model(torch.ones(2, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def latest(self):
        return self.checkpoints.latest(self.said.append)


@pytest.fixture
def saved(tmp_path) -> Setting:
    """With a checkpoint after steps 1 and 2."""
    setting = Setting(tmp_path)
    for step in (1, 2):
        setting.step()
        setting.checkpoints.save(step)
    return setting


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_there_is_none_at_first(tmp_path):
    assert Setting(tmp_path / "not yet").latest() is None


def test_what_was_saved_comes_back(saved, tmp_path):
    """Weights and moments; frozen weights are those of the model that it is loaded into."""
    other = Setting(tmp_path, drawn_from=1)
    frozen = copy.deepcopy(other.model[0].state_dict())
    found = other.latest()
    assert found.step == 2
    assert found.identity == json.loads(json.dumps(IDENTITY))
    other.checkpoints.restore(found)
    for name, tensor in other.model[1].state_dict().items():
        assert torch.equal(tensor, saved.model[1].state_dict()[name])
    for name, tensor in other.model[0].state_dict().items():
        assert torch.equal(tensor, frozen[name])
    saved.step()
    other.model[0].load_state_dict(saved.model[0].state_dict())
    other.step()
    for name, tensor in other.model.state_dict().items():
        torch.testing.assert_close(tensor, saved.model.state_dict()[name], rtol=0, atol=0)


def test_frozen_weights_take_no_room(saved, tmp_path):
    assert set(load_file(tmp_path / "step-00000002" / "model.safetensors")) == {"1.weight", "1.bias"}


def test_the_last_ones_stay(tmp_path):
    setting = Setting(tmp_path, keep=3)
    for step in (1, 5, 20, 100):
        setting.checkpoints.save(step)
    assert names(tmp_path) == ["step-00000005", "step-00000020", "step-00000100"]


def test_a_step_that_is_saved_is_not_saved_again(saved, tmp_path):
    before = (tmp_path / "step-00000002" / MARKER).stat().st_mtime_ns
    saved.checkpoints.save(2)
    assert (tmp_path / "step-00000002" / MARKER).stat().st_mtime_ns == before


def test_a_disk_that_fails_leaves_the_earlier_ones(saved, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "hash_files", fail)
    with pytest.raises(OSError, match="No space left"):
        saved.checkpoints.save(3)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert saved.latest().step == 2


def test_what_killed_writers_left_is_cleared_and_never_loaded(saved, tmp_path):
    left = tmp_path / ".step-00000003.kvfold-new"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert saved.latest().step == 2
    clear(tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def flip(path: Path) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("model.safetensors", flip, "model.safetensors has changed"),
        ("optimizer.bin", flip, "optimizer.bin has changed"),
        ("optimizer.bin", lambda path: path.write_bytes(b""), "optimizer.bin has changed"),
        ("model.safetensors", Path.unlink, "model.safetensors is missing"),
        ("random_states_0.pkl", Path.unlink, "random_states_0.pkl is missing"),
        (MARKER, Path.unlink, f"its {MARKER} cannot be read"),
        (MARKER, lambda path: path.write_text("[]"), f"its {MARKER} cannot be read"),
        (MARKER, lambda path: path.write_bytes(b"\0" * 100), f"its {MARKER} cannot be read"),
    ],
)
def test_a_damaged_one_is_put_aside(saved, tmp_path, name, damage, said):
    damage(tmp_path / "step-00000002" / name)
    assert saved.latest().step == 1
    assert saved.said == [f"{tmp_path / 'step-00000002'} is damaged ({said}); an earlier checkpoint is used"]
    assert names(tmp_path) == ["step-00000001", "step-00000002.damaged"]
    assert saved.latest().step == 1
    saved.checkpoints.save(2)  # the step is taken again
    assert saved.latest().step == 2


def test_a_step_that_is_damaged_twice(saved, tmp_path):
    for _ in range(2):
        (tmp_path / "step-00000002" / MARKER).unlink()
        assert saved.latest().step == 1
        saved.checkpoints.save(2)
    assert saved.latest().step == 2


def change_marker(folder: Path, **changes) -> None:
    """As another kvfold, or another run, would have written it."""
    marker = json.loads((folder / MARKER).read_text())
    del marker["hash"]
    marker |= changes
    (folder / MARKER).write_text(json.dumps(marker | {"hash": state._hash(marker)}))


@pytest.mark.parametrize("change", [{"step": 4}, {"files": {}}, {"identity": {}}])
def test_a_marker_that_was_edited_is_damage(saved, tmp_path, change):
    path = tmp_path / "step-00000002" / MARKER
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert saved.latest().step == 1
    assert "its kvfold_state.json has changed" in saved.said[0]


def test_a_checkpoint_under_the_name_of_another_is_damage(saved, tmp_path):
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000004")
    assert saved.latest().step == 1
    assert "step-00000004 is damaged (it is that of step 2)" in saved.said[0]


def test_what_the_user_puts_there_stays(saved, tmp_path):
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000002-best")
    (tmp_path / "step-mine").mkdir()
    assert saved.latest().step == 2 and not saved.said
    for step in (3, 4, 5):
        saved.step()
        saved.checkpoints.save(step)
    assert {"step-00000002-best", "step-mine"} < set(names(tmp_path))


def test_a_recipe_is_compared_before_anything_is_loaded(saved, tmp_path):
    identity = saved.checkpoints.identity
    check_recipe(tmp_path, {"seed": identity["seed"]})
    check_recipe(tmp_path / "not yet", {"seed": 1})
    with pytest.raises(UserError, match="step-00000002 is of another recipe: seed was 0 and is 1"):
        check_recipe(tmp_path, {"seed": 1})
    (tmp_path / "step-00000002" / MARKER).write_text("{")
    with pytest.raises(UserError, match="step-00000001 is of another recipe"):
        check_recipe(tmp_path, {"seed": 1})


def test_one_without_an_optimizer_is_refused(saved, tmp_path):
    (tmp_path / "step-00000002" / "optimizer.bin").unlink()
    with pytest.raises(UserError, match=r"no optimizer state \(optimizer.bin is missing\).*init_from="):
        saved.latest()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"processes": 4}, "was saved by 4 processes and there are 1 now; launch as many again"),
        ({"kind": "fsdp"}, "was saved by a run that is sharded by FSDP, and this one is not sharded; launch it with"),
        ({"format_version": 99}, "has format 99, which this kvfold does not know"),
    ],
)
def test_one_of_another_kind_is_refused(saved, tmp_path, changes, said):
    change_marker(tmp_path / "step-00000002", **changes)
    with pytest.raises(UserError, match=said):
        saved.latest()


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        ({"seed": 1}, "is of another recipe: seed was 0 and is 1; take the recipe back, or choose another run_dir"),
        ({"seed": 1, "model": "x" * 99}, r"model is another \(and seed\); .*\(and init_from="),
        ({"new": True}, "new was None and is True"),
        ({"betas": (0.9, 0.99)}, r"betas was \[0\.9, 0\.95\] and is \[0\.9, 0\.99\]"),
    ],
)
def test_one_of_another_recipe_is_refused(saved, tmp_path, identity, said):
    with pytest.raises(UserError, match=said) as caught:
        Setting(tmp_path, **identity).latest()
    assert "\n" not in str(caught.value)


def among_two(setting: Setting, monkeypatch, *, is_main: bool, answer: object = None, see: int = 2) -> None:
    """Let it be one of two processes, of which the main one answers, and so many see the folder."""
    setting.checkpoints.accelerator = SimpleNamespace(
        is_main_process=is_main, num_processes=2, device="cpu", reduce=lambda tensor, reduction: torch.tensor(see)
    )
    if not is_main:
        monkeypatch.setattr(state, "broadcast_object_list", lambda found: [answer])


def test_the_main_process_looks_for_all(saved, tmp_path, monkeypatch):
    found = saved.latest()
    flip(tmp_path / "step-00000002" / "model.safetensors")
    among_two(saved, monkeypatch, is_main=False, answer=found)
    assert saved.latest() is found
    assert names(tmp_path) == ["step-00000001", "step-00000002"], "others touch nothing"
    among_two(saved, monkeypatch, is_main=False, answer=UserError("refused"))
    with pytest.raises(UserError, match="refused"):
        saved.latest()


def test_processes_without_a_common_disk_do_not_go_on(saved, monkeypatch):
    for step in (1, 2):
        change_marker(saved.checkpoints.folder / f"step-{step:08d}", processes=2)
    among_two(saved, monkeypatch, is_main=True, see=1)
    with pytest.raises(EnvironmentFailure, match=r"not all processes see .*step-00000002; give them a run_dir"):
        saved.latest()
