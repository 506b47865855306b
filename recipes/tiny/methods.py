"""Every merging method on the embedded model, at 4, 2 and 1 KV heads, with and without refinement.

    python -m kvfold.recipes.tiny.methods [--only WAY ...] [--refine 64] [--max-windows 40] [--cache DIR]

Prints a table of perplexities on text that was neither trained nor calibrated on. Results stay in the cache, so a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ...common.cache import cache_folder
from ...common.text import BUILTIN
from ...eval.ppl import PerplexityReport, perplexity
from ..timed import timed_convert
from . import MODEL_DIR

KV_HEADS = (4, 2, 1)
METHODS = ("first", "mean", "aligned", "svd")
REFINED = ("mean", "svd")


def judge(folder: Path, max_windows: int) -> PerplexityReport:
    return perplexity(folder, text=[BUILTIN], max_windows=max_windows, batch_size=8)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=cache_folder())
    parser.add_argument("--only", action="append", choices=METHODS, metavar="METHOD")
    parser.add_argument("--refine", type=int, default=64, help="windows to refine on")
    parser.add_argument("--max-windows", type=int, default=40, help="windows to judge on")
    options = parser.parse_args(args)
    methods = options.only or METHODS
    source = judge(MODEL_DIR, options.max_windows)
    print(f"source: perplexity {source.perplexity:.2f} on {source.tokens} tokens, text {source.protocol.text_hash}")
    print("| way |", " | ".join(f"{heads} KV heads | x source" for heads in KV_HEADS), "| seconds | peak GB |")
    print("|" + "---|" * (3 + 2 * len(KV_HEADS)))
    ways = [(method, 0) for method in methods] + [(method, options.refine) for method in REFINED if method in methods]
    for method, windows in ways:
        cells, seconds, peak = [], 0.0, 0
        for heads in KV_HEADS:
            out = options.cache.resolve() / f"tiny-{heads}-{method}-{windows}"
            out.parent.mkdir(parents=True, exist_ok=True)
            flags = {"--kv-heads": str(heads), "--method": method, "--refine": str(windows)}
            made = timed_convert(MODEL_DIR, out, flags)
            figure = judge(made.folder, options.max_windows).perplexity
            cells += [f"{figure:,.2f}", f"{figure / source.perplexity:.3f}"]
            seconds, peak = max(seconds, made.seconds), max(peak, made.peak_bytes)
            print(f"{out.name}: {figure:.2f}", file=sys.stderr, flush=True)
        name = f"{method} --refine {windows}" if windows else method
        print("|", " | ".join([name, *cells, f"{seconds:.0f}", f"{peak / 1e9:.2f}"]), "|")


if __name__ == "__main__":
    main()
