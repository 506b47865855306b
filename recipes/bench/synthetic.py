"""A synthetic Llama checkpoint of any size: real names, shapes and sharding, random weights.

python -m kvfold.recipes.bench.synthetic OUT --gigabytes 4
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from ...common.atomic import output_directory
from ...convert.checkpoint import INDEX
from ...convert.families import FAMILIES
from ...convert.headers import pack_header

# Llama-2-7B's shapes; the number of layers follows from the size asked for.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SHARD_BYTES = 2 * 10**9
_BLOCK = 1 << 24  # random numbers drawn once and written again and again


def make_checkpoint(out: Path, gigabytes: float) -> int:
    """Write a sharded bf16 checkpoint of at least `gigabytes` (10^9 bytes); returns its exact size in bytes.

    Raises:
        UserError: `out` exists.
    """
    import torch
    from transformers import LlamaConfig

    block = torch.randn(_BLOCK // 2, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    data = memoryview(block.view(torch.uint8).numpy())
    for layers in range(1, 1000):
        config = LlamaConfig(**CONFIG, num_hidden_layers=layers)
        promises = [p for p in FAMILIES["llama"].promises(config, ["model."]).values() if p.weight.rule != "drop"]
        total = sum(2 * math.prod(promise.shape) for promise in promises)
        if total >= gigabytes * 1e9:
            break
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    room = SHARD_BYTES
    for promise in sorted(promises, key=lambda promise: promise.name):
        size = 2 * math.prod(promise.shape)
        if size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append((promise.name, "BF16", promise.shape))
        room -= size
    with output_directory(out) as staging:
        weight_map = {}
        for number, tensors in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            with (staging / name).open("wb") as file:
                file.write(pack_header(tensors, {"format": "pt"}))
                left = sum(2 * math.prod(shape) for _, _, shape in tensors)
                while left:
                    left -= file.write(data[: min(left, len(data))])
            weight_map |= {tensor: name for tensor, _, _ in tensors}
        (staging / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
        config.save_pretrained(staging)
    return total


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    options = parser.parse_args(args)
    print(f"{options.out}: {make_checkpoint(options.out, options.gigabytes):,} bytes")


if __name__ == "__main__":
    main()
