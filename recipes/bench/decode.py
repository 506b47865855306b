"""How fast a stock DeepSeek-V3 model of transformers decodes, and how fast once it is absorbed.

    python -m kvfold.recipes.bench.decode [--contexts 4096 16384] [--layers 4] [--heads 32] [--threads N]

A stack of random weights and realistic width, all dense, with a small vocabulary. The cache is filled with random
latents, as only steps are timed. Both kinds decode in one process and in turn, so that the machine's moods hit both
alike; the ratio is of the medians. How far their logits are apart, as a share of the
largest, shows that both do the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ...attention.absorb import absorb

VOCABULARY = 1024


def make_model(options: argparse.Namespace):
    """An all-dense `DeepseekV3ForCausalLM` of random weights in the dtype asked for."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        q_lora_rank=None,
        kv_lora_rank=options.rank,
        qk_rope_head_dim=options.rope,
        qk_nope_head_dim=options.nope,
        v_head_dim=options.value,
        first_k_dense_replace=options.layers,
        max_position_embeddings=2 * max(options.contexts),
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).to(getattr(torch, options.dtype)).eval()


def filled_cache(model, context: int):
    """A dynamic cache of `context` random tokens: latents [1, 1, S, R] and rotary keys [1, 1, S, d_r] a layer."""
    from transformers import DynamicCache

    cache, config = DynamicCache(), model.config
    like = model.get_input_embeddings().weight
    for layer in range(config.num_hidden_layers):
        latent, key_rope = (
            torch.randn(1, 1, context, size, dtype=like.dtype, device=like.device)
            for size in (config.kv_lora_rank, config.qk_rope_head_dim)
        )
        cache.update(latent, key_rope, layer)
    return cache


def decode(model, cache, steps: int) -> tuple[float, Tensor]:
    """Seconds that `steps` greedy steps take, and the logits [V] of the first; the cache is left as it was."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    first = None
    start = time.perf_counter()
    for _ in range(steps):
        logits = model(token, None, None, cache).logits[:, -1]
        first = logits if first is None else first
        token = logits.argmax(-1, keepdim=True)
    seconds = time.perf_counter() - start
    cache.crop(-steps)
    return seconds, first[0].float()


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384], help="tokens already cached")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--rope", type=int, default=64)
    parser.add_argument("--nope", type=int, default=64)
    parser.add_argument("--value", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--steps", type=int, default=4, help="tokens of each run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch's own number by default; 1 is steadier beside other work")
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    options = parse(args)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = make_model(options)
    kinds = {"stock": contextlib.nullcontext, "absorbed": lambda: absorb(model)}
    print(
        f"{options.layers} layers, hidden {options.hidden}, {options.heads} heads, rank {options.rank} + rope "
        f"{options.rope}, {options.dtype}; {torch.get_num_threads()} threads, {options.runs} alternating runs of "
        f"{options.steps} tokens"
    )
    print("| cached tokens | decoding | median tokens/s | min | max | x stock | logits apart |")
    print("|---|---|---|---|---|---|---|")
    with torch.no_grad():
        for context in options.contexts:
            cache = filled_cache(model, context)
            speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
            logits: dict[str, Tensor] = {}
            for kind, prepared in kinds.items():  # once uncounted
                with prepared():
                    logits[kind] = decode(model, cache, 1)[1]
            for _ in range(options.runs):
                for kind, prepared in kinds.items():
                    with prepared():
                        speeds[kind].append(options.steps / decode(model, cache, options.steps)[0])
            base = statistics.median(speeds["stock"])
            for kind, found in speeds.items():
                median = statistics.median(found)
                apart = (logits[kind] - logits["stock"]).abs().max() / logits["stock"].abs().max()
                cells = [f"{median:.2f}", f"{min(found):.2f}", f"{max(found):.2f}", f"{median / base:.2f}"]
                print("|", " | ".join([str(context), kind, *cells, f"{apart:.1e}"]), "|")


if __name__ == "__main__":
    main()
