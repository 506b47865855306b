"""`kvfold eval compare`."""

from __future__ import annotations

from typing import Any

import click

from ...common.output import print_report, print_table
from .. import options

COLUMNS = {
    "model": "model",
    "perplexity": "perplexity",
    "x source": "perplexity_ratio",
    "KL": "kl",
    "top-1 agreement": "top1_agreement",
    "first bad layer": "first_bad_layer",
    "passed": "passed",
}


@click.command(cls=options.Command)
@click.argument("src", type=options.model)
@click.argument("outs", type=options.result, nargs=-1, required=True, metavar="OUT...")
@options.text
@click.option("--window", type=options.count, help="Tokens a window.  [512, or SRC's context if smaller]")
@options.max_windows
@options.batch_size
@options.run_dtype(auto="float32 on a CPU and SRC's own elsewhere")
@options.device
@options.source_revision
@options.as_json
def compare(src: str, outs: tuple[str, ...], as_json: bool, **knobs: Any) -> None:
    """Measure how far each OUT is from the SRC that all were converted from.

    Divergence KL(SRC || OUT) in nats, how often both find the same token likeliest, perplexities and their ratio,
    on the same windows of the same text.
    """
    from ...common.progress import show_progress
    from ...eval.compare import compare as measure

    with show_progress("comparing") as progress:
        report = measure(src, outs, progress=progress, **knobs)
    print_report(report, as_json=as_json, hide=["results"])
    if not as_json:
        print_table([vars(row) for row in report.results], COLUMNS)
