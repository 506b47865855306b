"""How fast one stack of layers decodes in three forms, and how close each comes to what the machine can do.

    python -m kvfold.recipes.bench.decode [--contexts 1024 4096 16384] [--layers 4] [--threads N] [--stock]
    python -m kvfold.recipes.bench.decode --device cuda --dtype bfloat16 --layers 16 --cuda-graphs

The forms are multi-head attention as the source has it, the same with fewer KV heads, and dense DeepSeek-V3 layers
whose latents `kvfold.attention.absorb` attends to as they are. Hidden size, MLPs and query heads are the same, weights
are random, the vocabulary is small. All decode in one process and by turns, from a static cache that is full to the
context, and attend to heads by torch's scaled_dot_product_attention; see `kvfold.eval.speed`.

Of grouped heads it is asked whether they are no slower than their smaller cache predicts: MHA's step less the time for
the cache that GQA does not read. That time is told in two ways: at the machine's copy bandwidth, as memory alone would
have it; and at MHA's own pace, the slope of its step over its cache from context to context, which also has what MHA
computes for each byte. GQA computes as much as MHA for a fourth of the bytes, so the second asks more of it than memory
alone can give. Weights that GQA does not have are in neither.

With `--stock` the same DeepSeek-V3 model also decodes as transformers has it, which expands every latent at each step.

NOT YET RUN ON A GPU: there, launching a step kernel by kernel takes longer than a small stack runs, which
`--cuda-graphs` is for. Latents are for such a device, which has more operations for each byte than a CPU; there the
aim is 1.5 x MHA or more at 16,384 cached tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ...common.loading import resolve_device
from ...common.progress import show_progress
from ...eval.speed.measure import measure_speed
from ...eval.speed.record import SpeedReport, SpeedRow
from ...eval.speed.runs import Decoder, decoding
from ..tables import row, rule

VOCABULARY = 1024
MHA = "MHA"
STOCK = "MLA stock"


def grouped_name(options: argparse.Namespace) -> str:
    return f"GQA-{options.kv_heads}"


def latent_name(options: argparse.Namespace) -> str:
    return f"MLA {options.rank}+{options.rope}"


def configs(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The config of each form, by its name."""
    width = options.hidden // options.heads
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "max_position_embeddings": max(options.contexts) + options.steps,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    llama = {"model_type": "llama", **shared, "head_dim": width}
    latent = {
        "model_type": "deepseek_v3",
        **shared,
        "q_lora_rank": None,
        "kv_lora_rank": options.rank,
        "qk_rope_head_dim": options.rope,
        "qk_nope_head_dim": width,
        "v_head_dim": width,
        "first_k_dense_replace": options.layers,  # no layer has experts
    }
    return {
        MHA: llama,
        grouped_name(options): {**llama, "num_key_value_heads": options.kv_heads},
        latent_name(options): latent,
    }


def make_model(config: dict[str, Any], options: argparse.Namespace) -> Any:
    """A model of random weights where and in what the options say."""
    torch.manual_seed(0)
    with torch.device(resolve_device(options.device)):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        ).eval()


def logits_apart(model: Any, context: int) -> float:
    """How far the logits of stock and absorbed decoding are apart, as a share of the largest."""
    found = []
    for expand in (True, False):
        with decoding(model, expand=expand):
            found.append(Decoder(model, batch_size=1, context=context, steps=1).logits().double())
    return ((found[1] - found[0]).abs().max() / found[0].abs().max()).item()


def speed_table(report: SpeedReport) -> Iterable[str]:
    """A row for each form at each context."""
    yield row(
        *("cached tokens", "form", "decodes from", "median tokens/s", "min", "max", "x MHA", "ms a step"),
        *("MB of weights read", "MB of cache read", "x MHA's MB", "memory floor ms", "arithmetic floor ms"),
        *("larger floor", "floor / step"),
    )
    yield rule(15)
    for each in report.results:
        base = _of(report, MHA, each.context)
        yield row(
            f"{each.context:,}",
            each.model,
            each.decoding,
            *(f"{x:.2f}" for x in (each.tokens_per_second, each.tokens_per_second_min, each.tokens_per_second_max)),
            f"{each.x_first:.2f}",
            f"{each.milliseconds_per_step:.2f}",
            *(f"{x / 1e6:.1f}" for x in (each.read_weight_bytes, each.read_cache_bytes)),
            f"{_read(each) / _read(base):.2f}",
            f"{each.memory_floor_ms:.2f}",
            f"{each.arithmetic_floor_ms:.2f}",
            each.bound,
            f"{each.floor_share:.2f}",
        )


def prompt_table(report: SpeedReport) -> Iterable[str]:
    yield row("prompt tokens", "form", "median tokens/s", "min", "max")
    yield rule(5)
    for each in report.results:
        figures = (
            each.prefill_tokens_per_second,
            each.prefill_tokens_per_second_min,
            each.prefill_tokens_per_second_max,
        )
        yield row(f"{each.context:,}", each.model, *(f"{x:.1f}" for x in figures if x is not None))


