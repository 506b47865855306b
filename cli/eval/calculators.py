"""`kvfold eval flops` and `kvfold eval memory`: closed forms, from a config or from sizes given by hand."""

from __future__ import annotations

from typing import Any

import click

from ...common.loading import FLOATS
from ...common.output import print_report
from .. import options

_SIZES = {
    "hidden-size": "Hidden size (D).",
    "num-hidden-layers": "Layers (L).",
    "num-attention-heads": "Query heads (H).",
    "num-key-value-heads": "Key/value heads (G).  [MODEL's, else as many as query heads]",
    "head-dim": "Coordinates of a head (d).  [MODEL's, else hidden size over query heads]",
    "intermediate-size": "Width of the MLP (I).",
    "vocab-size": "Rows of the embedding.",
    "kv-lora-rank": "MLA: numbers of a latent (r).",
    "qk-rope-head-dim": "MLA: numbers of the rotary key.",
    "qk-nope-head-dim": "MLA: coordinates of a key head without position.",
    "v-head-dim": "MLA: coordinates of a value head.",
    "q-lora-rank": "MLA: numbers of the query's latent.  [none]",
    "num-experts-per-tok": "Experts that a token visits, of a config that does not say.",
}
_COMMON = (
    click.argument("model", type=options.described, required=False),
    click.option(
        "--context",
        type=options.count,
        required=True,
        help="Tokens of a sequence; may be more than MODEL was made for.",
    ),
    click.option("--batch-size", type=options.count, default=1, show_default=True, help="Sequences."),
    *(click.option(f"--{name}", type=options.count, help=text) for name, text in _SIZES.items()),
    click.option("--tie-word-embeddings/--no-tie-word-embeddings", default=None, help="Whether head is embedding."),
    click.option(
        "--gated-mlp/--no-gated-mlp", default=None, help="Three matrices an MLP, or two.  [MODEL's, else three]"
    ),
    options.revision,
    options.as_json,
)


def _calculator(command: Any) -> Any:
    for option in reversed(_COMMON):
        command = option(command)
    return command


@click.command(cls=options.Command)
@_calculator
def flops(model: str | None, as_json: bool, **knobs: Any) -> None:
    """Count the floating-point operations of MODEL, or of the sizes given. No weights are read.

    A size given counts in place of the model's own, as if config.json said so: it changes no other one written there. A
    multiply-add counts 2. Of models that cache latents (MLA), decode_flops is of a step that attends to the latents
    themselves (absorbed), expanded_decode_flops of one that first expands them all to keys and values; of others,
    decode_flops is of the one way there is. Either is one token a sequence, with the whole context in the cache.
    """
    from ...eval.flops import flops as count

    print_report(count(model, **knobs), as_json=as_json)


@click.command(cls=options.Command)
@_calculator
@click.option(
    "--dtype",
    type=click.Choice(("auto", *FLOATS)),
    default="auto",
    show_default=True,
    help="Of all that is counted; auto is MODEL's own, else float16.",
)
def memory(model: str | None, as_json: bool, **knobs: Any) -> None:
    """Size the weights and the cache of MODEL, or of the sizes given. No weights are read.

    A size given counts in place of the model's own, as if config.json said so: it changes no other one written there.
    """
    from ...eval.memory import memory as size

    print_report(size(model, **knobs), as_json=as_json)
