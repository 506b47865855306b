"""`kvfold eval tasks`."""

from __future__ import annotations

from typing import Any

import click

from ...common.output import print_report, print_table
from .. import options

COLUMNS = {
    "task": "task",
    "metric": "metric",
    "filter": "filter",
    "value": "value",
    "stderr": "stderr",
    "samples": "samples",
    "few-shot": "num_fewshot",
    "version": "version",
}


@click.command(cls=options.Command)
@click.argument("model", type=options.model)
@click.option(
    "--task",
    multiple=True,
    required=True,
    metavar="NAME|FILE",
    help="A task, group or tag of lm-eval, or a YAML file; may be repeated.",
)
@click.option("--include-path", multiple=True, metavar="DIR", help="A folder with more tasks; may be repeated.")
@click.option("--num-fewshot", type=options.count, help="Examples before each document.  [what the task says]")
@click.option("--limit", type=options.count, help="Only the first so many documents of each task.")
@click.option("--batch-size", type=options.count, default=1, show_default=True, help="Sequences at a time.")
@click.option("--apply-chat-template", is_flag=True, help="Put prompts into the tokenizer's chat template.")
@options.run_dtype(auto="float32 on a CPU and the checkpoint's own elsewhere")
@options.device
@options.revision
@options.as_json
def tasks(model: str, as_json: bool, **knobs: Any) -> None:
    """Judge MODEL on tasks of lm-evaluation-harness (pip install 'kvfold[tasks]').

    A task FILE is in lm-eval's format, works without a network when its data is local, and may name Python functions
    beside it, which are run. Paths of data in it count from the working directory.
    """
    from ...common.progress import show_progress
    from ...eval.tasks import tasks as measure

    with show_progress("answering") as progress:
        report = measure(model, progress=progress, **knobs)
    print_report(report, as_json=as_json, hide=["results"])
    if not as_json:
        print_table([vars(row) for row in report.results], COLUMNS)
