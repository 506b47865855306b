"""Work in processes of its own: done once, gone on with, and done anew when anything about it has changed."""

from __future__ import annotations

import json
import time

import pytest

from kvfold.common.errors import CheckFailed, UserError
from kvfold.recipes.timed import Job, code_digest, remembered, run_jobs

WRITE = (
    "import pathlib, sys; out = pathlib.Path(sys.argv[1]); out.mkdir(exist_ok=True); (out / 'x').open('a').write('x')"
)
FAIL = "import sys; print('no such thing', file=sys.stderr); sys.exit(2)"
# Ends well once the other one has begun.
MEET = """
import pathlib, sys, time
mine, other = map(pathlib.Path, sys.argv[1:])
mine.mkdir()
for _ in range(2000):
    if other.exists(): sys.exit(0)
    time.sleep(0.01)
sys.exit(1)
"""


def job(out, code=WRITE, *more, asked=1, **fields):
    return Job(out, ("-c", code, str(out), *more), {"asked": asked}, **fields)


def times_written(out):
    return len((out / "x").read_text())


def test_what_was_made_is_used_again(tmp_path):
    out = tmp_path / "a" / "out"
    (first,) = run_jobs([job(out)])
    (again,) = run_jobs([job(out)])
    assert first == again and first.folder == out
    assert first.seconds > 0 and first.peak_bytes > 1e6
    assert times_written(out) == 1


@pytest.mark.parametrize("change", ["asked", "gone", "cut short"])
def test_what_has_changed_is_made_anew(tmp_path, change):
    out, asked = tmp_path / "out", 1
    run_jobs([job(out)])
    if change == "asked":
        asked = 2
    if change == "gone":
        (out / "x").unlink()
        out.rmdir()
    if change == "cut short":
        job(out).note.write_text('{"asked": {"as')
    run_jobs([job(out, asked=asked)])
    assert times_written(out) == (1 if change == "gone" else 2)


@pytest.mark.parametrize(("asked", "kept"), [(1, True), (2, False)])
def test_work_is_gone_on_with_only_if_the_same_is_asked_for(tmp_path, asked, kept):
    out, work = tmp_path / "out", tmp_path / "work"
    work.mkdir()
    with pytest.raises(CheckFailed):
        run_jobs([job(out, FAIL)])  # began, and did not end
    run_jobs([job(out, asked=asked, work=work)])
    assert work.exists() is kept


def test_a_failure_says_what_the_log_says_last_and_is_tried_again(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(CheckFailed, match="status 2: no such thing"):
        run_jobs([job(out, FAIL, log=tmp_path / "log")])
    run_jobs([job(out)])
    assert times_written(out) == 1


def test_as_many_run_at_a_time_as_may_and_results_keep_their_order(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    made = run_jobs([job(a, MEET, str(b)), job(b, MEET, str(a))], at_once=2)
    assert [one.folder for one in made] == [a, b]


def test_a_failure_ends_what_runs_beside_it(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    start = time.monotonic()
    with pytest.raises(CheckFailed, match="status 2"):
        run_jobs([job(a, MEET, str(tmp_path / "never")), job(b, FAIL)], at_once=2)
    assert time.monotonic() - start < 15, "it would wait for longer"
    assert "seconds" not in json.loads(job(a).note.read_text())


def test_cores_are_shared_only_where_there_is_something_to_share(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    tell = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.setattr("kvfold.recipes.timed._cores", lambda: 6)
    for at_once, threads in ((1, "77"), (2, "3"), (9, "1")):
        out = tmp_path / str(at_once)
        run_jobs([job(out, tell)], at_once)
        assert out.read_text() == threads


def test_none_at_once_is_refused(tmp_path):
    with pytest.raises(UserError, match="at least 1"):
        run_jobs([job(tmp_path / "out")], 0)


def test_a_finding_is_remembered_until_something_else_is_asked(tmp_path):
    path, found = tmp_path / "found.json", iter(range(9))
    asked = [remembered(path, {"of": of}, lambda: {"figure": next(found)}) for of in (1, 1, 2, 2, 1)]
    assert [one["figure"] for one in asked] == [0, 0, 1, 1, 2]


def test_the_digest_is_of_the_folders_named():
    assert len({code_digest(folders) for folders in (("common",), ("common", "eval"), ("eval",))}) == 3
