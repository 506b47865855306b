"""`kvfold verify`."""

from __future__ import annotations

from typing import Any

import click

from ..common.errors import CheckFailed
from ..common.output import print_layers, print_report
from . import options


@click.command(cls=options.Command)
@click.argument("src", type=options.model)
@click.argument("out", type=options.result)
@options.text
@click.option("--window", type=options.count, help="Tokens a window.  [512, or the models' context if smaller]")
@options.max_windows
@options.batch_size
@click.option("--threshold", type=float, default=0.5, show_default=True, help="Relative error of a bad layer.")
@click.option("--max-ratio", type=float, help="Fail if OUT's perplexity is more than so many times SRC's.")
@options.run_dtype(auto="float32 on a CPU and SRC's own elsewhere")
@options.device
@options.source_revision
@options.as_json
def verify(src: str, out: str, as_json: bool, **knobs: Any) -> None:
    """Measure how far OUT is from the SRC that it was converted from, and where it begins to be.

    Status 1 if OUT's loss is above ln(vocabulary), where guessing would be, or its perplexity above
    --max-ratio. Layers and --threshold only say where to look.
    """
    from ..common.progress import show_progress
    from ..convert.verify import verify as measure

    with show_progress("comparing") as progress:
        report = measure(src, out, progress=progress, **knobs)
    print_report(report, as_json=as_json, hide=["layer_errors", "reason"])
    if not as_json:
        print_layers("relative error of the hidden states after each layer", report.layer_errors)
    if not report.passed:
        raise CheckFailed(report.reason)
