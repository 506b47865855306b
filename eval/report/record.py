"""What a report holds: the fields are the keys of `report.json`, and all that the page shows.

A figure that was not measured, or is not finite, is None.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ...common.protocol import Protocol
from ..speed.record import SpeedReport

FORMAT = "kvfold report"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Verdict:
    """What to make of it all.

    Attributes:
        text: a sentence, with others where there is reason to doubt it.
        best: name of the result with the smallest cache among those within `max_ratio`; without one, of that with the
            lowest perplexity; None where no result has a perplexity.
        within: whether `best` is within `max_ratio`.
        max_ratio: the perplexity, as a multiple of the source's, up to which a result will do.
        next: what to do now.
        command: a command line for it, if there is one.
    """

    text: str
    best: str | None
    within: bool
    max_ratio: float
    next: str
    command: str


@dataclass(frozen=True)
class Result:
    """One model; the source comes first.

    Attributes:
        model: as the user named it.
        name: short, and unlike all others.
        attention_kind: MHA, GQA, MQA or MLA.
        num_key_value_heads: None where a latent is cached; `kv_lora_rank` and `qk_rope_head_dim` where heads are.
        parameters: of the whole model.
        kv_elements_per_token_per_layer: by the config.
        kv_bytes_per_token: by the config, over all layers, in `kv_dtype`.
        kv_ratio: `kv_bytes_per_token` over the source's; stored in the source's dtype, it would be `kv_elements_ratio`.
        kv_elements_ratio: elements a token and layer, over the source's: what `--kv-ratio` of a conversion asks for.
        kv_dtype: of the checkpoint, hence of its cache.
        kv_bytes: of one sequence of `Report.cache_context` tokens, by the config; `measured_kv_bytes` were found in its
            cache.
        perplexity, loss, kl, top1_agreement, layer_errors, first_bad_layer: see `convert.verify`; those that compare
            with the source are None for the source.
        perplexity_ratio: over the source's.
        passed: whether it predicts better than guessing would, the source as well; `reason` says why not.
        verdict: see `verdict.LEVELS`.
        pareto: whether no other model has both a lower perplexity and a smaller cache, or one of them and as good the
            other.
        made_by: what kvfold recorded of how it was made, oldest step first; empty where it did not make it.
    """

    model: str
    name: str
    attention_kind: str
    num_key_value_heads: int | None
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    parameters: int
    kv_elements_per_token_per_layer: int
    kv_bytes_per_token: int
    kv_ratio: float
    kv_elements_ratio: float
    kv_dtype: str
    kv_bytes: int
    measured_kv_bytes: int
    perplexity: float | None
    perplexity_ratio: float | None
    loss: float | None
    kl: float | None = None
    top1_agreement: float | None = None
    layer_errors: list[float | None] = field(default_factory=list)
    first_bad_layer: int | None = None
    passed: bool = True
    reason: str = ""
    verdict: str = ""
    pareto: bool = False
    made_by: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Growth:
    """Bytes that one sequence of each length keeps cached over all layers, by the config."""

    model: str
    kv_bytes: list[int]


@dataclass(frozen=True)
class CacheGrowth:
    """How caches grow: one `Growth` a model, at the same `contexts` (tokens)."""

    contexts: list[int]
    results: list[Growth]


@dataclass(frozen=True)
class HeldOut:
    """The loss (nats a token) on one held-out text after so many tokens of uptraining; `reference` is what it is
    compared with, usually the source's."""

    text: str
    tokens: list[int]
    loss: list[float | None]
    reference: float | None


@dataclass(frozen=True)
class Uptraining:
    """How one result was healed.

    Attributes:
        model: name of the result.
        run: the folder that the figures were found in.
        tokens: read when each training loss was taken.
        training_loss: cross entropy of training text in nats a token, each a mean over `steps_averaged` steps.
        held_out: one for each held-out text.
    """

    model: str
    run: str
    steps_averaged: int
    tokens: list[int]
    training_loss: list[float]
    held_out: list[HeldOut]


@dataclass(frozen=True)
class Report:
    """How conversions of one model compare.

    Attributes:
        format, format_version: by which `--overwrite` knows what it may replace.
        title: stands above the page.
        model: the source.
        tokens: that were predicted, in so many `windows`.
        cache_context: tokens at which caches were sized and measured.
        speed: see `eval.speed`, with models by their names; None where it was not measured.
        uptraining: of the results that were healed and whose runs were found.
        commands: that give the same figures again.
        warnings: what to know before trusting them.
    """

    title: str
    model: str
    kvfold_version: str
    verdict: Verdict
    protocol: Protocol
    tokens: int
    windows: int
    cache_context: int
    results: list[Result]
    cache_growth: CacheGrowth
    speed: SpeedReport | None = None
    uptraining: list[Uptraining] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    format: str = FORMAT
    format_version: int = FORMAT_VERSION

    @property
    def source(self) -> Result:
        return self.results[0]

    @property
    def best(self) -> Result | None:
        return next((row for row in self.results if row.name == self.verdict.best), None)


def chart_keys(uptrainings: int) -> list[str]:
    """The charts that a report of so many uptrainings may have, by the names of their files."""
    return ["trade-off", "cache", "layers", "speed", *(f"uptraining-{number}" for number in range(uptrainings))]


def to_json(report: Report) -> dict[str, Any]:
    """The report as `report.json` holds it."""
    return json.loads(json.dumps(asdict(report), allow_nan=False))


def leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, text, truth value and None of plain data, by its dotted path, such as `results.2.perplexity`."""
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    else:
        yield prefix, data
        return
    for key, value in items:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
