"""What an engine says of tokens, against what transformers says: figures, and whether they pass.

Legend: T positions of the prompt that predict one of its tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...common.errors import CheckFailed


@dataclass(frozen=True)
class Answer:
    """What a driver writes.

    Attributes:
        version: of the engine.
        tokens: new tokens [N]: its own greedy ones.
        prompt: log-probabilities [T, V].
        decode: log-probabilities [N, V], after the engine's own tokens so far.
        cached: elements that it caches for one token in one layer.
    """

    version: str
    tokens: np.ndarray
    prompt: np.ndarray
    decode: np.ndarray
    cached: float


@dataclass(frozen=True)
class Tolerance:
    """The largest log-probability difference of a right result, and the equal greedy tokens it has at least."""

    difference: float
    greedy: int


@dataclass(frozen=True)
class Figures:
    """How far an engine is from transformers.

    Attributes:
        version: of the engine.
        reference: the release of transformers.
        prompt: largest log-probability difference over the prompt's positions and all tokens.
        decode: the same over decoding.
        greedy: how many greedy tokens are equal before the first that is not.
        new_tokens: of how many.
        cached: elements that the engine caches for one token in one layer.
        expected_cached: what it should, by the config.
    """

    version: str
    reference: str
    prompt: float
    decode: float
    greedy: int
    new_tokens: int
    cached: float
    expected_cached: int


def compare(engine: Answer, reference: Answer, expected_cached: int) -> Figures:
    """Hold an engine's answer against transformers' on the same tokens.

    Raises:
        CheckFailed: the answers are not of one shape.
    """
    for name in ("prompt", "decode", "tokens"):
        ours, theirs = getattr(engine, name), getattr(reference, name)
        if ours.shape != theirs.shape:
            raise CheckFailed(f"{engine.version} answered {name} of shape {ours.shape}, transformers {theirs.shape}")
    equal = engine.tokens == reference.tokens
    return Figures(
        version=str(engine.version),
        reference=str(reference.version),
        prompt=_largest(engine.prompt, reference.prompt),
        decode=_largest(engine.decode, reference.decode),
        greedy=len(equal) if equal.all() else int(equal.argmin()),
        new_tokens=len(equal),
        cached=round(float(engine.cached), 1),
        expected_cached=expected_cached,
    )


def _largest(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, after each row's probabilities sum to 1: some engines sum them in fp32."""
    rows = np.asarray(ours, np.float64)
    highest = rows.max(-1, keepdims=True)
    total = highest + np.log(np.exp(rows - highest).sum(-1, keepdims=True))
    return float(np.abs(rows - total - theirs).max())


def fault(figures: Figures, tolerance: Tolerance) -> str:
    """What is wrong with a result, or nothing."""
    for name in ("prompt", "decode"):
        if not (difference := getattr(figures, name)) <= tolerance.difference:  # NaN is wrong too
            return f"log-probabilities differ by {difference:.3g} over the {name}, {tolerance.difference:g} are allowed"
    if figures.greedy < tolerance.greedy:
        return f"{figures.greedy} of {figures.new_tokens} greedy tokens are equal, {tolerance.greedy} are asked for"
    if abs(figures.cached - figures.expected_cached) > 0.01 * figures.expected_cached:
        return f"it caches {figures.cached:g} elements a token and layer, the config says {figures.expected_cached}"
    return ""
