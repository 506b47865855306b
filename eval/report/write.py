"""The files of a report: a page, its figures as JSON, its charts as pictures; whole or not at all."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from ...common.atomic import Kind, check_output, output_directory, real_path
from ...common.errors import UserError
from .record import FORMAT, Report, chart_keys, to_json

PAGE = "index.html"
FIGURES = "report.json"
CHARTS = "charts"


def report_files(report: Report) -> dict[str, bytes]:
    """What a report's folder holds, by names in it. The same report gives the same bytes."""
    from .charts.draw import draw_charts
    from .page import render

    charts = draw_charts(report)
    figures = json.dumps(to_json(report), indent=2, allow_nan=False) + "\n"
    return {
        PAGE: render(report, charts).encode(),
        FIGURES: figures.encode(),
        **{f"{CHARTS}/{chart.key}.png": chart.png for chart in charts},
    }


def check_report(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that may not be written, before any work is done.

    Raises:
        UserError: it exists and may not be replaced, what exists is no report of kvfold's or holds something else, or
            nothing can be created where it will be.
    """
    check_output(out, overwrite=overwrite, kind=REPORT)
    target = real_path(out)
    folder = next(parent for parent in target.parents if parent.exists())
    try:  # rights do not tell all: nobody creates a folder in /proc
        with tempfile.TemporaryDirectory(prefix=".kvfold-", dir=folder):
            pass
    except OSError as error:
        raise UserError(f"cannot create {out} in {folder} ({error.strerror}); choose another folder") from None


def write_report(report: Report, out: Path, *, overwrite: bool = False) -> None:
    """Write a report's folder.

    Raises:
        UserError: see `check_report`.
        OSError: the disk failed. Nothing half-written is left, and an earlier report is as it was.
    """
    files = report_files(report)
    with output_directory(out, overwrite=overwrite, kind=REPORT) as staging:
        (staging / CHARTS).mkdir()
        for name, content in files.items():
            (staging / name).write_bytes(content)


def _is_report(folder: Path) -> bool:
    """Whether a directory is a report, and nothing else.

    Raises:
        UserError: somebody put something into it.
    """
    figures = folder / FIGURES
    if not _is_file(figures):  # a pipe would never be read to its end
        return False
    try:
        found = json.loads(figures.read_bytes())
        if found["format"] != FORMAT:
            return False
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False
    ours = _files_of(found)
    for path in [*sorted(folder.iterdir()), *_inside(folder / CHARTS)]:
        name = str(path.relative_to(folder))
        if not (_is_folder(path) if name == CHARTS else name in ours and _is_file(path)):
            raise UserError(f"{path} is not part of the report there, which --overwrite would replace; move it away")
    return True


def _files_of(figures: dict[str, Any]) -> set[str]:
    """The files that a report with such figures may have written."""
    runs = figures.get("uptraining")
    keys = chart_keys(len(runs) if isinstance(runs, list) else 0)
    return {PAGE, FIGURES, *(f"{CHARTS}/{key}.png" for key in keys)}


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if _is_folder(folder) else []


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


REPORT = Kind("a report of kvfold", _is_report)
