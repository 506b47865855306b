"""Runs in vLLM's own environment: `python run_vllm.py REQUEST.json ANSWER.npz`."""

import json
import sys
from pathlib import Path

import numpy as np
import vllm


def log_probs(entries, vocabulary: int) -> np.ndarray:
    """[positions, vocabulary] from vLLM's tables by token."""
    rows = np.full((len(entries), vocabulary), -np.inf)
    for row, entry in zip(rows, entries, strict=True):
        row[np.fromiter(entry.keys(), int)] = np.fromiter((one.logprob for one in entry.values()), float)
    return rows


def cached_elements(worker) -> float:
    """Elements allocated for one token in one layer, a mean over layers."""
    caches = [cache for cache in worker.model_runner.kv_caches if cache.numel()]
    tokens = worker.cache_config.num_gpu_blocks * worker.cache_config.block_size
    return sum(cache.numel() for cache in caches) / len(caches) / tokens


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    prompt, new_tokens = request["prompt"], request["new_tokens"]
    model = vllm.LLM(
        request["model"],
        model_impl=request["model_impl"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_logprobs=-1,
        enable_prefix_caching=False,
        # Its CPU operator for RoPE is wrong for queries of several heads beside one key head, without an error.
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
    )
    ask = vllm.SamplingParams(
        temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, logprobs=-1, prompt_logprobs=-1, detokenize=False
    )
    (answer,) = model.generate({"prompt_token_ids": prompt}, ask, use_tqdm=False)
    vocabulary = request["vocabulary"]
    np.savez(
        sys.argv[2],
        version=f"vLLM {vllm.__version__}",
        tokens=np.array(answer.outputs[0].token_ids),
        prompt=log_probs(answer.prompt_logprobs[1:], vocabulary),
        decode=log_probs(answer.outputs[0].logprobs, vocabulary),
        cached=model.collective_rpc(cached_elements)[0],
    )


if __name__ == "__main__":
    main()
