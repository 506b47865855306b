"""Bytes that a decoder takes, from its sizes alone: weights, cache, and what a prompt makes on the way.

Legend: B sequences, T tokens of each, H query heads, N vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import UserError, did_you_mean
from ..common.kvcache import ELEMENT_BYTES
from ..common.sources import source_kind
from .flops import check_work
from .shape import Shape, figures, read_any_config, shape_of

DEFAULT_DTYPE = "float16"
_SIZELESS = "attention_score_bytes_per_head"  # the figure that is known without any size


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a decoder at T = `context` tokens a sequence. None is what sizes are missing for; see `missing`.

    Attributes:
        model: as given; None if the sizes were given by hand.
        attention_kind: `MHA`, `GQA`, `MQA` or `MLA`.
        context, batch_size: T and B.
        dtype: of all that is counted, but for `stored_weight_bytes`.
        parameters: of the decoder, a tied head once; by hand with Llama's norms and no biases.
        weight_bytes: `parameters` in `dtype`.
        stored_weight_bytes: what a checkpoint on this machine holds in fact, by its headers; None if there is none.
        kv_elements_per_token_per_layer: what a layer caches of a token.
        kv_bytes_per_token: of one sequence over all layers, while no window is full.
        kv_bytes: of B sequences of T tokens; a windowed layer holds its window less one.
        attention_score_bytes_per_head: T^2 scores of one head and sequence, which a naive attention writes down.
        attention_score_bytes: those of H heads and B sequences, in one layer.
        logit_bytes: of B T tokens, if a prompt's are all asked for; the last token's alone are a T-th.
        total_bytes: weights and cache: what there is while a model decodes. Scores and logits come on top, where they
            are written down.
        missing: what to give for the figures that are None; empty if nothing is missing.
    """

    model: str | None
    attention_kind: str | None
    context: int
    batch_size: int
    dtype: str
    parameters: int | None
    weight_bytes: int | None
    stored_weight_bytes: int | None
    kv_elements_per_token_per_layer: int | None
    kv_bytes_per_token: int | None
    kv_bytes: int | None
    attention_score_bytes_per_head: int
    attention_score_bytes: int | None
    logit_bytes: int | None
    total_bytes: int | None
    missing: str


def memory(
    model: str | Path | None = None,
    *,
    context: int,
    batch_size: int = 1,
    dtype: str = "auto",
    revision: str | None = None,
    **sizes: int | bool | None,
) -> MemoryReport:
    """Size a model, or one that only sizes describe.

    Args:
        model: directory, GGUF file or Hub id, of which config and headers are read.
        context: tokens of a sequence.
        batch_size: sequences.
        dtype: of weights, cache, scores and logits; `auto` is what the config says, else float16.
        revision: of a Hub id.
        sizes: names of `shape.GIVEN`, in place of the config's.

    Raises:
        UserError: the sizes tell nothing or contradict each other, the model caches nothing, or the dtype is unknown.
        EnvironmentFailure: the Hub cannot be reached.
    """
    config = read_any_config(model, revision) if model is not None else None
    if dtype == "auto":
        said = str(getattr(config, "dtype", None)).removeprefix("torch.")
        dtype = said if said in ELEMENT_BYTES else DEFAULT_DTYPE
    return memory_of(
        shape_of(config, sizes),
        model=None if model is None else str(model),
        context=context,
        batch_size=batch_size,
        dtype=dtype,
        stored_weight_bytes=None if model is None else _stored_bytes(str(model)),
    )


def memory_of(
    shape: Shape,
    *,
    model: str | None = None,
    context: int,
    batch_size: int = 1,
    dtype: str = DEFAULT_DTYPE,
    stored_weight_bytes: int | None = None,
) -> MemoryReport:
    """Size a shape, which the report calls `model`. See `memory`."""
    check_work(context, batch_size)
    if dtype not in ELEMENT_BYTES:
        raise UserError(f"unknown dtype {dtype!r}{did_you_mean(dtype, ELEMENT_BYTES)}")
    found, missing = figures(shape, _forms(context, batch_size, ELEMENT_BYTES[dtype]))
    if all(value is None for name, value in found.items() if name != _SIZELESS):
        raise UserError(f"there are too few sizes to size anything; {missing}, or a MODEL")
    return MemoryReport(
        model=model,
        attention_kind=shape.attention_kind,
        context=context,
        batch_size=batch_size,
        dtype=dtype,
        stored_weight_bytes=stored_weight_bytes,
        missing=missing,
        **found,
    )


def _forms(tokens: int, batch: int, width: int) -> Mapping[str, Callable[[Shape], Any]]:
    def cache(shape: Shape, held: int) -> int:
        return width * shape.kv_elements() * shape.cached_tokens(held)

    scores = width * tokens**2
    return {
        "parameters": Shape.parameters,
        "weight_bytes": lambda shape: width * shape.parameters(),
        "kv_elements_per_token_per_layer": Shape.kv_elements,
        "kv_bytes_per_token": lambda shape: cache(shape, 1),
        "kv_bytes": lambda shape: batch * cache(shape, tokens),
        "attention_score_bytes_per_head": lambda shape: scores,
        "attention_score_bytes": lambda shape: batch * scores * next(shape.need("num_attention_heads")),
        "logit_bytes": lambda shape: width * batch * tokens * next(shape.need("vocab_size")),
        "total_bytes": lambda shape: width * shape.parameters() + batch * cache(shape, tokens),
    }


def _stored_bytes(model: str) -> int | None:
    """Bytes of the tensors that a checkpoint on this machine holds; None where it holds none, or is not here."""
    path, kind = Path(model), source_kind(model)
    if kind == "gguf":
        from ..convert.gguf_header import read_gguf_headers

        return sum(info.stored_bytes for info in read_gguf_headers(path))
    if kind == "hub" or not any(next(path.glob(f"*.{end}"), None) for end in ("safetensors", "bin")):
        return None
    from ..convert.checkpoint import Checkpoint

    return sum(info.stored_bytes for info in Checkpoint.open(path).tensors.values())
