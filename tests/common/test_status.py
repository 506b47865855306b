"""What a failure is called, and who of several processes says so."""

import pytest
import torch
from safetensors import SafetensorError

from kvfold.common import status
from kvfold.common.errors import CheckFailed, EnvironmentFailure, UserError
from kvfold.common.status import Stopped, status_of


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def raising(error):
    def work():
        raise error

    return work


DISK = {
    "safetensors": SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
    "torch": RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
    "system": OSError(28, "No space left on device"),
    "other": RuntimeError("No space left on device"),
}


@pytest.mark.parametrize("error", DISK.values(), ids=DISK)
def test_a_full_disk_is_the_machines_fault(error, capsys):
    assert status_of(raising(error)) == 3
    said = capsys.readouterr().err
    assert said.startswith("kvfold: the machine failed: ") and said.count("\n") == 1


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")])
def test_too_little_memory_is_the_machines_fault(error, capsys):
    assert status_of(raising(error)) == 3
    assert capsys.readouterr().err == "kvfold: the machine failed: out of memory\n"


def test_what_nobody_foresaw_is_our_fault(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "")
    assert status_of(raising(RuntimeError("surprise"))) == 70
    assert "please report" in capsys.readouterr().err


@pytest.mark.parametrize("said", [UserError("a"), CheckFailed("a"), Stopped(15)])
def test_the_first_of_a_machine_speaks_for_all_about_what_they_were_told(said, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    heard, waited = [], []

    def sleep(seconds):
        waited.append(seconds)
        raise Stopped(15)  # a launcher stops the others when the first has ended

    monkeypatch.setattr(status.time, "sleep", sleep)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        status_of(raising(said))
        heard.append(capsys.readouterr().err)
    assert heard[0] and not heard[1]
    # The second does not end first, or the launcher would stop the first before it has spoken; a signal stops both.
    assert len(waited) == (not isinstance(said, Stopped))


def test_each_speaks_of_what_befell_it(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert status_of(raising(EnvironmentFailure("no disk"))) == 3
    assert capsys.readouterr().err == "kvfold: no disk\n"


def test_a_rank_that_was_left_behind_silences_nobody(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert status_of(raising(UserError("no such text"))) == 2
    assert capsys.readouterr().err == "kvfold: no such text\n"


def test_what_only_one_process_was_told_it_says_itself(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(status.time, "sleep", lambda seconds: None)
    assert status_of(raising(UserError("there is no text here"))) == 2
    assert capsys.readouterr().err == "kvfold: there is no text here\n"
