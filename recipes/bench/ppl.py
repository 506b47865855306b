"""What rolling perplexity costs by lm-evaluation-harness and by kvfold, and that both find the same.

    python -m kvfold.recipes.bench.ppl MODEL --text FILE [--windows N] [--window 512] [--batch-size 1] [--runs 3]

Needs kvfold[tasks]. One model object, one text as one document, the same windows and batches, in one process and in
turn, so that the machine's moods hit both alike; the ratio is of the medians. lm-eval's side is its own
`HFLM.loglikelihood_rolling`, kvfold's is `score_tokens` by the protocol `lm-eval`; both turn the text into tokens
inside the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from ...common.errors import UserError
from ...common.kvcache import fit_context
from ...common.loading import DTYPES, load_model, load_tokenizer
from ...common.protocol import LM_EVAL
from ...common.text import join_documents, read_texts
from ...eval.harness import hushed
from ...eval.ppl import DEFAULT_WINDOW, score_tokens


def cut(tokenizer: Any, text: str, tokens: int) -> str:
    """The beginning of a text that holds about so many tokens."""
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if len(ends) < tokens:
        raise UserError(f"the text has {len(ends)} tokens, and {tokens} are asked for; give a longer one")
    return text[: ends[tokens - 1][1]]


def timed(work: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """The seconds that work takes, and what it finds."""
    _finish_queue(device)
    start = time.perf_counter()
    found = work()
    _finish_queue(device)
    return time.perf_counter() - start, found


def _finish_queue(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--windows", type=int, help="of the text's beginning; all by default")
    parser.add_argument("--window", type=int, help="tokens; 2048, or the model's context if smaller")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(args)
    tokenizer = load_tokenizer(options.model)
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    window = fit_context(model.config, "window", options.window, DEFAULT_WINDOW)
    text = join_documents(read_texts(options.text))
    if options.windows:
        text = cut(tokenizer, text, options.windows * window)

    with hushed():
        harness = HFLM(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=options.batch_size,
            max_length=window,
        )
        request = Instance("loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
        tokens = len(harness.tok_encode(text))

        def by_lm_eval() -> float:
            return -harness.loglikelihood_rolling([request], disable_tqdm=True)[0] / tokens

        def by_kvfold() -> float:
            return score_tokens(
                model,
                harness.tok_encode(text),
                protocol=LM_EVAL,
                window=window,
                lead_id=harness.prefix_token_id,
                batch_size=options.batch_size,
            ).loss

        sides = {"lm-eval": by_lm_eval, "kvfold": by_kvfold}
        losses = {name: work() for name, work in sides.items()}  # once uncounted
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.runs):
            for name, work in sides.items():
                seconds, losses[name] = timed(work, model.device)
                times[name].append(seconds)

    base = statistics.median(times["lm-eval"])
    print(
        f"{tokens} tokens in windows of {window}, {options.batch_size} at a time, in {model.dtype} on {model.device}, "
        f"{options.runs} alternating runs"
    )
    print("| by | loss, nats a token | median s | min | max | tokens/s | x lm-eval |")
    print("|---|---|---|---|---|---|---|")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        spread = [f"{cell:.3f}" for cell in (median, min(seconds), max(seconds))]
        cells = [name, f"{losses[name]:.8f}", *spread, f"{tokens / median:.0f}", f"{base / median:.2f}"]
        print("|", " | ".join(cells), "|")
    print(f"difference of the losses: {losses['kvfold'] - losses['lm-eval']:.2e}")


if __name__ == "__main__":
    main()
