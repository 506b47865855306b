"""`kvfold run`."""

from __future__ import annotations

from dataclasses import asdict

import click

from ..common.output import print_lines, print_report, print_table
from ..common.shown import say
from . import options

_COLUMNS = {"step": "step", "stage": "stage", "state": "state", "seconds": "seconds"}


@click.command(cls=options.Command)
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("-o", "--out", metavar="DIR", help="The folder of the run.  [the recipe's name, here]")
@click.option("--until", metavar="STAGE", help="The last stage to run.")
@click.option("--from", "from_", metavar="STAGE", help="Take what the stages before this one made as it is.")
@click.option("--overwrite", is_flag=True, help="Make anew what was made with other settings, or changed since.")
@click.option("--dry-run", is_flag=True, help="Say which commands would be run, and run none.")
@options.as_json
def run(recipe: str, overrides: tuple[str, ...], dry_run: bool, as_json: bool, **knobs: bool | str | None) -> None:
    """Run a whole RECIPE: convert, uptrain, eval, report, publish.

    RECIPE is the name of one that comes with kvfold (kvfold recipes ls) or a YAML file; SECTION.KEY=VALUE sets one of
    its keys. The stages are calibrate, convert, uptrain, eval, tasks, report and publish; those that a recipe has no
    section for are left out. Killed at any point, the same command goes on, and what is done is not done again. The
    folder holds converted, healed, report, and run.json with timings.
    """
    from ..recipes.pipeline.run import run_recipe

    report = run_recipe(recipe, overrides, dry_run=dry_run, say=say, **knobs)  # type: ignore[arg-type]
    print_report(report, as_json=as_json, hide=["results", "notes"])
    if as_json:
        return
    print()
    print_table([asdict(step) for step in report.results], _COLUMNS)
    if dry_run:
        print_lines("", *(step.command for step in report.results if step.state == "to do"))
    for note in report.notes:
        print_lines("", note)
