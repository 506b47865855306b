"""`kvfold eval long`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...common.output import print_report, print_table
from .. import options

if TYPE_CHECKING:
    from ...eval.long import LongModel


@click.command(cls=options.Command)
@click.argument("src", type=options.model)
@click.argument("outs", type=options.result, nargs=-1, metavar="[OUT]...")
@options.text
@click.option("--window", type=options.count, help="Tokens a window.  [SRC's context, at most 8192]")
@click.option("--max-windows", type=options.count, default=4, show_default=True, help="Score only so many windows.")
@options.batch_size
@click.option(
    "--length",
    type=options.count,
    multiple=True,
    help="Tokens of a passkey prompt; may be repeated.  [the window, its half, quarter and eighth]",
)
@click.option(
    "--depth",
    type=float,
    multiple=True,
    default=(0.1, 0.5, 0.9),
    show_default=True,
    help="Where the number stands, from 0 to 1; may be repeated.",
)
@click.option(
    "--keys", type=options.count, default=2, show_default=True, help="Numbers for each length and depth; 0 for none."
)
@options.run_dtype(auto="float32 on a CPU and SRC's own elsewhere")
@options.device
@options.source_revision
@options.as_json
def long(src: str, outs: tuple[str, ...], as_json: bool, **knobs: Any) -> None:
    """Measure SRC, and each OUT made of it, at long contexts.

    The loss by position, and the passkey test: whether a number is found again that was said somewhere in a text.
    """
    from ...common.progress import show_progress
    from ...eval.long import long as measure

    report = measure(src, outs, progress=show_progress, **knobs)
    print_report(report, as_json=as_json, hide=["results"])
    if not as_json:
        names = {f"{number} {Path(row.model).name}": row for number, row in enumerate(report.results)}
        print_losses(names)
        print_passkeys(names)


def print_losses(models: Mapping[str, LongModel]) -> None:
    """A row a bucket: each model's loss in nats a token, and how much that is above the source's."""
    rows: list[dict[str, Any]] = [
        {"positions": f"{buckets[0].start}-{buckets[0].stop - 1}", "tokens": buckets[0].tokens}
        | {name: f"{b.loss:.3f} ({b.above_source:+.3f})" for name, b in zip(models, buckets, strict=True)}
        for buckets in zip(*(row.buckets for row in models.values()), strict=True)
    ]
    print_table(rows, {key: key for key in rows[0]}, title="loss, nats a token (above the source's)")


def print_passkeys(models: Mapping[str, LongModel]) -> None:
    """A row a length and depth: the part that each model found, and what the answers cost it in nats a token."""
    rows: list[dict[str, Any]] = [
        {"length": cells[0].length, "depth": cells[0].depth}
        | {name: f"{cell.found:.0%} ({cell.loss:.3f})" for name, cell in zip(models, cells, strict=True)}
        for cells in zip(*(row.passkeys for row in models.values()), strict=True)
    ]
    if rows:
        print_table(rows, {key: key for key in rows[0]}, title="passkeys found (loss of the answers)")
