"""`kvfold inspect`."""

from __future__ import annotations

import click

from . import options
from .output import print_report


@click.command()
@click.argument("src")
@click.option("--context", type=options.count, help="Tokens of the sequence to size.  [the model's context]")
@options.revision
@options.as_json
def inspect(src: str, context: int | None, revision: str | None, as_json: bool) -> None:
    """Say what SRC is, what it caches, and what can be done with it.

    SRC is a checkpoint directory, a GGUF file, or a Hub id. Reads configs and headers only, so it is instant
    for any size.
    """
    from ..convert.inspect import inspect_model

    report = inspect_model(src, context=context, revision=revision)
    print_report(report, as_json=as_json, hide=["conversions"])
    if not as_json:
        for row in report.conversions:
            heads = f"--kv-heads {' or '.join(map(str, row.kv_heads))}" if row.possible else "no"
            print(f"convert to {row.to}: {heads}{f' ({row.reason})' if row.reason else ''}")
