"""`kvfold convert`: one sub-command for each kind of attention to convert to."""

from __future__ import annotations

from typing import Any

import click

from ..common.output import print_layers, print_report, print_table, print_warnings
from ..common.parallel import is_main_process
from . import options

_ERRORS = ("layer_errors_before", "layer_errors_after")


@click.group()
def convert() -> None:
    """Convert a checkpoint to a cheaper kind of attention."""


@convert.command(cls=options.Command)
@click.argument("src", type=options.model)
@click.argument("out")
@click.option("--kv-heads", type=options.count, required=True, help="KV heads of the result; 1 is MQA.")
@click.option("--method", default="svd", show_default=True, help="How heads merge: svd, aligned, mean, first, random.")
@click.option("--grouping", default="contiguous", show_default=True, help="Which heads merge: contiguous, similar.")
@options.learning
@click.option("--seed", type=options.count, default=0, show_default=True, help="For --method random.")
@options.writing
def gqa(src: str, out: str, as_json: bool, **knobs: Any) -> None:
    """Merge the KV heads of SRC into fewer, and write the result to OUT.

    SRC is a checkpoint directory, a GGUF file, or a Hub id. OUT appears whole or not at all; stock
    transformers loads it.
    """
    from ..common.progress import show_progress
    from ..convert.gqa import convert_gqa

    _say(convert_gqa(src, out, progress=show_progress, **knobs), as_json)


@convert.command(cls=options.Command)
@click.argument("src", type=options.model)
@click.argument("out")
@click.option("--kv-elements", type=options.count, help="Numbers to cache a token and layer: rank and rotary key.")
@click.option("--kv-ratio", type=float, help="The same as a share of what SRC caches, such as 0.25.")
@click.option("--kv-rank", type=options.count, help="Size of the latent.  [what the budget leaves]")
@click.option("--rope-dim", type=options.count, help="Size of the rotary key.  [what loses least under the budget]")
@click.option(
    "--rope-select",
    default="auto",
    show_default=True,
    help="Which frequencies keep turning: high, stride, fold, or auto, which measures.",
)
@click.option(
    "--search-windows",
    type=options.count,
    default=16,
    show_default=True,
    help="Windows to choose sizes and frequencies on, joined to 2048 tokens where the model takes so many.",
)
@click.option("--q-rank", type=options.count, help="Compress the queries to this rank, which loses some.  [off]")
@click.option(
    "--form",
    default="deepseek_v3",
    show_default=True,
    help="deepseek_v3, which stock engines read, or plain, kvfold's own for training.",
)
@click.option(
    "--for",
    "readers",
    type=options.Names(),
    default="transformers",
    show_default=True,
    help="Who must read OUT right: transformers, vllm, vllm-transformers, sglang, llama.cpp; several with commas.",
)
@click.option("--pad-to-engine", is_flag=True, help="Pad with zeros to a shape that serving kernels take.")
@click.option(
    "--large-eps/--small-eps",
    default=None,
    help="A form for float16 and Q8_0, which transformers cannot read.  [large for llama.cpp alone, else small]",
)
@options.learning
@options.writing
def mla(src: str, out: str, as_json: bool, **knobs: Any) -> None:
    """Factor the keys and values of SRC into one latent and one rotary key a token, and write the result to OUT.

    Give a budget (--kv-elements or --kv-ratio), or both sizes (--kv-rank and --rope-dim). SRC is a checkpoint
    directory, a GGUF file, or a Hub id; one in plain form is exported as it is. OUT appears whole or not at all; stock
    transformers loads it as DeepSeek-V3, unless --for or --form says otherwise.
    """
    from ..common.progress import show_progress
    from ..convert.mla.convert import convert_mla

    report = convert_mla(src, out, progress=show_progress, **knobs)
    _say(report, as_json)
    if report.search and not as_json and is_main_process():
        print(f"\nloss on {report.search_windows} windows not calibrated on; the first is what was chosen")
        print_table(report.search, {name: name for name in ("rope_select", "rope_dim", "kv_rank", "loss")})


@convert.command(cls=options.Command)
@click.argument("src", type=options.model)
@click.argument("out")
@options.writing
def plain(src: str, out: str, as_json: bool, **knobs: Any) -> None:
    """Turn an export of convert mla back into the plain form, which can be trained, and write it to OUT.

    SRC is a checkpoint directory or a Hub id. Exact but for rounding.
    """
    from ..common.progress import show_progress
    from ..convert.plain import convert_plain

    _say(convert_plain(src, out, progress=show_progress, **knobs), as_json)


def _say(report: Any, as_json: bool) -> None:
    """Print warnings, on standard error, and the report; for people also each layer's error, where it was refined."""
    if not is_main_process():
        return
    print_warnings(getattr(report, "warnings", ()))
    print_report(report, as_json=as_json, hide=["warnings", "search", *_ERRORS])
    if not as_json:
        for name in _ERRORS:
            if figures := getattr(report, name, ()):
                when = name.rpartition("_")[2]
                print_layers(f"relative error of each layer's state, {when} refinement", figures)
