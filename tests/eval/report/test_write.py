from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvfold.common.errors import UserError
from kvfold.eval.report import write
from kvfold.eval.report.write import check_report, write_report

from .made import make_report, make_result

SMALL = make_report(make_result("a"), speed=False, healed=False)
OTHER = make_report(make_result("b", layer_errors=[]), speed=False, healed=False)


@pytest.fixture(scope="module", autouse=True)
def drawn_once():
    """The files of the two reports, which are drawn once."""
    files = {id(report): write.report_files(report) for report in (SMALL, OTHER)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "report_files", lambda report: files[id(report)])
        yield


@pytest.fixture
def out(tmp_path):
    write_report(SMALL, tmp_path / "r")
    return tmp_path / "r"


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def best(out):
    return json.loads((out / "report.json").read_text())["verdict"]["best"]


def test_the_folder_holds_page_figures_and_pictures(out):
    assert names(out) == ["charts/cache.png", "charts/layers.png", "charts/trade-off.png", "index.html", "report.json"]


def test_an_earlier_report_is_replaced_whole_if_that_is_allowed(out):
    with pytest.raises(UserError, match="exists; choose another name, or replace it with --overwrite"):
        write_report(OTHER, out)
    assert best(out) == "a"
    write_report(OTHER, out, overwrite=True)
    assert best(out) == "b"
    assert "charts/layers.png" not in names(out)
    assert [path.name for path in out.parent.iterdir()] == ["r"]


def test_nothing_but_a_report_is_replaced(out, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "report.json").write_text('{"format": "another"}')
    with pytest.raises(UserError, match="not a report of kvfold"):
        check_report(other, overwrite=True)
    (out / "charts" / "mine.txt").write_text("notes")
    with pytest.raises(UserError, match=r"mine\.txt is not part of the report"):
        check_report(out, overwrite=True)


def test_an_empty_folder_is_replaced_and_a_file_is_not(tmp_path):
    (tmp_path / "empty").mkdir()
    write_report(SMALL, tmp_path / "empty", overwrite=True)
    assert best(tmp_path / "empty") == "a"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        check_report(tmp_path / "file", overwrite=True)


def test_a_failure_leaves_the_earlier_report(out, monkeypatch):
    files = write.report_files(OTHER) | {"nowhere/at/all": b""}
    monkeypatch.setattr(write, "report_files", lambda report: files)
    with pytest.raises(FileNotFoundError):
        write_report(OTHER, out, overwrite=True)
    assert best(out) == "a"
    with pytest.raises(FileNotFoundError):
        write_report(OTHER, out.with_name("new"))
    assert [path.name for path in out.parent.iterdir()] == ["r"]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("charts/mine.png", lambda path: path.write_bytes(b"")),
        ("charts/uptraining-0.png", lambda path: path.write_bytes(b"")),  # this report had none
        ("link", lambda path: path.symlink_to("nowhere")),
        ("charts/speed.png", lambda path: path.symlink_to("nowhere")),
        ("pipe", os.mkfifo),
        ("charts/empty", Path.mkdir),
        ("empty", Path.mkdir),
    ],
)
def test_whatever_is_not_the_reports_blocks(out, name, make):
    make(out / name)
    with pytest.raises(UserError, match=rf"{name} is not part of the report"):
        check_report(out, overwrite=True)
    assert os.path.lexists(out / name)


def test_figures_that_would_never_end_are_not_read(tmp_path):
    (tmp_path / "r").mkdir()
    os.mkfifo(tmp_path / "r" / "report.json")
    with pytest.raises(UserError, match="not a report of kvfold"):
        check_report(tmp_path / "r", overwrite=True)
