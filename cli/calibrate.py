"""`kvfold calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..common.output import print_report
from . import options


@click.command(cls=options.Command)
@click.argument("src", type=options.model)
@click.option(
    "--out", "-o", type=options.NewStatistics(path_type=Path), required=True, help="The file of statistics to create."
)
@options.calibration
@click.option("--batch-size", type=options.count, default=1, show_default=True, help="Windows at a time.")
@options.run_dtype(auto="float32 on a CPU and the checkpoint's own elsewhere")
@options.device
@click.option("--overwrite", is_flag=True, help="Replace an existing file of statistics.")
@options.revision
@options.as_json
def calibrate(src: str, out: Path, as_json: bool, **knobs: Any) -> None:
    """Collect the statistics of SRC on text once, to be used by many conversions (convert --stats).

    With several devices: torchrun --nproc_per_node N -m kvfold.cli calibrate ...
    """
    from ..common.progress import show_progress
    from ..convert.calibration.calibrate import calibrate as collect

    print_report(collect(src, out, progress=show_progress, **knobs), as_json=as_json)
