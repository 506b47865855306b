"""The files of a report: a page, its figures as JSON, its charts as pictures; whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

from ...common.atomic import Kind, check_output, output_directory
from ...common.errors import UserError
from .record import FORMAT, Report, to_json

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
        UserError: it exists and may not be replaced, or what exists is no report of kvfold's, or holds something else.
    """
    check_output(out, overwrite=overwrite, kind=REPORT)


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
    try:
        if json.loads((folder / FIGURES).read_bytes())["format"] != FORMAT:
            return False
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not _is_ours(path.relative_to(folder)):
            raise UserError(f"{path} is not part of the report there, which --overwrite would replace; move it away")
    return True


def _is_ours(name: Path) -> bool:
    return str(name) in (PAGE, FIGURES) or (name.parts[:-1] == (CHARTS,) and name.suffix == ".png")


REPORT = Kind("a report of kvfold", _is_report)
