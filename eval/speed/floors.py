"""Two floors under the time of a decoding step: what must be read, and what must be computed.

A step reads every weight that it multiplies with and the cache of every sequence at least once, and does at least the
multiplications and additions of its matrices and of attention. What the device copies and multiplies in a second is
measured, in the run that the steps are timed in. A copy counts what it reads and what it writes; a device that reads
faster than it writes can be faster than the memory floor, which is then no bound but a yardstick.

Legend: L layers, B sequences, S cached tokens, summed over layers where windows differ; H heads, d coordinates of a
head; for latents R numbers of one, d_r of its rotary key, n and v coordinates of a head's key and value.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ...common.kvcache import cached_tokens, head_dim, num_attention_heads

HEADS, ABSORBED, EXPANDED = "heads", "latent, absorbed", "latent, expanded"

# By type of device: bytes that are a multiple of what its own caches hold; rows and columns enough for its full rate.
COPIED_BYTES = {"cpu": 2**28, "other": 2**30}
MATRIX = {"cpu": 1536, "other": 8192}


@dataclass(frozen=True)
class StepWork:
    """What one decoding step of B sequences takes at least.

    Attributes:
        weight_bytes: of all weights that are multiplied with or added, once, and of the rows of embeddings.
        cache_bytes: of the caches of all sequences, once.
        flops: floating-point operations, a multiplication and an addition being two.
    """

    weight_bytes: int
    cache_bytes: int
    flops: int


def step_work(model: Any, decoding: str, *, context: int, batch_size: int, cache_bytes: int) -> StepWork:
    """The work of one step with `context` tokens cached; the token that the step brings is left out.

    Matrices cost 2 a weight and sequence. Attention costs 4 H d S with cached heads; 2 H S (2 R + d_r) with latents
    absorbed, whose up-projections are matrices like others; and 2 H S (R (n + v) + n + d_r + v) where all latents are
    expanded first. Of routed experts those of one token count, as all sequences may choose the same.

    Args:
        model: a loaded transformers model.
        decoding: `HEADS`, `ABSORBED` or `EXPANDED`.
        cache_bytes: of one sequence.
    """
    config = model.config.get_text_config(decoder=True)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings()
    tables.discard(id(getattr(head, "weight", None)))  # a tied one is read as a head
    read = multiplied = Fraction(0)
    for weight in model.parameters():
        if id(weight) in tables:
            read += batch_size * weight[0].nbytes
            continue
        share = _share_used(weight, config)
        read += share * weight.nbytes
        multiplied += share * weight.numel() if weight.ndim > 1 else 0
    attention = sum(cached_tokens(config, context)) * _token_flops(config, decoding)
    return StepWork(
        weight_bytes=int(read),
        cache_bytes=batch_size * cache_bytes,
        flops=batch_size * int(2 * multiplied + attention),
    )


def _token_flops(config: Any, decoding: str) -> int:
    """Operations that each cached token of a layer costs a step of one sequence."""
    heads = num_attention_heads(config)
    if decoding == HEADS:
        return 4 * heads * head_dim(config)
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    if decoding == ABSORBED:
        return 2 * heads * (2 * rank + rope)
    wide = config.qk_nope_head_dim + config.v_head_dim
    return 2 * heads * (rank * wide + wide + rope)


def _share_used(weight: Tensor, config: Any) -> Fraction:
    """The share of a weight that one token needs: all, or that of the experts it is sent to."""
    if weight.ndim < 3:
        return Fraction(1)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for name in names if (count := getattr(config, name, None))), None)
    return Fraction(config.num_experts_per_tok, experts) if weight.shape[0] == experts else Fraction(1)


class Gauge:
    """Measures a device in between other measurements, and remembers the best of each kind.

    Args:
        device, dtype: where, and what matrices are made of.
        copied_bytes: of one buffer, of which there are two; `COPIED_BYTES` by default.
        matrix: rows and columns of the square matrices that are multiplied; as in `MATRIX` by default.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, copied_bytes: int | None = None, matrix: int | None = None
    ):
        copied_bytes = copied_bytes or COPIED_BYTES.get(device.type, COPIED_BYTES["other"])
        size = matrix or MATRIX.get(device.type, MATRIX["other"])
        # Written to, as memory that never was has no place of its own yet.
        self._source, self._target = (
            torch.full((copied_bytes,), fill, dtype=torch.uint8, device=device).view(torch.float32) for fill in (0, 1)
        )
        self._left, self._right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        self._product = torch.empty_like(self._left)
        self._device = device
        self.copy_seconds = self.matrix_seconds = float("inf")

    def take(self) -> None:
        """Measure both once."""
        copied = timed(self._device, lambda: self._target.copy_(self._source))
        multiplied = timed(self._device, lambda: torch.mm(self._left, self._right, out=self._product))
        self.copy_seconds = min(self.copy_seconds, copied)
        self.matrix_seconds = min(self.matrix_seconds, multiplied)

    @property
    def copy_bytes_per_second(self) -> float:
        """Bytes read and bytes written, at best."""
        return 2 * self._source.nbytes / self.copy_seconds

    @property
    def matrix_flops_per_second(self) -> float:
        return 2 * len(self._left) ** 3 / self.matrix_seconds


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of wall clock that work takes, from a device that has nothing left to do until it has again."""
    finish_queue(device)
    start = time.perf_counter()
    work()
    finish_queue(device)
    return time.perf_counter() - start


def finish_queue(device: torch.device) -> None:
    """Wait for what was asked of an accelerator."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
