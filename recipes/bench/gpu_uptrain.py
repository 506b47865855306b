"""How fast a model of 1.3 billion parameters is uptrained on one GPU, and in how much memory, beside Trainer.

    python -m kvfold.recipes.bench.gpu_uptrain [--steps 200] [--train attention] [--peak-tflops N]

NOT YET RUN ON A GPU: no figure of it exists. What runs, in a test, is `--tiny`: two small layers on a CPU.

A Llama of hidden size 2048, 16 layers and 32 heads with Llama 3.2's vocabulary, in bf16 with fp32 masters, in the two
forms that kvfold converts such a model to: 8 KV heads, and plain latent attention with a cache of half that size.
Weights are random and in place at once, as their values change no time; so nothing is converted, read or downloaded.
Each side is a process of its own, one after the other, which gives each the whole GPU; see `sides`. A tenth of the
steps is a block that the clock is read after; the first warms up, and the median counts. A side that fails, out of
memory say, gets a row that says so, and the others go on.

Model FLOPs utilisation is tokens a second times the operations that a token needs, over the peak of the device:
6 N + 6 L H (d_q + d_v) / 2 * S for N weights of linear modules (the head is one) that are all trained, windows of S
tokens, L layers, H heads and widths d_q of queries and d_v of values; a frozen weight counts 4, not 6, because it has
no gradient; see `sides.token_flops`. Both sides count alike, recomputation counts for nothing. The peak, dense bf16,
is looked up by the device's name, or given. On a GPU, memory is the most that torch had allocated.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from ...attention.plain import plain_config
from ...common.errors import CheckFailed
from ...common.loading import resolve_device
from ...uptrain.selection import TRAINED
from ..tables import row, rule
from .sides import Ending, Job, Side

BLOCKS = 10

# Dense bf16 TFLOP/s with fp32 sums, by a part of the name that CUDA gives; the first that fits counts. Data sheets
# that state sparse figures are halved.
PEAKS = {
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A6000": 155.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


def grouped(source: dict) -> dict:
    """The config of a source with a quarter of its KV heads."""
    return {**source, "num_key_value_heads": source["num_key_value_heads"] // 4}


def latent(source: dict) -> dict:
    """The config of a source's plain latent form, which caches half of what `grouped` does.

    Half the frequencies keep their rotation, so the rotary key is half a head wide.
    """
    width = source["head_dim"]
    cached = source["num_key_value_heads"] // 4 * width  # half of keys and values
    return plain_config(
        source,
        kv_lora_rank=cached - width // 2,
        qk_nope_head_dim=width,
        qk_rope_head_dim=width // 2,
        v_head_dim=width,
        mla_bias=False,
        rope_frequencies=[list(range(0, width // 2, 2))] * source["num_hidden_layers"],
    )


FORMS = {"GQA": grouped, "MLA": latent}


def peak_flops(name: str) -> float | None:
    """Operations a second of a device by its name; None if it is not known."""
    return next((1e12 * peak for part, peak in PEAKS.items() if part in name), None)


def measure(job: Job) -> tuple[float, Ending]:
    """Median seconds of a block, without the first, and what the side says at its end.

    Raises:
        CheckFailed: the side failed.
    """
    with Side(job) as side:
        seconds = [side.block() for _ in range(job.blocks)]
        return statistics.median(seconds[1:]), side.end()


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help=f"of each side, in {BLOCKS} blocks")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--sides", nargs="+", choices=["Trainer", "kvfold"], default=["Trainer", "kvfold"])
    parser.add_argument("--train", choices=TRAINED, default="attention")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for one that is not in the table")
    parser.add_argument("--tiny", action="store_true", help="two small layers, to see that it runs")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    options = parse(args)
    source = {**LLAMA, "max_position_embeddings": options.window, **(TINY if options.tiny else {})}
    print(f"{options.batch} x {options.window} tokens in bf16, {options.train} trained, {options.steps} steps a side")
    titles = ("form", "parameters", "loop", "tokens/s", "x Trainer", "model FLOPs utilisation", "peak GB", "mean loss")
    print(row(*titles, "device"))
    print(rule(len(titles) + 1))
    for form in options.forms:
        base = None
        for name in options.sides:
            job = Job(
                side=name,
                model=FORMS[form](source),
                train=options.train,
                precision="bf16",
                device=resolve_device(options.device),
                batch=options.batch,
                window=options.window,
                block=max(1, options.steps // BLOCKS),
                blocks=BLOCKS,
            )
            try:
                seconds, end = measure(job)
            except CheckFailed as error:
                print(row(form, "", name, str(error), *[""] * 5), flush=True)
                continue
            base = seconds if name == "Trainer" else base
            speed = job.block_tokens / seconds
            peak = 1e12 * options.peak_tflops if options.peak_tflops else peak_flops(end.device)
            cells = [
                form,
                f"{end.parameters / 1e6:,.1f} M, {end.trained / 1e6:,.1f} M trained",
                name,
                f"{speed:,.0f}",
                f"{base / seconds:.2f}" if base else "",
                f"{speed * end.flops / peak:.1%}" if peak else "device not in the table",
                f"{end.peak / 1e9:.2f}",
                f"{end.loss:.5f}",
                end.device,
            ]
            print(row(*cells), flush=True)


if __name__ == "__main__":
    main()
