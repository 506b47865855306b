"""What a plain model and its stock form differ in: sizes and factors, one set for both directions.

The stock form is DeepSeek-V3's (arXiv 2412.19437) as engines read it. It normalises latents, has one rotary series, a
softmax scale of its own, and one eps for all norms. Every factor here undoes one of these; `folds` applies them,
`inverse` takes them back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.errors import UserError

BLOCK = "kvfold"  # the key of config.json under which all of this stands
FORMAT_VERSION = 1


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of latent attention: rank r, and n, d_r and v of a head."""

    rank: int
    nope: int
    rope: int
    value: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> HeadSizes:
        return cls(*(config[key] for key in _KEYS))

    def as_config(self) -> dict[str, int]:
        return dict(zip(_KEYS, (self.rank, self.nope, self.rope, self.value), strict=True))

    def holds(self, other: HeadSizes) -> bool:
        return all(ours >= theirs for ours, theirs in zip(self._all, other._all, strict=True))

    @property
    def _all(self) -> tuple[int, ...]:
        return (self.rank, self.nope, self.rope, self.value)


_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

# The shapes that serving kernels take (vLLM: 512 + 64 cached, and these heads), smallest first.
ENGINE_SHAPES = (HeadSizes(512, 64, 64, 128), HeadSizes(512, 128, 64, 128), HeadSizes(512, 192, 64, 256))


def engine_shape(sizes: HeadSizes) -> HeadSizes:
    """The smallest of `ENGINE_SHAPES` that holds these sizes.

    Raises:
        UserError: none does.
    """
    for shape in ENGINE_SHAPES:
        if shape.holds(sizes):
            return shape
    largest = ENGINE_SHAPES[-1]
    names = ("rank", "nope", "rope", "value")
    over = (f"{name} {getattr(sizes, name)} > {getattr(largest, name)}" for name in names)
    over = [text for text, name in zip(over, names, strict=True) if getattr(sizes, name) > getattr(largest, name)]
    raise UserError(f"no engine's shape holds {', '.join(over)}; choose smaller sizes, or leave --pad-to-engine out")


@dataclass(frozen=True)
class NeutralNorm:
    """How the mandatory norm of a latent is made to do nothing but multiply: `x rsqrt(mean(x^2) + eps)` is nearly
    `x / sqrt(eps)` for small x.

    Attributes:
        eps: of every norm of the stock form.
        error: the relative change of a latent of mean size that is allowed.
        largest: the largest factor for latents, however small they are: tokens differ from their mean.
    """

    eps: float
    error: float
    largest: float


# transformers has 1e-6 in its code. The other one keeps small latent rows out of float16's subnormal numbers, and the
# scales of Q8_0's blocks too; its error is below what these formats round.
SMALL_EPS = NeutralNorm(eps=1e-6, error=1e-7, largest=2.0**-20)
LARGE_EPS = NeutralNorm(eps=1.0, error=1e-4, largest=1.0)


def neutral_scale(size: float, norm: NeutralNorm) -> float:
    """The largest power of two s that keeps `s^2 size / (2 eps)`, the norm's relative error, under its bound.

    Args:
        size: the mean of x^2 over a latent's elements, and over tokens.
    """
    if not math.isfinite(size) or size < 0:
        raise UserError(f"a latent's mean square is {size}; it must be a number of at least 0")
    if not size:
        return norm.largest
    bound = math.sqrt(2 * norm.eps * norm.error / size)
    return min(norm.largest, 2.0 ** (math.ceil(math.log2(bound)) - 1))


def neutral_gain(scale: float, eps: float) -> float:
    """The norm's weight: the power of two that brings a latent back to nearly its own size."""
    return 2.0 ** round(math.log2(math.sqrt(eps) / scale))


def after_norm(scale: float, eps: float) -> float:
    """What the projection behind a neutral norm has to be multiplied by; within a factor of 1.42 from 1."""
    return math.sqrt(eps) / (scale * neutral_gain(scale, eps))


def logit_factor(softmax_scale: float, stock: HeadSizes) -> float:
    """What queries are multiplied by, as the stock form divides logits by sqrt(n + d_r) of its own sizes."""
    return softmax_scale * math.sqrt(stock.nope + stock.rope)


def residual_factor(source_eps: float, eps: float) -> float:
    """What the residual stream is multiplied by, so that norms with `eps` do what those with `source_eps` did:
    `RMSNorm_eps(a x) = RMSNorm_{eps / a^2}(x)`."""
    return math.sqrt(eps / source_eps)


