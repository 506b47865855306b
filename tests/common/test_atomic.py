"""A directory appears whole or not at all, whatever kills its writer."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kvfold.common import atomic
from kvfold.common.atomic import output_directory, output_file, working_folder
from kvfold.common.errors import UserError

WRITER = """
import sys, time
from pathlib import Path
from kvfold.common.atomic import output_directory
with output_directory(Path(sys.argv[1]), overwrite=True) as staging:
    for i in range(200):
        (staging / f"part{i}").write_text(sys.argv[2])
        if i == 5:
            print("writing", flush=True)
            time.sleep(float(sys.argv[3]))
    (staging / "config.json").write_text('{"model_type": "%s"}' % sys.argv[2])
"""


def writer(out, text, pause=0.0):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(out), text, str(pause)], stdout=subprocess.PIPE)


def content(out):
    """The one text that all files of a whole directory hold; None where there is no directory."""
    if not out.exists():
        return None
    assert len(list(out.iterdir())) == 201
    (text,) = {path.read_text() for path in out.glob("part*")}
    assert said(out) == text
    return text


def said(out):
    return json.loads((out / "config.json").read_text())["model_type"]


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def put(out, text, overwrite=False):
    with output_directory(out, overwrite=overwrite) as staging:
        (staging / "config.json").write_text(json.dumps({"model_type": text}))


@pytest.fixture(params=["exchange", "rename"])
def system(request, monkeypatch):
    """With renameat2, and as on a system without it."""
    if request.param == "rename":
        monkeypatch.setattr(atomic, "_rename_with", lambda *args: False)
    return request.param


def test_new_and_replaced(tmp_path, system):
    out = tmp_path / "deep/er/out"
    put(out, "one")
    assert said(out) == "one"
    with pytest.raises(UserError, match="exists; choose another name, or replace it with --overwrite"):
        put(out, "two")
    assert said(out) == "one"
    put(out, "two", overwrite=True)
    assert said(out) == "two"
    assert not hidden(out.parent)


def test_failure_leaves_nothing_or_the_old(tmp_path, system):
    out = tmp_path / "new/parent/out"
    with pytest.raises(ZeroDivisionError), output_directory(out):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    put(out, "old")
    with pytest.raises(ZeroDivisionError), output_directory(out, overwrite=True) as staging:
        (staging / "config.json").write_text("half")
        raise ZeroDivisionError
    assert said(out) == "old"
    assert not hidden(out.parent)


def test_overwrite_spares_what_is_no_checkpoint(tmp_path):
    precious = tmp_path / "photos"
    precious.mkdir()
    (precious / "1.jpg").write_text("x")
    with pytest.raises(UserError, match="not a checkpoint"):
        put(precious, "x", overwrite=True)
    (precious / "config.json").write_text('{"port": 80}')  # everybody's favourite name for a file
    with pytest.raises(UserError, match="not a checkpoint"):
        put(precious, "x", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        put(tmp_path / "file", "x", overwrite=True)
    (tmp_path / "empty").mkdir()
    put(tmp_path / "empty", "x", overwrite=True)


def test_overwrite_through_a_link_keeps_the_link(tmp_path):
    put(tmp_path / "real", "one")
    (tmp_path / "link").symlink_to("real")
    put(tmp_path / "link", "two", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert said(tmp_path / "real") == "two"


@pytest.mark.parametrize("old", [None, "old"])
def test_killed_while_writing(tmp_path, old):
    out = tmp_path / "out"
    if old:
        assert writer(out, old).wait() == 0
    process = writer(out, "new", pause=60)
    process.stdout.readline()
    process.kill()
    process.wait()
    assert content(out) == old
    assert hidden(tmp_path) == [".out.kvfold-new"]
    assert writer(out, "next").wait() == 0  # cleans what the dead one left
    assert content(out) == "next"
    assert not hidden(tmp_path)


def test_killed_at_many_moments(tmp_path):
    out = tmp_path / "out"
    writer(out, "0").wait()
    started = time.monotonic()
    writer(out, "0").wait()
    whole = time.monotonic() - started
    seen = set()
    for i in range(1, 13):
        process = writer(out, str(i))
        time.sleep(whole * (0.4 + 0.06 * i))
        process.kill()
        process.wait()
        before = content(out)
        assert before is not None
        seen.add(before)
    writer(out, "last").wait()
    assert content(out) == "last"
    assert not hidden(tmp_path)


def test_backup_of_a_killed_swap_is_restored(tmp_path):
    """Without an atomic exchange there is a moment with no OUT; the next run brings the old one back."""
    put(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.kvfold-old")
    with pytest.raises(UserError, match="exists"):
        put(tmp_path / "out", "new")
    assert said(tmp_path / "out") == "old"
    assert not hidden(tmp_path)


def test_backup_beside_a_finished_swap_is_removed(tmp_path):
    put(tmp_path / "out", "new")
    put(tmp_path / ".out.kvfold-old", "old")
    put(tmp_path / "other", "x")
    with pytest.raises(UserError, match="exists"):
        put(tmp_path / "out", "newer")
    assert said(tmp_path / "out") == "new"
    assert not hidden(tmp_path)


def test_failed_swap_without_exchange_restores_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_rename_with", lambda *args: False)
    put(tmp_path / "out", "old")
    original = type(tmp_path).rename

    def rename(self, target):
        if self.name == ".out.kvfold-new":
            raise OSError("disk")
        return original(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    with pytest.raises(OSError, match="disk"):
        put(tmp_path / "out", "new", overwrite=True)
    assert said(tmp_path / "out") == "old"


def test_second_writer_is_refused(tmp_path):
    out = tmp_path / "out"
    process = writer(out, "one", pause=60)
    process.stdout.readline()
    try:
        with pytest.raises(UserError, match="another kvfold is writing"):
            put(out, "two", overwrite=True)
        assert hidden(tmp_path) == [".out.kvfold-new"]  # the first one's work is untouched
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def test_many_writers_at_once_leave_one_whole_result(tmp_path):
    out = tmp_path / "out"
    processes = [writer(out, str(i)) for i in range(4)]
    codes = [process.wait() for process in processes]
    assert 0 in codes
    assert content(out) in {str(i) for i, code in enumerate(codes) if code == 0}
    assert not hidden(tmp_path)


def test_writers_that_replace_one_another_never_fail_for_another_reason(tmp_path):
    """While the old directory is being removed under the staging name, it is locked as well."""
    out = tmp_path / "out"
    assert writer(out, "first").wait() == 0
    for round_ in range(6):
        processes = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(out), f"{round_}{i}", "0"], stderr=subprocess.PIPE)
            for i in range(4)
        ]
        for process in processes:
            _, errors = process.communicate()
            assert process.returncode == 0 or b"another kvfold is writing" in errors, errors.decode()
        assert content(out)[0] == str(round_)
        assert not hidden(tmp_path)


def test_link_in_the_place_of_the_staging_directory(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    (tmp_path / ".out.kvfold-new").symlink_to(victim)
    with pytest.raises(UserError, match=r"stands where the work on .* belongs"):
        put(tmp_path / "out", "x")
    assert (victim / "precious").exists()
    (tmp_path / ".out.kvfold-new").unlink()
    (tmp_path / ".out.kvfold-new").write_text("a file")
    with pytest.raises(UserError, match=r"stands where the work on .* belongs"):
        put(tmp_path / "out", "x")


def test_current_directory_is_not_replaced(tmp_path, monkeypatch):
    put(tmp_path / "here", "x")
    (tmp_path / "here/deep").mkdir()
    for folder in ("here", "here/deep"):
        monkeypatch.chdir(tmp_path / folder)
        with pytest.raises(UserError, match="holds the current directory"):
            put(tmp_path / "here", "y", overwrite=True)


def test_long_names(tmp_path):
    out = tmp_path / "deep" / ("x" * 250)
    put(out, "one")
    put(out, "two", overwrite=True)
    assert said(out) == "two"
    with pytest.raises(OSError, match="File name too long"):
        put(tmp_path / "other" / ("x" * 300), "one")
    assert not (tmp_path / "other").exists()


# Files.

FILE_WRITER = """
import sys, time
from pathlib import Path
from kvfold.common.atomic import output_file
with output_file(Path(sys.argv[1]), overwrite=True) as file:
    for i in range(100):
        file.write(sys.argv[2].encode() * 10_000)
        if i == 50:
            print("writing", flush=True)
            time.sleep(float(sys.argv[3]))