def grouped_table(report: SpeedReport, grouped: str) -> Iterable[str]:
    """Whether grouped heads are as fast as their smaller cache predicts; see the top of this file."""
    whole = [each for each in report.results if each.model == MHA]
    rates = {"at copy bandwidth": 1e3 / report.copy_bytes_per_second}  # milliseconds a byte
    if len(whole) > 1:
        cached, steps = [each.read_cache_bytes for each in whole], [each.milliseconds_per_step for each in whole]
        rates["at MHA's pace"] = statistics.linear_regression(cached, steps).slope
    yield row(
        *("cached tokens", f"{grouped} ms a step", "min", "max", "MB of cache saved"),
        *(title for rate in rates for title in (f"predicted {rate} ms", "it is")),
    )
    yield rule(5 + 2 * len(rates))
    for base in whole:
        each = _of(report, grouped, base.context)
        saved = base.read_cache_bytes - each.read_cache_bytes
        cells = []
        for rate in rates.values():
            cells += [f"{base.milliseconds_per_step - rate * saved:.2f}", verdict(base, each, rate * saved)]
        steps = (each.milliseconds_per_step, each.milliseconds_per_step_min, each.milliseconds_per_step_max)
        yield row(f"{base.context:,}", *(f"{x:.2f}" for x in steps), f"{saved / 1e6:.1f}", *cells)


def verdict(base: SpeedRow, each: SpeedRow, less_ms: float) -> str:
    """Whether a step takes no longer than another less `less_ms`, by medians, or at least as far as they spread."""
    if each.milliseconds_per_step <= base.milliseconds_per_step - less_ms:
        return "no slower"
    if each.milliseconds_per_step_min <= base.milliseconds_per_step_max - less_ms:
        return "within the spread"
    return "slower"


def arithmetic_notes(report: SpeedReport) -> Iterable[str]:
    """A sentence for each row that computing binds, not reading."""
    balance = report.matrix_flops_per_second / report.copy_bytes_per_second
    for each in report.results:
        if each.bound != "arithmetic" or each.model == MHA:
            continue
        base = _of(report, MHA, each.context)
        read, computed = _read(each) / _read(base), each.flops_per_step / base.flops_per_step
        yield (
            f"{each.model} at {each.context:,} cached tokens is bound by arithmetic here: it reads {read:.2f} x and "
            f"computes {computed:.2f} x what MHA does, {each.flops_per_step / _read(each):.1f} operations for each "
            f"byte where this machine has {balance:.1f}. It takes {1 / each.x_first:.2f} x MHA's time."
        )


def _read(each: SpeedRow) -> int:
    return each.read_weight_bytes + each.read_cache_bytes


def _of(report: SpeedReport, model: str, context: int) -> SpeedRow:
    return next(each for each in report.results if (each.model, each.context) == (model, context))


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384], help="tokens already cached")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences at a time")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8, help="of the grouped form")
    parser.add_argument("--rank", type=int, default=512, help="of the latent form")
    parser.add_argument("--rope", type=int, default=64, help="rotary numbers of the latent form")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=8, help="tokens of each block")
    parser.add_argument("--runs", type=int, default=7, help="counted blocks of each form")
    parser.add_argument("--prefill-runs", type=int, default=0, help="prompts of each form to time, too")
    parser.add_argument("--threads", type=int, help="torch's own number by default; 1 is steadier beside other work")
    parser.add_argument("--stock", action="store_true", help="decode as transformers does, too; slow")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay steps from CUDA graphs; has never been run")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    options = parse(args)
    if options.threads:
        torch.set_num_threads(options.threads)
    models = {name: make_model(config, options) for name, config in configs(options).items()}
    latent = models[latent_name(options)]
    if options.stock:
        models[STOCK] = latent
    with show_progress("decoding") as progress:
        report = measure_speed(
            models,
            contexts=options.contexts,
            batch_sizes=[options.batch_size],
            steps=options.steps,
            runs=options.runs,
            prefill_runs=options.prefill_runs,
            expand=(STOCK,),
            cuda_graphs=options.cuda_graphs,
            progress=progress,
        )
    protocol = report.protocol
    print(
        f"{options.layers} layers, hidden {options.hidden}, {options.heads} heads, batch size {options.batch_size}, "
        f"{protocol.dtype} on {protocol.device_name}, {protocol.threads} threads, torch {protocol.torch}, transformers "
        f"{protocol.transformers}; {options.runs} alternating blocks of {options.steps} tokens; copies "
        f"{report.copy_bytes_per_second / 1e9:.1f} GB/s (read and written), multiplies "
        f"{report.matrix_flops_per_second / 1e9:.1f} GFLOP/s"
    )
    parts = [speed_table(report), grouped_table(report, grouped_name(options)), arithmetic_notes(report)]
    if options.prefill_runs:
        parts.append(prompt_table(report))
    for lines in filter(None, map(list, parts)):
        print("", *lines, sep="\n")
    if options.stock:
        apart = logits_apart(latent, min(options.contexts))
        print(f"\nLogits of stock and absorbed decoding differ by {apart:.1e} of the largest.")


if __name__ == "__main__":
    main()
