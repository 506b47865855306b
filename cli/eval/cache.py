"""`kvfold eval cache`."""

from __future__ import annotations

from typing import Any

import click

from ...common.output import print_report
from .. import options


@click.command(cls=options.Command)
@click.argument("model", type=options.model)
@click.option("--context", type=options.count, help="Tokens of the sequence.  [512, or the model's context if smaller]")
@options.run_dtype(auto="the checkpoint's own")
@options.device
@options.revision
@options.as_json
def cache(model: str, as_json: bool, **knobs: Any) -> None:
    """Size the key/value cache of MODEL: by formula, and measured after a forward pass."""
    from ...eval.cache import cache_size

    print_report(cache_size(model, **knobs), as_json=as_json)
