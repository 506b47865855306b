"""The processes of one run, and a launcher's promise that is not kept."""

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch

from kvfold.common import parallel
from kvfold.common.errors import EnvironmentFailure
from kvfold.common.parallel import Workers, is_first_here, is_main_process

SCRIPT = """
import sys, torch
from pathlib import Path
from kvfold.common.parallel import Workers, is_main_process
workers = Workers("cpu")
total = workers.sum(torch.tensor([1.0 + workers.rank, 10.0], dtype=torch.float64))
agreed = [workers.agree(answer) for answer in (workers.rank == 0, workers.rank != 0)]
workers.wait()
said = workers.size, workers.device, total.tolist(), agreed, is_main_process()
Path(sys.argv[1], str(workers.rank)).write_text(repr(said))
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_one_process():
    workers = Workers("cpu")
    assert (workers.rank, workers.size, workers.device) == (0, 1, "cpu")
    total = torch.ones(3)
    assert workers.sum(total) is total
    assert (workers.agree(True), workers.agree(False)) == (True, False)
    workers.wait()
    assert is_main_process()


def test_the_launcher_names_the_main_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, is_first in (("RANK", is_main_process), ("LOCAL_RANK", is_first_here)):
        monkeypatch.setenv(name, "0")
        assert is_first()
        monkeypatch.setenv(name, "1")
        assert not is_first()


@pytest.mark.parametrize("size", [None, "", "1"])
def test_a_number_that_was_left_behind_says_nothing_to_one_process(monkeypatch, size):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert is_main_process() and is_first_here()
    assert Workers("cpu").size == 1


def test_a_size_that_is_no_number(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(EnvironmentFailure, match="WORLD_SIZE is 'two', which is not a number; unset it"):
        Workers("cpu")


def test_two_processes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launch, tmp_path / "script.py", tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in ("0", "1"):
        assert (tmp_path / rank).read_text() == repr((2, "cpu", [3.0, 20.0], [True, False], rank == "0"))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_does_not_come_is_not_waited_for_for_ever(rank, monkeypatch, unused_port):
    said = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": unused_port}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parallel, "PATIENCE", timedelta(seconds=1))
    start = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=r"2 processes were promised and 1 found each other .*torchrun") as no:
        Workers("cpu")
    assert time.monotonic() - start < 20
    assert "\n" not in str(no.value)


def test_a_number_of_processes_without_a_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EnvironmentFailure, match=r"RANK expected.*launch with torchrun --nproc_per_node 2"):
        Workers("cpu")


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])
