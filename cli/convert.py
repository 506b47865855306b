"""`kvfold convert`: one sub-command for each kind of attention to convert to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ..common.loading import DTYPES, FLOATS
from ..common.parallel import is_main_process
from . import options
from .output import print_layers, print_report


@click.group()
def convert() -> None:
    """Convert a checkpoint to a cheaper kind of attention."""


@convert.command()
@click.argument("src")
@click.argument("out")
@click.option("--kv-heads", type=options.count, required=True, help="KV heads of the result; 1 is MQA.")
@click.option("--method", default="svd", show_default=True, help="How heads merge: svd, aligned, mean, first, random.")
@click.option("--grouping", default="contiguous", show_default=True, help="Which heads merge: contiguous, similar.")
@options.calibration
@click.option("--calib-batch-size", type=options.count, default=1, show_default=True, help="Windows at a time.")
@click.option("--calib-dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Calibrate in it.")
@click.option("--stats", type=click.Path(path_type=Path), help="Statistics of kvfold calibrate.  [made, and cached]")
@click.option(
    "--refine",
    type=options.count,
    default=0,
    metavar="WINDOWS",
    help="Repair layers on so many windows; try 64.  [off]",
)
@click.option("--refine-passes", type=options.count, default=3, show_default=True, help="Passes over those windows.")
@options.device
@click.option("--seed", type=options.count, default=0, show_default=True, help="For --method random.")
@click.option("--dtype", type=click.Choice(FLOATS), help="Of the result's weights.  [the source's own]")
@click.option("--max-shard-size", type=options.Size(), help="Such as 5GB.  [sharded as the source]")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at OUT, once the new one is whole.")
@click.option("--dry-run", is_flag=True, help="Check and plan everything, write nothing.")
@click.option("--no-hash", "hash", flag_value=False, default=True, help="Record no hashes in kvfold.json.")
@options.revision
@options.as_json
def gqa(src: str, out: str, as_json: bool, **knobs: Any) -> None:
    """Merge the KV heads of SRC into fewer, and write the result to OUT.

    SRC is a checkpoint directory, a GGUF file, or a Hub id. OUT appears whole or not at all; stock
    transformers loads it.
    """
    from ..common.progress import show_progress
    from ..convert.gqa import convert_gqa

    report = convert_gqa(src, out, progress=show_progress, **knobs)
    for warning in report.warnings if is_main_process() else ():
        print(f"kvfold: warning: {warning}", file=sys.stderr)
    errors = {name: getattr(report, f"layer_errors_{name}") for name in ("before", "after")}
    print_report(report, as_json=as_json, hide=["warnings", *(f"layer_errors_{name}" for name in errors)])
    if report.refine_windows and not as_json and not report.dry_run and is_main_process():
        for name, figures in errors.items():
            print_layers(f"relative error after each layer's attention, {name} refinement", figures)
