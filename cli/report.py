"""`kvfold report`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..common.output import print_report, print_table, print_warnings
from ..common.parallel import is_main_process
from . import options

_COLUMNS = {
    "result": "name",
    "kind": "attention_kind",
    "bytes/token": "kv_bytes_per_token",
    "x cache": "kv_ratio",
    "perplexity": "perplexity",
    "x source": "perplexity_ratio",
    "KL": "kl",
    "verdict": "verdict",
}


@click.command(cls=options.Command)
@click.argument("src", type=options.model)
@click.argument("outs", type=options.result, metavar="OUT...", nargs=-1, required=True)
@click.option("-o", "--out", "folder", type=click.Path(path_type=Path), required=True, help="The folder to create.")
@click.option(
    "--text",
    type=options.Text(),
    multiple=True,
    default=("builtin",),
    show_default=True,
    help="A file, builtin[:KIND], or hub:NAME.",
)
@click.option("--window", type=options.count, help="Tokens a window.  [512, or the source's context if smaller]")
@options.max_windows
@options.batch_size
@click.option("--max-ratio", type=float, default=1.1, show_default=True, help="Times SRC's perplexity that will do.")
@click.option("--no-speed", "speed", flag_value=False, default=True, help="Do not measure decode speed.")
@click.option("--context", type=options.count, multiple=True, help="Tokens cached when speed is measured.")
@click.option("--run", multiple=True, metavar="DIR", help="Folder of an uptraining that is not at OUT.run.")
@click.option("--title", help="Of the page.  [the name of SRC]")
@options.run_dtype(auto="float32 on a CPU and SRC's own elsewhere")
@options.device
@options.source_revision
@click.option("--overwrite", is_flag=True, help="Replace an earlier report, once the new one is whole.")
@options.as_json
def report(src: str, outs: tuple[str, ...], folder: Path, as_json: bool, **knobs: Any) -> None:
    """Show on one page how the OUTs, conversions of SRC, compare: quality, cache, layers, speed, uptraining.

    The folder gets index.html, which needs no network, report.json with every figure, and charts/*.png. A report is no
    check: the status is 0 whatever it says of the results.
    """
    from ..common.progress import show_progress
    from ..eval.report.measure import report as make
    from ..eval.report.plain import plain

    made = make(src, outs, out=folder, progress=show_progress, **knobs)
    if not is_main_process():
        return
    print_warnings(made.warnings)
    if as_json:
        print_report(made, as_json=True)
        return
    print_table([asdict(row) for row in made.results], _COLUMNS)
    print(f"\n{made.verdict.text}\n{made.verdict.next}")
    if made.verdict.command:
        print(f"  {made.verdict.command}")
    print(f"The report is in {plain(str(folder / 'index.html'))}")
