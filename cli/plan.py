"""`kvfold plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..common.errors import EnvironmentFailure, UserError
from ..common.output import print_lines, print_report, print_table
from . import options

_COLUMNS = {
    "stage": "stage",
    "processes": "processes",
    "GB a device": "device",
    "GB a host": "host",
    "GB of disk": "disk",
    "time": "time",
    "fits": "fits",
    "with": "how",
}


class _Source(options.Model):
    """A model, of which the config is enough, or a recipe."""

    def check(self, value: str, params: Mapping[str, Any], *, first: bool) -> None:
        from ..recipes.pipeline.catalogue import is_recipe

        if not params["config"] and not is_recipe(value):
            super().check(value, params, first=first)


class _Folder(click.Path):
    """A directory with a config.json."""

    def check(self, value: str, params: Mapping[str, Any], *, first: bool) -> None:
        from ..convert.source import check_source

        if not Path(value).is_dir():
            raise UserError(f"--config {value} is no directory; give the one that config.json is in")
        check_source(value, weights=False)


@click.command(cls=options.Command)
@click.argument("src", type=_Source(weights=False))
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--devices", type=options.count, help="Over all machines.  [as a recipe says, else 1]")
@click.option("--memory", type=options.Size(), help="Of a device, such as 80GB.  [80GB; 16GB for a CPU]")
@click.option("--host-memory", type=options.Size(), help="Of one machine's own memory.  [unlimited]")
@click.option("--device-flops", type=float, help="Its peak, a second.  [312e12, an A100; 2e11 for a CPU]")
@click.option("--utilization", type=float, default=0.4, show_default=True, help="The share of it that is reached.")
@click.option("--config", type=_Folder(), metavar="DIR", help="A folder with SRC's config.json, if SRC is elsewhere.")
@options.source_revision
@options.as_json
def plan(
    src: str,
    overrides: tuple[str, ...],
    config: str | None,
    revision: str | None,
    as_json: bool,
    devices: int | None,
    **knobs: float | int | None,
) -> None:
    """Say what calibration, conversion, refinement and uptraining of SRC will take: memory, disk, time.

    SRC is a model, of which only the config is read, or a recipe. Of a model a quarter of the cache is kept unless
    SECTION.KEY=VALUE says otherwise, as in a recipe: convert.to=mla convert.kv_elements=576 uptrain.tokens=3e9.
    How to spread the uptraining is chosen so that it fits, unless uptrain.accelerate says it.
    """
    from ..eval.shape import read_any_config
    from ..recipes.pipeline.catalogue import is_recipe
    from ..recipes.pipeline.read import read_pipeline
    from ..recipes.plan.plan import plan as make
    from ..recipes.plan.plan import said, say_time
    from ..recipes.plan.usual import usual_pipeline

    pipeline = read_pipeline(src, overrides) if is_recipe(src) else None
    model, at = (pipeline.model, pipeline.revision) if pipeline else (src, revision)
    try:
        found = read_any_config(config) if config else read_any_config(model, at)
    except EnvironmentFailure as error:
        raise EnvironmentFailure(f"{error}, or give a folder with its config.json by --config") from None
    pipeline = pipeline or usual_pipeline(src, found, overrides, revision=revision, devices=devices)
    planned = make(pipeline.sections, found, devices=devices, **knobs)
    if as_json:
        print_report(planned, as_json=True)
        return
    print_report(planned, as_json=False, hide=("results", "training", "notes"))
    rows = [
        asdict(stage)
        | {
            "device": f"{stage.device_bytes / 1e9:.1f}",
            "host": f"{stage.host_bytes / 1e9:.1f}",
            "disk": f"{stage.disk_bytes / 1e9:.1f}",
            "time": say_time(stage.seconds),
        }
        for stage in planned.results
    ]
    print_table(rows, _COLUMNS, title="stages")
    alone = ["The uptraining alone, without what its processes take before it:"] if planned.training else []
    print_lines("", *alone, *said(planned), *planned.notes)
