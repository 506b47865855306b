"""What a model and its caches hold, and how much of them fits: from bytes that were measured."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from ...common.kvcache import cached_tokens, context_length
from ..cache import DEFAULT_CONTEXT, measure_cache

MOST_TOKENS = 2**40  # of a model that sets no bound


@dataclass(frozen=True)
class Footprint:
    """Bytes of a loaded model, and of its cache as found after a forward pass.

    Attributes:
        config: says which layers keep how many tokens.
        weight_bytes: of the storages of all parameters and buffers, each counted once.
        found_bytes: of the cache of one sequence.
        found_tokens: that the config has this cache hold, summed over layers; 0 if every window is a single token.
    """

    config: Any
    weight_bytes: int
    found_bytes: int
    found_tokens: int

    def cache_bytes(self, context: int) -> int:
        """Of one sequence: as many bytes a token as were found; 0 where no layer keeps any."""
        if not self.found_tokens:
            return 0
        return self.found_bytes * sum(cached_tokens(self.config, context)) // self.found_tokens

    def largest_batch_size(self, context: int, memory: int) -> int | None:
        """Sequences of `context` tokens whose caches fit beside the weights into `memory` bytes.

        None if any number does, as they cache nothing.
        """
        if memory < self.weight_bytes:
            return 0
        cached = self.cache_bytes(context)
        return (memory - self.weight_bytes) // cached if cached else None

    def largest_context(self, batch_size: int, memory: int) -> int | None:
        """Tokens that each of `batch_size` sequences may have for the same; at most the model's own context.

        None if neither the memory nor the model sets a bound.
        """
        if memory < self.weight_bytes:
            return 0
        longest = context_length(self.config)
        contexts = range(1, (longest or MOST_TOKENS) + 1)
        # Contexts need no less memory the longer they are.
        found = bisect_right(contexts, (memory - self.weight_bytes) // batch_size, key=self.cache_bytes)
        return None if longest is None and found == MOST_TOKENS else found


def measure_footprint(model: Any, *, name: str) -> Footprint:
    """Weigh a loaded model.

    Raises:
        UserError: it has no key/value cache.
    """
    config = model.config.get_text_config(decoder=True)
    context = min(DEFAULT_CONTEXT, context_length(config) or DEFAULT_CONTEXT)
    report = measure_cache(model, model=name, context=context)
    return Footprint(config, weight_bytes(model), report.measured_kv_bytes, sum(cached_tokens(config, context)))


def weight_bytes(model: Any) -> int:
    """Bytes of memory that the parameters and buffers of a model keep alive; what is tied counts once."""
    storages = (tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers()))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
