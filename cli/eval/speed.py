"""`kvfold eval speed`."""

from __future__ import annotations

from typing import Any

import click

from ...common.output import print_report, print_table
from .. import options

COLUMNS = {
    "model": "model",
    "decodes from": "decoding",
    "context": "context",
    "batch": "batch_size",
    "decode tok/s": "tokens_per_second",
    "min": "tokens_per_second_min",
    "max": "tokens_per_second_max",
    "x first": "x_first",
    "ms a step": "milliseconds_per_step",
    "memory floor ms": "memory_floor_ms",
    "arithmetic floor ms": "arithmetic_floor_ms",
    "floor / step": "floor_share",
    "prefill tok/s": "prefill_tokens_per_second",
}
FITTING = {"largest batch": "largest_batch_size", "largest context, the model's at most": "largest_context"}


@click.command(cls=options.Command)
@click.argument("models", type=options.model, metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--context",
    type=options.count,
    multiple=True,
    help="Tokens of the prompt, and cached when decoding begins; may be repeated.  [512, 1024, 4096, as models allow]",
)
@click.option(
    "--batch-size",
    type=options.count,
    multiple=True,
    default=(1,),
    show_default=True,
    help="Sequences at a time; may be repeated.",
)
@click.option("--steps", type=options.count, default=8, show_default=True, help="Tokens of each timed block.")
@click.option("--runs", type=options.count, default=5, show_default=True, help="Timed blocks of each model.")
@click.option(
    "--memory",
    type=options.Size(),
    help="Say what batch, and what context up to the model's own, fit into it, such as 16GiB.",
)
@click.option("--no-absorb", "absorb", flag_value=False, default=True, help="Expand latents at every step.")
@options.run_dtype(auto="float32 on a CPU and the checkpoint's own elsewhere")
@options.device
@click.option("--revision", help="Branch, tag or commit of the first MODEL, if it is a Hub id.")
@options.as_json
def speed(models: tuple[str, ...], as_json: bool, **knobs: Any) -> None:
    """Time how fast each MODEL reads a prompt and decodes, by turns, beside what the machine could do.

    Ratios are of the medians, to the first MODEL's. The memory floor of a step is what it reads over the machine's copy
    bandwidth, the arithmetic floor what it computes over the rate of a large matrix product, both measured in the same
    run.
    """
    from dataclasses import asdict

    from ...common.progress import show_progress
    from ...eval.speed.measure import speed as time_models

    with show_progress("timing") as progress:
        report = time_models(models, progress=progress, **knobs)
    print_report(report, as_json=as_json, hide=("results",))
    if not as_json:
        print()
        fitting = FITTING if report.memory_budget_bytes is not None else {}
        print_table([asdict(each) for each in report.results], COLUMNS | fitting)
