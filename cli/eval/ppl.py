"""`kvfold eval ppl`."""

from __future__ import annotations

from typing import Any

import click

from ...common.output import print_report
from ...common.protocol import KVFOLD, PROTOCOLS
from .. import options


@click.command(cls=options.Command)
@click.argument("model", type=options.model)
@options.text
@click.option(
    "--protocol",
    type=click.Choice(PROTOCOLS),
    default=KVFOLD,
    show_default=True,
    help="lm-eval is lm-evaluation-harness's: windows of the model's context that score every token.",
)
@click.option("--window", type=options.count, help="Tokens a window.  [2048, or the model's context if smaller]")
@click.option("--stride", type=options.count, help="Tokens between the starts of windows.  [no overlap]")
@options.max_windows
@options.batch_size
@click.option("--bos", is_flag=True, help="Put the tokenizer's BOS before every window.")
@options.run_dtype(auto="float32 on a CPU and the checkpoint's own elsewhere")
@options.device
@options.revision
@options.as_json
def ppl(model: str, as_json: bool, **knobs: Any) -> None:
    """Measure the perplexity of MODEL, with the protocol that makes the figure comparable."""
    from ...common.progress import show_progress
    from ...eval.ppl import perplexity

    with show_progress("scoring") as progress:
        report = perplexity(model, progress=progress, **knobs)
    print_report(report, as_json=as_json)
