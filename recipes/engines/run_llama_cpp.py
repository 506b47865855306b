"""Runs in llama.cpp's own environment (xllamacpp): `python run_llama_cpp.py REQUEST.json ANSWER.npz`.

Its interface is the server's, which tells log-probabilities of new tokens only: every position is asked for by itself,
those of the prompt evaluated anew, those of decoding with one more token on what is cached.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp


@contextmanager
def logged() -> Iterator[Callable[[], str]]:
    """Keep what llama.cpp logs, which goes to the file descriptor, past Python; shown if it fails.

    Yields:
        A function that returns what has been logged so far.
    """
    with tempfile.TemporaryFile() as log:

        def read() -> str:
            return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")

        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield read
        except BaseException:
            os.write(kept, read().encode())
            raise
        finally:
            os.dup2(kept, 2)


def start(request: Mapping[str, Any]) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    # More cells than are used, as the log tells the size of the cache in MiB with two digits only.
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 8192, 1, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    params.cache_ram_mib = 0
    params.verbosity = 4  # at which it tells what it allocates
    return xllamacpp.Server(params)


def ask(server: xllamacpp.Server, ids: list[int], request: Mapping[str, Any], *, cached: bool) -> np.ndarray:
    """Log-probabilities [vocabulary] of what follows these tokens.

    Args:
        cached: go on from the tokens that the last question left in the cache.
    """
    answer = server.handle_completions(
        {
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": request["vocabulary"],
            # What is sampled does not matter, but of a piece of a character the server keeps the figures back.
            "logit_bias": [[request["filler"], 1e4]],
            "cache_prompt": cached,
        }
    )
    answer = json.loads(answer) if isinstance(answer, str) else answer
    if "choices" not in answer:
        sys.exit(f"llama.cpp: {answer}")
    (position,) = answer["choices"][0]["logprobs"]["content"]
    row = np.full(request["vocabulary"], -np.inf)
    for one in position["top_logprobs"]:
        row[one["id"]] = one["logprob"]
    return row


def cached_elements(read: Callable[[], str]) -> float:
    """Elements of one token in one layer, by the line in which llama.cpp tells what it allocated."""
    for _ in range(100):  # a thread of its own writes the log, sooner or later
        if found := re.search(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers", read()):
            megabytes, cells, layers = float(found[1]), int(found[2]), int(found[3])
            return megabytes * 2**20 / 4 / cells / layers  # fp32
        time.sleep(0.1)
    sys.exit("llama.cpp did not tell the size of its cache")


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    ids = list(request["prompt"])
    with logged() as read:
        server = start(request)
        asked = [ask(server, ids[:stop], request, cached=False) for stop in range(1, len(ids))]
        decode: list[np.ndarray] = []
        for _ in range(request["new_tokens"]):
            decode.append(ask(server, ids, request, cached=bool(decode)))
            choice = decode[-1].copy()
            choice[request["eos"]] = -np.inf
            ids.append(int(choice.argmax()))
        cached = cached_elements(read)
    np.savez(
        sys.argv[2],
        version=f"llama.cpp (xllamacpp {version('xllamacpp')})",
        tokens=np.array(ids[len(request["prompt"]) :]),
        prompt=np.stack(asked),
        decode=np.stack(decode),
        cached=cached,
    )


if __name__ == "__main__":
    main()
