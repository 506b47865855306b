"""Real processes that share a run: as many as there are, they learn the same, and whatever happens to them is undone.

A launch costs seconds, so one shows all that it can.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvfold.common.errors import CheckFailed, UserError
from kvfold.uptrain.history import read_history
from kvfold.uptrain.recipe import Recipe
from kvfold.uptrain.run import uptrain

from .micro import micro_checkpoint, micro_recipe, micro_text
from .test_run import checkpoints, pairs

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
CLOSE = {"rtol": 0, "atol": 1e-5}
# The norm that gradients are clipped by is added up in another order where they are sharded, in fp32.
SHARDED_CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROCESSES, STEPS = 2, 30

pytestmark = pytest.mark.xdist_group("uptrain-distributed")  # or each worker of pytest would make the runs below


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def text(folder) -> Path:
    return micro_text(folder)


def recipe(folder: Path, out: str, *, dropout: float = 0.1, **changes) -> Recipe:
    """Of a model with or without draws of its own."""
    source = folder / f"source-{dropout}"
    if not source.exists():
        micro_checkpoint(source, attention_dropout=dropout)
    changes = {"learning_rate": 3e-3, "micro_batch_size": 1, "processes": PROCESSES, **changes}
    return micro_recipe(source, folder / "text.jsonl", folder / out, **changes)


def torchrun(plan: Sequence[tuple[str, int]], *recipes: Recipe, how: Sequence[str] = ()) -> list[str]:
    """Two processes by torchrun, and what happens to them; it starts them anew after each but the last."""
    how = how or ["--standalone", "--nproc_per_node", str(PROCESSES)]
    command = [sys.executable, "-m", "kvfold.uptrain.agent", "torchrun", *how]
    command += ["--max-restarts", str(max(0, len(plan) - 1)), "-m", "tests.uptrain.disturbed", json.dumps(plan)]
    return [*command, *(word for each in recipes for word in ["--", *pairs(each)])]


def start(command: Sequence[str], **env: str) -> subprocess.Popen:
    # By itself torchrun has processes that it started anew look for each other where their predecessors were
    # (pytorch issue 135712).
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(
        command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen, status: int = 0) -> str:
    """What a launch says, if it ends as it should."""
    try:
        _, said = process.communicate(timeout=400)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status, said
    return said


def run(command: Sequence[str], status: int = 0, **env: str) -> str:
    return finish(start(command, **env), status)


def tensors(value: object, prefix: str = "") -> dict[str, Tensor]:
    """All tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return {prefix: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {name: found for key, each in items for name, found in tensors(each, f"{prefix}/{key}").items()}


def moments(out: Path) -> dict[str, Tensor]:
    """The optimizer's, of the last step: in one file, or in torch's distributed form."""
    last = checkpoints(out)[-1]
    assert last.name == f"step-{STEPS:08d}"
    if (last / "optimizer.bin").exists():
        return tensors(torch.load(last / "optimizer.bin", weights_only=True))
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = out.with_name(out.name + ".moments")
    dcp_to_torch_save(last / "optimizer_0", whole)
    return tensors(torch.load(whole, weights_only=True))


def metrics(out: Path) -> list[dict]:
    """All that is a function of the recipe."""
    lines = read_history(out.with_name(out.name + ".run"))
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def curve(out: Path) -> Tensor:
    """The loss of every step and, at the looks, of the held-out text."""
    return torch.tensor([line.get("loss") or next(iter(line["held_out"].values())) for line in metrics(out)])


def assert_same_run(out: Path, other: Path) -> None:
    assert metrics(out) == metrics(other)
    for ours, theirs in ((load_file(each / "model.safetensors") for each in (out, other)), map(moments, (out, other))):
        assert ours.keys() == theirs.keys()
        assert len(ours) > 10
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, msg=name)


def assert_close_run(out: Path, other: Path, close: dict[str, float] = CLOSE) -> None:
    assert [line["step"] for line in metrics(out)] == [line["step"] for line in metrics(other)]
    torch.testing.assert_close(curve(out), curve(other), **close)
    # AdamW hardly minds how long a gradient is. (On a CPU, torch's norms are good to 1e-5 themselves.)
    norms = (torch.tensor([line["grad_norm"] for line in metrics(one) if "loss" in line]) for one in (out, other))
    torch.testing.assert_close(*norms, rtol=100 * close["rtol"] or 1e-3, atol=0)
    ours, theirs = (load_file(each / "model.safetensors") for each in (out, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], msg=name, **close)


@pytest.fixture(scope="module")
def undisturbed(folder, text) -> Path:
    """What two processes make that nothing happens to; beside it, in `plain`, without dropout."""
    run(torchrun([], recipe(folder, "ddp"), recipe(folder, "plain", dropout=0.0)))
    return folder / "ddp"


@pytest.fixture(scope="module")
def sharded(folder, text) -> Path:
    """The same, the weights shared among the processes."""
    run(torchrun([], recipe(folder, "fsdp")), **FSDP)
    return folder / "fsdp"


def test_two_processes_learn_what_one_does(folder, undisturbed):
    alone = recipe(folder, "alone", dropout=0.0)
    uptrain(dataclasses.replace(alone, processes=None, micro_batch_size=2))
    assert_close_run(folder / "plain", folder / "alone")


def test_two_processes_survive_all_and_end_on_two_machines(folder, undisturbed):
    """Killed in a save and in a step, stopped by a signal, and gone on with by two machines: the same bits."""
    disturbed = recipe(folder, "disturbed")
    plan = [("kill in a save", 10), ("kill in a step", 17), ("signal", 22)]
    said = run(torchrun(plan, disturbed), 128 + signal.SIGTERM)
    assert said.count("going on from step 10 of 30") == 1
    assert said.count("stopped; step 23 of 30 is saved; the same command goes on") == 1, "one speaks for both"
    assert [path.name for path in checkpoints(folder / "disturbed")] == ["step-00000020", "step-00000023"]

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machine = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "kvfold"]
    machine += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    machines = [start(torchrun([], disturbed, how=machine)) for _ in range(2)]
    said = "".join(map(finish, machines))
    assert "going on from step 23 of 30" in said
    assert_same_run(folder / "disturbed", undisturbed)


def test_sharded_processes_learn_the_same(folder, sharded, undisturbed):
    assert_close_run(sharded, undisturbed, SHARDED_CLOSE)
    assert "lm_head.weight" not in load_file(sharded / "model.safetensors"), "a tied head stays tied"


def test_sharded_processes_survive_and_name_who_broke(folder, sharded):
    disturbed = recipe(folder, "fsdp-disturbed")
    said = run(torchrun([("kill in a save", 20), ("nan", 13)], disturbed), CheckFailed.exit_status, **FSDP)
    assert said.count("the loss is no finite number at step 14 on rank 1; it was not taken") == 1
    assert [path.name for path in checkpoints(folder / "fsdp-disturbed")] == ["step-00000010"]
    said = run(torchrun([], disturbed), **FSDP)
    assert "going on from step 10 of 30" in said
    assert_same_run(folder / "fsdp-disturbed", sharded)


def test_a_recipe_for_two_processes_does_not_train_in_one(folder, text):
    alone = recipe(folder, "refused")
    with pytest.raises(UserError, match="asks for 2 processes and there are 1; launch with torchrun"):
        uptrain(alone)
    assert not alone.run_folder.exists()
