"""`kvfold demo`: the story on the embedded model."""

from __future__ import annotations

from pathlib import Path

import click

from ..common.output import print_report, print_table
from . import options


@click.command(cls=options.Command)
@click.option(
    "--out",
    type=options.NewFolder(path_type=Path),
    help="Keep all in this new directory.  [kvfold's cache]",
)
@options.as_json
def demo(out: Path | None, as_json: bool) -> None:
    """Take the embedded model through inspect, convert, eval and report, without a network."""
    from ..common.progress import show_progress
    from ..recipes.demo import COLUMNS, NEXT_STEPS, REFINE_WINDOWS, run_demo

    report = run_demo(out=out, progress=show_progress)
    print_report(report, as_json=as_json, hide=["results"])
    if not as_json:
        print()
        print_table(report.rows(), COLUMNS)
        print(NEXT_STEPS.format(model=report.model, report=report.report, windows=REFINE_WINDOWS))