"""


def file_writer(out, letter, pause=0.0):
    command = [sys.executable, "-c", FILE_WRITER, str(out), letter, str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def put_file(out, text, overwrite=False):
    with output_file(out, overwrite=overwrite) as file:
        file.write(text.encode())


def test_file_new_and_replaced(tmp_path, system):
    out = tmp_path / "deep/er/out"
    put_file(out, "one")
    with pytest.raises(UserError, match="exists; choose another name, or replace it with --overwrite"):
        put_file(out, "two")
    assert out.read_text() == "one"
    put_file(out, "2", overwrite=True)
    assert out.read_text() == "2"
    assert not hidden(out.parent)


def test_failure_leaves_no_file_or_the_old(tmp_path, system):
    with pytest.raises(ZeroDivisionError), output_file(tmp_path / "new/parent/out"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    out = tmp_path / "out"
    put_file(out, "old")
    with pytest.raises(ZeroDivisionError), output_file(out, overwrite=True) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert out.read_text() == "old"
    assert not hidden(tmp_path)


def test_file_that_appears_meanwhile_is_kept(tmp_path, system):
    out = tmp_path / "out"
    with pytest.raises((FileExistsError, UserError), match="exists"), output_file(out) as file:
        file.write(b"ours")
        out.write_text("theirs")
    assert out.read_text() == "theirs"
    assert not hidden(tmp_path)


def test_what_is_no_file_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("folder", "directory"), ("pipe", "device")):
        with pytest.raises(UserError, match=f"is a {kind}; name a file"):
            put_file(tmp_path / name, "x", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


def test_file_behind_a_link(tmp_path):
    put_file(tmp_path / "real", "one")
    (tmp_path / "link").symlink_to("real")
    put_file(tmp_path / "link", "two", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "two"


def test_link_in_the_place_of_the_staging_file(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".out.kvfold-new").symlink_to("victim")
    with pytest.raises(OSError, match="symbolic link"):
        put_file(tmp_path / "out", "x")
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("old", [None, "old"])
def test_killed_while_writing_a_file(tmp_path, old):
    out = tmp_path / "out"
    if old:
        put_file(out, old)
    process = file_writer(out, "n", pause=60)
    process.stdout.readline()
    with pytest.raises(UserError, match="another kvfold is writing"):
        put_file(out, "x", overwrite=True)
    process.kill()
    process.wait()
    assert (out.read_text() if out.exists() else None) == old
    assert hidden(tmp_path) == [".out.kvfold-new"]
    put_file(out, "next", overwrite=True)  # shorter than what the dead one left
    assert out.read_text() == "next"
    assert not hidden(tmp_path)


def test_many_writers_of_a_file_leave_one_whole(tmp_path):
    out = tmp_path / "out"
    processes = [file_writer(out, letter) for letter in "abcdef"]
    ends = [(process.communicate()[1], process.returncode) for process in processes]
    assert any(code == 0 for _, code in ends)
    assert all(code == 0 or b"another kvfold is writing" in error for error, code in ends)
    (letter,) = set(out.read_text())
    assert ends["abcdef".index(letter)][1] == 0
    assert out.stat().st_size == 1_000_000
    assert not hidden(tmp_path)


def test_a_working_folder_that_holds_nothing_goes_again(tmp_path):
    folder = tmp_path / "a" / "run"
    for inside in ("", "checkpoints", "tokens/deep"):
        with pytest.raises(UserError, match="why"), working_folder(folder):
            (folder / inside).mkdir(parents=True, exist_ok=True)
            raise UserError("why")
        assert not (tmp_path / "a").exists()


def test_a_working_folder_that_holds_a_file_stays(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="why"), working_folder(folder):
        (folder / "tokens").mkdir()
        (folder / "tokens" / "0.ids").write_text("x")
        raise UserError("why")
    assert (folder / "tokens" / "0.ids").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="why"), working_folder(tmp_path / "mine"):
        raise UserError("why")
    assert (tmp_path / "mine").exists(), "it was there before"
