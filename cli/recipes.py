"""`kvfold recipes`: what comes with kvfold to begin with."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ..common.errors import EnvironmentFailure
from ..common.output import print_report, print_table
from . import options

_COLUMNS = {"recipe": "name", "source": "source", "to": "to", "run here": "was_run"}


@click.group()
def recipes() -> None:
    """Recipes of whole pipelines, by model and goal; kvfold run runs them."""


@recipes.command()
@options.as_json
def ls(as_json: bool) -> None:
    """List the recipes that come with kvfold."""
    from ..recipes.pipeline.catalogue import entries

    found = [asdict(entry) for entry in entries()]
    if as_json:
        print_report({"results": found}, as_json=True)
    else:
        print_table(found, _COLUMNS)


@recipes.command()
@click.argument("name")
def show(name: str) -> None:
    """Print a recipe: its launch command and what to expect stand in its head."""
    from ..recipes.pipeline.catalogue import find_recipe

    click.echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)


@recipes.command()
@click.argument("name")
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
def copy(name: str, folder: Path) -> None:
    """Copy a recipe to DIR, or here, to be changed."""
    from ..recipes.pipeline.catalogue import copy_recipe

    click.echo(copy_recipe(name, folder))


@recipes.command()
@click.argument("file")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@options.as_json
def validate(file: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check a recipe, of a pipeline or of an uptraining alone: its keys, its values, and the texts that it names."""
    from ..recipes.pipeline.read import validate as check

    print_report({"recipe": file, "sections": check(file, overrides)}, as_json=as_json)


@recipes.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--config", metavar="DIR", help="A folder with the source's config.json, if the source is elsewhere.")
@click.option("--num-processes", "processes", type=options.count, help="Devices to train on.  [as the recipe says]")
@click.option("--device-memory", type=options.Size(), help="Of a device, such as 80GB.  [80GB; 16GB for a CPU]")
@click.option("--device-flops", type=float, help="Its peak, a second.  [312e12, an A100; 2e11 for a CPU]")
@click.option("--utilization", type=float, default=0.4, show_default=True, help="The share of it that is reached.")
@options.as_json
def plan(
    recipe: str, overrides: tuple[str, ...], config: str | None, as_json: bool, **knobs: float | int | None
) -> None:
    """Say what a RECIPE will take: memory a device, time, cache and disk, from the source's config alone."""
    from ..eval.shape import read_any_config
    from ..recipes.pipeline.plan import plan_recipe, said
    from ..recipes.pipeline.read import read_pipeline

    pipeline = read_pipeline(recipe, overrides)
    try:
        found = read_any_config(config) if config else read_any_config(pipeline.model, pipeline.revision)
    except EnvironmentFailure as error:
        raise EnvironmentFailure(f"{error}, or give a folder with its config.json by --config") from None
    planned = plan_recipe(pipeline.sections, found, **knobs)  # type: ignore[arg-type]
    print_report(planned, as_json=as_json)
    if not as_json:
        print(
            "",
            *said(planned),
            "Of the uptraining; calibration, refinement, eval and report come on top.",
            sep="\n",
        )
