"""Real processes that share a run: as many as there are, they learn the same, and whatever happens to them is undone.

A launch costs seconds, so one shows all that it can.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvfold.uptrain.history import read_history
from kvfold.uptrain.recipe import Recipe
from kvfold.uptrain.run import uptrain

from .micro import micro_checkpoint, micro_recipe, micro_text
from .test_run import checkpoints, pairs

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
CLOSE = {"rtol": 0, "atol": 1e-5}
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
    return micro_recipe(source, folder / "text.jsonl", folder / out, micro_batch_size=1, processes=PROCESSES, **changes)


def torchrun(
    plan: Sequence[tuple[str, int]], *recipes: Recipe, how: Sequence[str] = (), restarts: int = 0
) -> list[str]:
    """Two processes by torchrun, which starts them anew so many times, and what happens to them."""
    how = how or ["--standalone", "--nproc_per_node", str(PROCESSES)]
    command = [sys.executable, "-m", "kvfold.uptrain.agent", "torchrun", *how, "--max-restarts", str(restarts)]
    command += ["-m", "tests.uptrain.disturbed", json.dumps(plan)]
    return [*command, *(word for each in recipes for word in ["--", *pairs(each)])]


def start(command: Sequence[str], **env: str) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **env}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(command: Sequence[str], status: int = 0, **env: str) -> str:
    """What a launch says, if it ends as it should."""
    process = start(command, **env)
    try:
        _, said = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == status, said
    return said


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


def figures(out: Path, name: str) -> Tensor:
    return torch.tensor([line[name] for line in metrics(out) if name in line])


def assert_same_run(out: Path, other: Path) -> None:
    assert metrics(out) == metrics(other)
    for ours, theirs in ((load_file(each / "model.safetensors") for each in (out, other)), map(moments, (out, other))):
        assert ours.keys() == theirs.keys()
        assert len(ours) > 10
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, msg=name)


def assert_close_run(out: Path, other: Path) -> None:
    assert [line["step"] for line in metrics(out)] == [line["step"] for line in metrics(other)]
    torch.testing.assert_close(figures(out, "loss"), figures(other, "loss"), **CLOSE)
    torch.testing.assert_close(figures(out, "grad_norm"), figures(other, "grad_norm"), rtol=1e-3, atol=0)
    ours, theirs = (load_file(each / "model.safetensors") for each in (out, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], msg=name, **CLOSE)


@pytest.fixture(scope="module")
def undisturbed(folder, text) -> Path:
    """The output of a run of two processes that nothing happened to; `plain` beside it is of a model without dropout."""
    run(torchrun([], recipe(folder, "ddp"), recipe(folder, "plain", dropout=0.0)))
    return folder / "ddp"


@pytest.fixture(scope="module")
def sharded(folder, text) -> Path:
    """The same, the weights shared among the processes."""
    run(torchrun([], recipe(folder, "fsdp")), **FSDP)
    return folder / "fsdp"


def test_two_processes_learn_what_one_does(folder, undisturbed):
    alone = recipe(folder, "alone", dropout=0.0)
    uptrain(micro_recipe(Path(alone.model), Path(alone.data[0]), folder / "alone"))
    assert_close_run(folder / "plain", folder / "alone")
    looks = [
        [*line["held_out"].values()]
        for out in ("plain", "alone")
        for line in metrics(folder / out)
        if "held_out" in line
    ]
    torch.testing.assert_close(*torch.tensor(looks).chunk(2), **CLOSE)


def test_two_processes_survive_all_and_end_on_two_machines(folder, undisturbed):
    """Killed in a save and in a step, stopped by a signal, and gone on with by two machines: the same bits."""
    disturbed = recipe(folder, "disturbed")
    plan = [("kill in a save", 10), ("kill in a step", 17), ("signal", 22)]
    said = run(torchrun(plan, disturbed, restarts=2), 128 + signal.SIGTERM)
    assert said.count("going on from step 10 of 30") == 1
    saved = [int(path.name.removeprefix("step-")) for path in checkpoints(folder / "disturbed")]
    assert len(saved) == 2
    assert saved[0] == 20
    assert 22 < saved[1] < STEPS
    assert said.count(f"stopped; step {saved[1]} of 30 is saved; the same command goes on") == 2

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machine = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "kvfold"]
    machine += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    other = start(torchrun([], disturbed, how=machine))
    try:
        said = run(torchrun([], disturbed, how=machine))
        _, others = other.communicate(timeout=60)
    finally:
        other.kill()
    assert other.returncode == 0, others
    assert f"going on from step {saved[1]} of 30" in said + others
    assert_same_run(folder / "disturbed", undisturbed)


def test_sharded_processes_learn_the_same(sharded, undisturbed):
    assert_close_run(sharded, undisturbed)
    assert set(load_file(sharded / "model.safetensors")) == set(
        load_file(sharded.parent / "source-0.1" / "model.safetensors")
    )
