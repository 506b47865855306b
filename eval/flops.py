"""Floating-point operations of a decoder, from its sizes alone. A multiplication with its addition counts 2.

Counted are the products of matrices: projections, MLP, head, and the two of attention. Norms, activations, rotations,
softmax and biases are left out, as is usual (Kaplan et al., arXiv 2001.08361): they are few, and bound by memory.

Legend: B sequences, T tokens of each, L layers, H query heads; d_q the width of a query or key head, d_v of a value
head, r and p the latent and the rotary key of MLA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from .shape import Shape, figures, read_any_config, shape_of

_TRAINING = 3  # forward once, and backward twice: for what came in, and for the weights


@dataclass(frozen=True)
class FlopsReport:
    """Operations of a decoder at T = `context` tokens a sequence. None is what sizes are missing for; see `missing`.

    Attributes:
        model: as given; None if the sizes were given by hand.
        attention_kind: `MHA`, `GQA`, `MQA` or `MLA`.
        context, batch_size: T and B.
        q_flops_per_token ... head_flops_per_token: of one token's linear layers, over all L layers; of experts those
            that a token visits, and the choice between them. kv: of MLA with the expansion of one latent.
        linear_flops_per_token: their sum.
        attention_flops_per_layer: Q K^T and A V of B sequences in one layer, every token with every other: what an
            attention without a mask computes, or with one that is only added.
        causal_attention_flops_per_layer: the pairs of these that a causal mask leaves, which is half (T^2 / 2), in the
            layer that sees most: one without a window, where there is one.
        attention_flops: `attention_flops_per_layer` of all layers.
        causal_attention_flops: of all layers the pairs that a causal mask leaves, and only those within the window in
            layers that have one (T W - W^2 / 2).
        prompt_flops: linear layers of B T tokens, the head at every one, and causal attention.
        decode_flops: the last token of each of B sequences, with T tokens in the cache when it is done; of MLA
            absorbed, that is in latent space.
        expanded_decode_flops: of MLA, the same with all latents expanded at every step; None for others.
        training_flops: of a step over B sequences, three times `prompt_flops`; nothing is recomputed.
        missing: what to give for the figures that are None; empty if nothing is missing.
    """

    model: str | None
    attention_kind: str | None
    context: int
    batch_size: int
    q_flops_per_token: int | None
    kv_flops_per_token: int | None
    o_flops_per_token: int | None
    mlp_flops_per_token: int | None
    head_flops_per_token: int | None
    linear_flops_per_token: int | None
    attention_flops_per_layer: int | None
    causal_attention_flops_per_layer: int | None
    attention_flops: int | None
    causal_attention_flops: int | None
    prompt_flops: int | None
    decode_flops: int | None
    expanded_decode_flops: int | None
    training_flops: int | None
    missing: str


def flops(
    model: str | Path | None = None,
    *,
    context: int,
    batch_size: int = 1,
    revision: str | None = None,
    **sizes: int | bool | None,
) -> FlopsReport:
    """Count the operations of a model, or of one that only sizes describe.

    Args:
        model: directory, GGUF file or Hub id, whose config alone is read.
        context: tokens of a sequence.
        batch_size: sequences.
        revision: of a Hub id.
        sizes: names of `shape.GIVEN`, in place of the config's.

    Raises:
        UserError: the sizes tell nothing or contradict each other, or the model is of a type without a table.
        EnvironmentFailure: the Hub cannot be reached.
    """
    shape = shape_of(read_any_config(model, revision) if model is not None else None, sizes)
    if shape.untold:
        raise UserError(shape.untold)
    return flops_of(shape, model=None if model is None else str(model), context=context, batch_size=batch_size)


def flops_of(shape: Shape, *, model: str | None = None, context: int, batch_size: int = 1) -> FlopsReport:
    """Count the operations of a shape, which the report calls `model`. See `flops`."""
    check_work(context, batch_size)
    found, missing = figures(shape, _forms(context, batch_size))
    if not any(isinstance(value, int) for value in found.values()):
        raise UserError(f"there are too few sizes to count anything; {missing}, or a MODEL")
    return FlopsReport(model, shape.attention_kind, context, batch_size, **found, missing=missing)


def check_work(context: int, batch_size: int) -> None:
    """Raise a UserError unless both are positive."""
    for name, number in (("--context", context), ("--batch-size", batch_size)):
        if number < 1:
            raise UserError(f"{name} is {number}; give 1 or more")


def _forms(tokens: int, batch: int) -> Mapping[str, Callable[[Shape], Any]]:
    def prompt(shape: Shape) -> int:
        return batch * (tokens * linear(shape) + causal_attention(shape, tokens))

    return {
        **{f"{part}_flops_per_token": form for part, form in LINEAR.items()},
        "linear_flops_per_token": linear,
        "attention_flops_per_layer": lambda shape: batch * pair(shape) * tokens**2,
        "causal_attention_flops_per_layer": lambda shape: (
            batch
            * pair(shape)
            * max(_doubled_pairs(tokens, window) for window in shape.windows[: shape.num_hidden_layers])
            // 2
        ),
        "attention_flops": lambda shape: batch * pair(shape) * tokens**2 * next(shape.need("num_hidden_layers")),
        "causal_attention_flops": lambda shape: batch * causal_attention(shape, tokens),
        "prompt_flops": prompt,
        "decode_flops": lambda shape: batch * decode(shape, tokens),
        "expanded_decode_flops": lambda shape: batch * expanded_decode(shape, tokens) if shape.is_latent else None,
        "training_flops": lambda shape: _TRAINING * prompt(shape),
    }


# Of one token in the linear layers, by part.
LINEAR: Mapping[str, Callable[[Shape], int]] = {
    "q": lambda shape: 2 * shape.q_weights(),
    "kv": lambda shape: 2 * shape.kv_weights(),
    "o": lambda shape: 2 * shape.o_weights(),
    "mlp": lambda shape: 2 * shape.mlp_weights(active=True),
    "head": lambda shape: 2 * shape.head_weights(),
}


def linear(shape: Shape) -> int:
    """Of one token in all linear layers."""
    return sum(form(shape) for form in LINEAR.values())


def pair(shape: Shape) -> int:
    """Of one query token with one key token in one layer: 2 H (d_q + d_v)."""
    (heads,) = shape.need("num_attention_heads")
    return 2 * heads * sum(shape.head_widths())


def causal_attention(shape: Shape, tokens: int) -> int:
    """Of T tokens with those before them over all layers, as if half of a token saw itself: T^2 / 2 pairs."""
    doubled = sum(layers * _doubled_pairs(tokens, window) for window, layers in shape.layer_windows().items())
    return pair(shape) * doubled // 2  # `pair` is even


def _doubled_pairs(tokens: int, window: int | None) -> int:
    """Twice the pairs of a layer's tokens that a causal mask leaves: T^2, or 2 T W - W^2 within a window."""
    return tokens**2 if window is None or window >= tokens else 2 * tokens * window - window**2


def decode(shape: Shape, cached: int) -> int:
    """Of one new token that sees `cached` ones, itself included: over keys and values, or absorbed over latents.

    Absorbed, each head meets r + p numbers of a token for its logit, and r for what it attends to; expanding the
    query and that is the work of expanding one latent (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    """
    each = pair(shape)
    if shape.is_latent:
        rank, rope, heads = shape.need("kv_lora_rank", "qk_rope_head_dim", "num_attention_heads")
        each = 2 * heads * (2 * rank + rope)
    return linear(shape) + each * _seen(shape, cached)


def expanded_decode(shape: Shape, cached: int) -> int:
    """Of one new token where MLA expands every latent that it sees into the keys and values of all heads."""
    up = 2 * shape.up_weights()
    layers, seen = next(shape.need("num_hidden_layers")), _seen(shape, cached)
    return linear(shape) - up + (up // layers + pair(shape)) * seen


def _seen(shape: Shape, cached: int) -> int:
    """Tokens that a query sees, summed over layers."""
    return sum(
        layers * (cached if window is None else min(cached, window)) for window, layers in shape.layer_windows().items()
    )
