"""`kvfold recipes`: what comes with kvfold to begin with."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ..common.output import print_report, print_table
from . import options

_COLUMNS = {"recipe": "name", "source": "source", "to": "to", "run here": "was_run"}


@click.group()
def recipes() -> None:
    """Recipes of whole pipelines, by model and goal; kvfold run runs them."""


@recipes.command(cls=options.Command)
@options.as_json
def ls(as_json: bool) -> None:
    """List the recipes that come with kvfold."""
    from ..recipes.pipeline.catalogue import entries

    found = [asdict(entry) for entry in entries()]
    if as_json:
        print_report({"results": found}, as_json=True)
    else:
        print_table(found, _COLUMNS)


@recipes.command(cls=options.Command)
@click.argument("name")
def show(name: str) -> None:
    """Print a recipe: its launch command and what to expect stand in its head."""
    from ..recipes.pipeline.catalogue import find_recipe

    click.echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)


@recipes.command(cls=options.Command)
@click.argument("name")
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
def copy(name: str, folder: Path) -> None:
    """Copy a recipe to DIR, or here, to be changed."""
    from ..recipes.pipeline.catalogue import copy_recipe

    click.echo(copy_recipe(name, folder))


@recipes.command(cls=options.Command)
@click.argument("file")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@options.as_json
def validate(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check a recipe, of a pipeline or of an uptraining alone: its keys, its values, and the texts that it names."""
    from ..recipes.pipeline.read import validate as check

    print_report({"recipe": file, "sections": check(file, overrides)}, as_json=as_json)