@dataclass(frozen=True)
class Form:
    """How a plain model became its stock form.

    Attributes:
        heads: query heads, H.
        plain, stock: sizes before and after padding.
        softmax_scale: what the plain form multiplies logits by.
        source_eps: of the plain form's norms.
        eps: of the stock form's.
        latent_scales: what each layer's latents are multiplied by before their norm; powers of two.
        query_rank: the size of the query's latent; None for no such latent.
        query_scales: as `latent_scales`, for the query's latent; empty if it has none.
        tied_head: whether the plain form's head is its embedding.
        dtype: what the plain tensors were, if the stock ones were asked to be something else.
    """

    heads: int
    plain: HeadSizes
    stock: HeadSizes
    softmax_scale: float
    source_eps: float
    eps: float
    latent_scales: tuple[float, ...]
    query_rank: int | None = None
    query_scales: tuple[float, ...] = ()
    tied_head: bool = False
    dtype: str | None = None

    @property
    def logit_factor(self) -> float:
        return logit_factor(self.softmax_scale, self.stock)

    @property
    def residual_factor(self) -> float:
        return residual_factor(self.source_eps, self.eps)

    def block(
        self,
        written: Mapping[str, Any],
        plain: Mapping[str, Any],
        source: Mapping[str, Any] | None,
        readers: Sequence[str],
    ) -> dict:
        """All that the inverse needs, for config.json.

        Args:
            written: the stock form's config.json, which must stay as it is to be read right.
            plain: the plain form's config.json.
            source: the config.json of what it was made from, if known.
            readers: the engines that the export was made for.
        """
        return {
            "format_version": FORMAT_VERSION,
            "form": "deepseek_v3",
            "readers": list(readers),
            "rms_norm_eps": self.source_eps,
            "residual_scale": self.residual_factor,
            "softmax_scale": self.softmax_scale,
            "latent_scale": min(self.latent_scales),
            "latent_scales": list(self.latent_scales),
            "query_scales": list(self.query_scales),
            "tied_head": self.tied_head,
            "dtype": self.dtype,
            "written": {key: value for key, value in written.items() if key not in _FREE},
            "plain": {key: value for key, value in plain.items() if key != BLOCK},
            **source_block(source),
        }

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Form:
        """The form that a stock config.json describes.

        Raises:
            UserError: kvfold did not write it, or a newer kvfold did, or it was damaged.
        """
        block = config.get(BLOCK)
        if not isinstance(block, Mapping) or block.get("form") != "deepseek_v3":
            raise UserError(
                f"config.json has no {BLOCK} block, which says how the model was exported; only exports of kvfold "
                "convert mla --form deepseek_v3 can be turned back"
            )
        if block.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"the {BLOCK} block of config.json has format version {block.get('format_version')}, this kvfold knows "
                f"{FORMAT_VERSION}; update kvfold"
            )
        if edited := edits(config):
            raise UserError(
                f"config.json says {edited[0]} where the export said something else; the weights go with what it said"
            )
        try:
            return cls(
                heads=config["num_attention_heads"],
                plain=HeadSizes.of(block["plain"]),
                stock=HeadSizes.of(config),
                softmax_scale=block["softmax_scale"],
                source_eps=block["rms_norm_eps"],
                eps=config["rms_norm_eps"],
                latent_scales=tuple(block["latent_scales"]),
                query_rank=config["q_lora_rank"],
                query_scales=tuple(block["query_scales"]),
                tied_head=block["tied_head"],
                dtype=block["dtype"],
            )
        except (KeyError, TypeError):
            raise UserError(f"the {BLOCK} block of config.json is damaged; export the model again") from None


def edits(config: Mapping[str, Any]) -> list[str]:
    """What an export's config.json says otherwise than it was written, as `key = value`.

    Each of these would make readers compute another model, most of them without an error.
    """
    block = config.get(BLOCK)
    written = block.get("written") if isinstance(block, Mapping) else None
    if not isinstance(written, Mapping):
        return []
    changed = [key for key, value in written.items() if key in config and not _same(config[key], value)]
    added = [key for key, neutral in _ADDED.items() if key not in written and config.get(key) not in (None, *neutral)]
    return [f"{key} = {config[key]!r}" for key in (*changed, *added)]


def _same(found: Any, written: Any) -> bool:
    """Equal as JSON says it: a float may be spelled with fewer digits, a count may not become one."""
    if isinstance(written, Mapping):
        return (
            isinstance(found, Mapping)
            and found.keys() == written.keys()
            and all(_same(found[key], value) for key, value in written.items())
        )
    if type(written) is float and type(found) in (int, float):
        return math.isclose(found, written, rel_tol=1e-6)
    return type(found) is type(written) and found == written


# Keys that may change, as they decide no number.
_FREE = frozenset(
    {"architectures", "dtype", "initializer_range", "use_cache", "attention_dropout", "max_position_embeddings"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
# Keys that an export does not have, and the values at which they would change nothing.
_ADDED: Mapping[str, tuple[Any, ...]] = {
    "rope_scaling": (),
    "is_causal": (True,),
    "sliding_window": (),
    "partial_rotary_factor": (1,),
    "layer_types": (),
}


def source_block(source: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a `kvfold` block says of the source, by its config.json; nothing if that is unknown."""
    return {"source": {key: value for key, value in source.items() if key not in _NOISE}} if source else {}


def plain_block(source: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `kvfold` block of a plain form's config.json, if its source is known: an export asks for it."""
    said = source_block(source)
    return {BLOCK: {"format_version": FORMAT_VERSION, "form": "plain", **said}} if said else {}


_NOISE = frozenset({"_name_or_path", "transformers_version", BLOCK})
