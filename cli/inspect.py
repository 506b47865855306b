"""`kvfold inspect`."""

from __future__ import annotations

from typing import Any

import click

from ..common.output import print_lines, print_report, print_warnings
from . import options

_LATENT = (
    *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "form", "readers"),
    *("unpadded_kv_elements_per_token_per_layer", "source_kv_elements_per_token_per_layer"),
)


@click.command(cls=options.Command)
@click.argument("src", type=options.model)
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
    print_warnings(report.warnings)
    # Of a model without MLA there is nothing to say of a latent.
    latent = [name for name in _LATENT if report.kv_lora_rank is None]
    print_report(report, as_json=as_json, hide=["conversions", "warnings", *latent])
    if not as_json:
        for row in report.conversions:
            print_lines(f"convert to {row.to}: {_how(row)}{f' ({row.reason})' if row.reason else ''}")


def _how(row: Any) -> str:
    """How a conversion is asked for, or that it is not possible."""
    if not row.possible:
        return "no"
    if row.kv_heads:
        return f"--kv-heads {' or '.join(map(str, row.kv_heads))}"
    return f"--form {' or '.join(row.forms)}" if row.to == "mla" else "yes"
