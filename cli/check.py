"""`kvfold check`."""

from __future__ import annotations

import click

from ..common.errors import CheckFailed
from ..common.output import print_lines, print_report
from . import options

# As convert.demands.ENGINES, which the command line does not read to say its help.
ENGINES = ("transformers", "vllm", "vllm-transformers", "sglang", "llama.cpp")


@click.command(cls=options.Command)
@click.argument("out", type=options.model)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    required=True,
    help="Who is to read it; vllm-transformers is vLLM with --model-impl transformers.",
)
@options.revision
@options.as_json
def check(out: str, engine: str, revision: str | None, as_json: bool) -> None:
    """Say whether an engine reads OUT right, and if not, what to change.

    OUT is a checkpoint directory or a Hub id. Reads its config and headers only; the engine need not be here. Status 1
    if a demand refuses OUT; warnings name what some machine or backend would not take.
    """
    from ..convert.check import check as hold

    report = hold(out, engine=engine, revision=revision)
    print_report(report, as_json=as_json, hide=["reason", "violations"])
    if not as_json:
        for violation in report.violations:
            print_lines(f"{violation.severity}  {violation.topic}: {violation.wrong}", f"  mend: {violation.mend}")
    if not report.passed:
        raise CheckFailed(report.reason)
