"""What the columns of the page's tables are called, and what they mean."""

from __future__ import annotations

# By the field's name: heading, and what it means.
_SAID: dict[str, tuple[str, str]] = {
    "perplexity_ratio": ("Perplexity × source", "the perplexity over the source's, 1 is as good"),
    "kv_ratio": ("Cache of source", "cached bytes a token over the source's, each in the dtype it is stored in"),
    "kv_elements_ratio": (
        "Cached numbers, of source",
        "numbers that a token caches in a layer over the source's, whatever the dtype",
    ),
    "kv_bytes_per_token": ("Cache / token", "bytes that one more token costs over all layers, by the config"),
    "kv_elements_per_token_per_layer": ("Cached numbers / token and layer", "numbers, not bytes, by the config"),
    "kv_bytes": ("Cache of one sequence", "bytes by the config, at the context of the protocol of caches"),
    "measured_kv_bytes": ("Cache as measured", "bytes that were found in the cache of one sequence"),
    "kv_dtype": ("Stored in", "the dtype of the checkpoint, hence of its cache"),
    "kl": ("KL", "divergence from the source in nats a token, 0 is equal"),
    "num_key_value_heads": ("KV heads", "key/value heads a layer"),
    "kv_lora_rank": ("Latent rank", "numbers of the latent that a token caches in a layer"),
    "qk_rope_head_dim": ("Rope size", "numbers of the rotary key that stands beside the latent"),
    "parameters": ("Parameters", "of the whole model"),
    "loss": ("Loss", "nats a token"),
    "first_bad_layer": ("First bad layer", "the first whose output is more than half its size from the source's"),
    "passed": ("Beats guessing", "whether its loss is finite and below that of a model that guesses"),
    "reason": ("Why not", "why it does not beat guessing"),
    "pareto": ("On the front", "no other model here has both a smaller cache and a lower perplexity"),
    "decoding": ("Decodes from", "what is attended to: heads, or latents that are absorbed or expanded"),
    "context": ("Tokens cached", "tokens of the prompt, and cached before the first step"),
    "batch_size": ("Batch", "sequences at a time"),
    "tokens_per_second": ("Decoded tokens/s", "median of the blocks, all sequences together"),
    "tokens_per_second_min": ("slowest block", "decoded tokens a second"),
    "tokens_per_second_max": ("fastest block", "decoded tokens a second"),
    "milliseconds_per_step": ("Step, ms", "median; a step gives every sequence one token"),
    "milliseconds_per_step_min": ("fastest, ms", "of a step"),
    "milliseconds_per_step_max": ("slowest, ms", "of a step"),
    "prefill_tokens_per_second": ("Prompt tokens/s", "median of the prompts, each read at once"),
    "prefill_tokens_per_second_min": ("slowest prompt", "tokens a second"),
    "prefill_tokens_per_second_max": ("fastest prompt", "tokens a second"),
    "x_first": ("× source's speed", "decode speed over the source's"),
    "read_weight_bytes": ("Weights read / step", "bytes, at the least"),
    "read_cache_bytes": ("Cache read / step", "bytes, at the least"),
    "flops_per_step": ("Operations / step", "at the least"),
    "memory_floor_ms": ("Memory floor, ms", "what a step reads over the rate at which this machine copies"),
    "arithmetic_floor_ms": ("Arithmetic floor, ms", "what a step computes over this machine's matrix rate"),
    "bound": ("Bound by", "the larger of the two floors, which no step can beat"),
    "floor_share": ("Floor / step", "the larger floor over the median step; 1 is as fast as this machine can"),
    "weight_bytes": ("Weights", "bytes as loaded"),
    "largest_batch_size": ("Largest batch", "sequences that fit into the memory budget"),
    "largest_context": ("Longest context", "tokens a sequence that fit into the memory budget"),
    "memory_budget_bytes": ("Memory budget", "bytes, if one was asked for"),
    "steps": ("Tokens a block", "that each sequence gets in a timed block"),
    "runs": ("Timed blocks", "of each model"),
    "prefill_runs": ("Timed prompts", "of each model, at most"),
    "text_hash": ("Hash of the text", "of the texts, joined"),
    "join": ("Texts joined by", ""),
    "stride": ("Stride", "tokens from one window's start to the next"),
    "bos": ("BOS", "the token that stands before the text or its windows"),
    "scored": ("Scored tokens", ""),
    "max_windows": ("Windows at most", "– is no bound"),
}


def heading(name: str) -> str:
    """A key of the JSON, or its path, as the head of a column."""
    key = name.rpartition(".")[2]
    if key in _SAID:
        return _SAID[key][0]
    text = key.replace("_", " ")
    return text[:1].upper() + text[1:]


def meaning(name: str) -> str:
    """What stands under such a heading, if that needs to be said."""
    return _SAID.get(name.rpartition(".")[2], ("", ""))[1]
