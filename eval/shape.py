"""The sizes of a decoder that closed forms are made of: read from a config, given one by one, or both.

Nothing here needs weights; with sizes alone, it needs neither torch nor transformers.

Legend: L layers, D hidden size, H query heads, G key/value heads, d head dimension, I MLP width, N vocabulary;
E experts of width M; of multi-head latent attention r = kv_lora_rank, p = qk_rope_head_dim, n = qk_nope_head_dim,
v = v_head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..common.kvcache import attention_kind, cached_tokens, head_dim, num_attention_heads, num_key_value_heads
from ..common.sources import one_line_errors, quiet, read_config, source_kind
from ..convert.families import Family, Sizes, Weight
from ..convert.latent_families import DEEPSEEK, KNOWN, PREFIX

_ENDLESS = 2**62  # tokens; more than any window
# Types whose tensors are those of another type's row.
_ROWS: Mapping[str, Family] = {**KNOWN, "deepseek_v2": DEEPSEEK}
# Families whose MLP has one projection up and one down; all others have a gate beside.
_UNGATED = frozenset({"phi", "starcoder2", "gpt2", "gpt_bigcode"})


def _passed_over(config: Any) -> int:
    """Layers without experts, where every so-manieth has them but for those that are named."""
    layers, step = config.num_hidden_layers, getattr(config, "decoder_sparse_step", None) or 1
    named = {i for i in getattr(config, "mlp_only_layers", None) or () if 0 <= i < layers and (i + 1) % step == 0}
    return layers - layers // step + len(named)


# Families with experts -> how many of their layers have a dense MLP all the same.
_DENSE_LAYERS: Mapping[str, Callable[[Any], int]] = {
    "mixtral": lambda config: 0,
    "qwen3_moe": _passed_over,
    "deepseek_v2": lambda config: config.first_k_dense_replace,
    "deepseek_v3": lambda config: config.first_k_dense_replace,
}
# Makes the tables list the experts of a layer as one tensor.
_FUSED = ("model.layers.0.mlp.experts.gate_up_proj",)
# The slots in the names of a table, and the symbol that says how many tensors there are.
_REPEATED = {"{layer}": "L", "{head}": "H", "{kv_head}": "G"}


class Missing(UserError):
    """A figure needs a size that neither a config nor a flag says. `name` is the size's."""

    def __init__(self, name: str):
        super().__init__(f"give {flag(name)}")
        self.name = name


def flag(name: str) -> str:
    """What a size is called on the command line."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder; None is not known. By default it is a Llama: a gated MLP, and a head of its own.

    Attributes:
        hidden_size ... q_lora_rank: as in the field's configs; a `kv_lora_rank` makes the attention MLA.
        tie_word_embeddings: whether the head is the embedding.
        gated_mlp: whether the MLP has three matrices, or two.
        num_experts: of a sparse layer (E); 0 where all layers are dense.
        num_experts_per_tok: of them, those that a token visits.
        moe_intermediate_size: the width of an expert (M).
        n_shared_experts: experts that every token visits besides.
        dense_layers: how many layers are dense although there are experts.
        windows: of each layer the tokens that a query sees, itself included, and None for all of them; comes round
            again where there are more layers.
        other_parameters: elements of norms, biases and learned positions; None counts Llama's norms, (2 L + 1) D.
        untold: why nothing is known of what surrounds the cache; empty if it is known.
    """

    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    q_lora_rank: int | None = None
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    num_experts: int = 0
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    n_shared_experts: int = 0
    dense_layers: int = 0
    windows: tuple[int | None, ...] = (None,)
    other_parameters: int | None = None
    untold: str = ""

    def need(self, *names: str) -> Iterator[int]:
        """The sizes of these names.

        Raises:
            Missing: one of them is not known.
        """
        for name in names:
            if (size := getattr(self, name)) is None:
                raise Missing(name)
            yield size

    def _told(self) -> None:
        if self.untold:
            raise UserError(self.untold)

    @property
    def is_latent(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def attention_kind(self) -> str | None:
        """`MHA`, `GQA`, `MQA` or `MLA`; see `common.kvcache.attention_kind`."""
        if self.is_latent:
            return "MLA"
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads is None or kv_heads is None:
            return None
        return "MHA" if heads == kv_heads else "MQA" if kv_heads == 1 else "GQA"

    def layer_windows(self) -> dict[int | None, int]:
        """How many of the L layers see what; see `windows`."""
        (layers,) = self.need("num_hidden_layers")
        rounds, rest = divmod(layers, len(self.windows))  # not layer by layer: a user may say 10^15 of them
        found: dict[int | None, int] = {}
        for i, window in enumerate(self.windows[:layers]):
            found[window] = found.get(window, 0) + rounds + (i < rest)
        return found

    def kv_elements(self) -> int:
        """Numbers that a token caches in a layer: 2 G d, or r + p; as `common.kvcache.kv_elements`."""
        if self.is_latent:
            return sum(self.need("kv_lora_rank", "qk_rope_head_dim"))
        return 2 * math.prod(self.need("num_key_value_heads", "head_dim"))

    def cached_tokens(self, context: int) -> int:
        """Tokens held after `context` of them, summed over layers; a window keeps one less than it sees."""
        return sum(
            layers * (context if window is None else min(context, window - 1))
            for window, layers in self.layer_windows().items()
        )

    def head_widths(self) -> tuple[int, int]:
        """Coordinates of a query (and key) head and of a value head: d and d, or n + p and v."""
        if self.is_latent:
            nope, rope, value = self.need("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            return nope + rope, value
        (width,) = self.need("head_dim")
        return width, width

    # Elements of the matrices that a token is multiplied by, over all layers.

    def q_weights(self) -> int:
        """Of the query projections: D H d, or by way of a rank."""
        self._told()
        layers, hidden, heads = self.need("num_hidden_layers", "hidden_size", "num_attention_heads")
        query = heads * self.head_widths()[0]
        rank = self.q_lora_rank if self.is_latent else None
        return layers * (hidden * query if rank is None else rank * (hidden + query))

    def kv_weights(self) -> int:
        """Of the key and value projections: 2 D G d, or D (r + p) and what expands latents."""
        self._told()
        layers, hidden = self.need("num_hidden_layers", "hidden_size")
        return layers * hidden * self.kv_elements() + (self.up_weights() if self.is_latent else 0)

    def up_weights(self) -> int:
        """Of what expands a latent to the keys and values of all heads: r H (n + v)."""
        names = ("num_hidden_layers", "kv_lora_rank", "num_attention_heads", "qk_nope_head_dim", "v_head_dim")
        layers, rank, heads, nope, value = self.need(*names)
        return layers * rank * heads * (nope + value)

    def o_weights(self) -> int:
        """Of the output projections: H d D, or H v D."""
        self._told()
        layers, hidden, heads = self.need("num_hidden_layers", "hidden_size", "num_attention_heads")
        return layers * hidden * heads * self.head_widths()[1]

    def mlp_weights(self, *, active: bool) -> int:
        """Of the MLPs, 3 D I or 2 D I a layer, with experts and the choice between them, E D.

        Args:
            active: count the experts that a token visits only.
        """
        self._told()
        layers, hidden = self.need("num_hidden_layers", "hidden_size")
        matrices = 3 if self.gated_mlp else 2
        dense = min(self.dense_layers, layers) if self.num_experts else layers
        elements = dense and dense * matrices * hidden * next(self.need("intermediate_size"))
        if sparse := layers - dense:
            visited, width = self.need("num_experts_per_tok", "moe_intermediate_size")
            experts = (visited if active else self.num_experts) + self.n_shared_experts
            elements += sparse * hidden * (matrices * experts * width + self.num_experts)
        return elements

    def head_weights(self) -> int:
        """Of the output head: D N."""
        self._told()
        return math.prod(self.need("hidden_size", "vocab_size"))

    def parameters(self) -> int:
        """All weights, a tied head once; experts all of them. The table of a family counts norms and biases."""
        others = self.other_parameters
        if others is None:
            layers, hidden = self.need("num_hidden_layers", "hidden_size")
            others = (2 * layers + 1) * hidden
        attention = self.q_weights() + self.kv_weights() + self.o_weights()
        embeddings = self.head_weights() * (1 if self.tie_word_embeddings else 2)
        return attention + self.mlp_weights(active=False) + embeddings + others


# The sizes that a user may give.
GIVEN = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
    "tie_word_embeddings", "gated_mlp", "num_experts_per_tok",
)  # fmt: skip
# What the config of every decoder says.
_NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")
# Those that only latent attention has, and those that it has not.
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
_HEADS = ("num_key_value_heads", "head_dim")


def read_any_config(model: str | Path, revision: str | None = None) -> Any:
    """The transformers config of a MODEL: a directory (which needs no weights), a GGUF file or a Hub id.

    Raises:
        UserError: nothing is there, or it is no checkpoint.
        EnvironmentFailure: the Hub cannot be reached.
    """
    model = str(model)
    kind = source_kind(model, revision)
    if kind == "folder":
        return read_config(Path(model))
    if kind == "gguf":
        from ..convert.gguf import read_gguf_config

        return read_gguf_config(Path(model))
    from huggingface_hub import hf_hub_download

    with one_line_errors(model), quiet():
        return read_config(Path(hf_hub_download(model, "config.json", revision=revision)).parent)


def shape_of(config: Any | None, given: Mapping[str, Any]) -> Shape:
    """The shape that a config describes, where there is one, with the sizes that are given in place of its own.

    A size that is given changes no other one that the config says; those that it leaves to be worked out, such as the
    head dimension of many families, follow. A pattern of windows goes on in further layers. A latent rank given to a
    config without one makes kvfold's plain form of it, with n = v = d.

    Args:
        config: of transformers.
        given: names of `GIVEN` with their values; None counts as not given.

    Raises:
        UserError: the config is not a decoder's, or the sizes contradict each other.
        TypeError: a name is not one of `GIVEN`.
    """
    if unknown := set(given) - set(GIVEN):
        raise TypeError(f"unknown size {min(unknown)}; known: {', '.join(GIVEN)}")
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if value < 1 and not isinstance(value, bool):
            raise UserError(f"{flag(name)} is {value}; give 1 or more")
    shape = Shape()
    if config is not None:
        with one_line_errors(f"the config of a {config.model_type} model"):  # there are configs of every kind
            shape = _of_config(config, given)
    shape = replace(shape, **given)
    if shape.is_latent:
        for name in _HEADS:
            if name in given:
                raise UserError(
                    f"{flag(name)} {given[name]} says nothing of a model that caches latents "
                    f"(--kv-lora-rank {shape.kv_lora_rank}); leave it out"
                )
    elif latent := [name for name in given if name in _LATENT]:
        raise UserError(f"{flag(latent[0])} is a size of latent attention; give --kv-lora-rank too")
    return shape if shape.is_latent else _with_heads(shape)


def _with_heads(shape: Shape) -> Shape:
    """Fill in as many KV heads as query heads, and heads that share the hidden size."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    shape = replace(shape, num_key_value_heads=shape.num_key_value_heads or heads)
    if heads and shape.num_key_value_heads and heads % shape.num_key_value_heads:
        raise UserError(
            f"{heads} query heads cannot share {shape.num_key_value_heads} KV heads evenly; "
            f"give a --num-key-value-heads that divides {heads}"
        )
    if shape.head_dim is None and hidden and heads:
        if hidden % heads:
            raise UserError(f"a hidden size of {hidden} does not divide among {heads} heads; give --head-dim")
        shape = replace(shape, head_dim=hidden // heads)
    return shape


def _of_config(config: Any, given: Mapping[str, Any]) -> Shape:
    """What a config says once given sizes are put in. Of a type without a table it is what concerns the cache only."""
    source = config.get_text_config(decoder=True)
    if missing := [name for name in _NEEDED if getattr(source, name, None) is None]:
        raise UserError(f"a {config.model_type} model is not a decoder of text (no {missing[0]} in its config)")
    kind = source.model_type
    if "num_attention_heads" in given and kind in _ROWS and getattr(source, "multi_query", None) is False:
        given = {"num_key_value_heads": given["num_attention_heads"], **given}  # its class says so, once and for all
    text = _put(source, given)
    latent = attention_kind(text) == "MLA"
    if latent and attention_kind(source) != "MLA":
        text, kind = _plain(text, given), PREFIX + kind
    shape = Shape(
        hidden_size=text.hidden_size,
        num_hidden_layers=text.num_hidden_layers,
        num_attention_heads=num_attention_heads(text),
        num_key_value_heads=None if latent else num_key_value_heads(text),
        head_dim=None if latent else getattr(text, "head_dim", None) or None,
        vocab_size=text.vocab_size,
        kv_lora_rank=text.kv_lora_rank if latent else None,
        **{name: getattr(text, name, None) if latent else None for name in _LATENT},
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        windows=_windows(source),
    )
    if (row := _ROWS.get(kind)) is None:
        what = "latent form" if kind != source.model_type else "table"
        why = f"kvfold has no {what} of {source.model_type} models, so no more than the cache is known"
        return replace(shape, untold=f"{why}; give all sizes by hand, without MODEL")
    known = not latent or None not in (shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim)
    return replace(
        shape,
        intermediate_size=Sizes(text)["I"],
        gated_mlp=kind.removeprefix(PREFIX) not in _UNGATED,
        other_parameters=_others(row, text, given.get("num_key_value_heads")) if known else None,
        **_experts(kind, text),
    )


def _put(config: Any, sizes: Mapping[str, Any]) -> Any:
    """A copy of a config that says these sizes. One that its class works out from others it cannot take."""
    config = deepcopy(config)
    for name, size in sizes.items():
        if not isinstance(getattr(type(config), name, None), property):
            setattr(config, name, size)
    return config


def _plain(config: Any, given: Mapping[str, Any]) -> Any:
    """A copy of a config that was given a latent rank, with what its plain form says besides; see `attention.plain`."""
    width, row = head_dim(config), _ROWS.get(config.model_type)
    biased = row is not None and any(line.template.endswith("self_attn.q_proj.bias") for line in _lines(row, config))
    return _put(config, {"qk_nope_head_dim": width, "v_head_dim": width, "mla_bias": biased, **given})


def _windows(config: Any) -> tuple[int | None, ...]:
    """What layers see, as the shortest pattern that comes round."""
    if getattr(config, "layer_types", None) is None:  # one type for all
        config = _put(config, {"num_hidden_layers": 1})
    held = cached_tokens(config, _ENDLESS)
    windows = tuple(None if tokens == _ENDLESS else tokens + 1 for tokens in held)
    period = next(i for i in range(1, len(windows) + 1) if windows[i:] == windows[:-i])
    return windows[:period]


def _experts(kind: str, config: Any) -> dict[str, Any]:
    """What a config says of its experts; nothing if no layer has any."""
    if kind not in _DENSE_LAYERS or (dense := _DENSE_LAYERS[kind](config)) >= config.num_hidden_layers:
        return {}
    sizes = Sizes(config)
    return {
        "num_experts": sizes["E"],
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": getattr(config, "moe_intermediate_size", None) or sizes["I"],
        "n_shared_experts": getattr(config, "n_shared_experts", None) or 0,
        "dense_layers": dense,
    }


def _others(row: Family, config: Any, kv_heads: int | None) -> int:
    """Elements of what is stored beside matrices that a token is multiplied by: norms, biases, learned positions."""
    sizes, elements = Sizes(config, kv_heads), 0
    for line in _lines(row, config):
        if len(line.shape) == 1 or "norm" in line.template or ("P",) in line.shape:
            tensors = math.prod(sizes[symbol] for slot, symbol in _REPEATED.items() if slot in line.template)
            elements += tensors * math.prod(sum(sizes[term] for term in axis) for axis in line.shape)
    return elements


def _lines(row: Family, config: Any) -> set[Weight]:
    """The lines of a table that hold for a config, found on one layer and one head: there may be 10^15 of them. Those
    that hold for some layers only are matrices, which are not looked for here."""
    one = _put(config, {"num_hidden_layers": 1, "num_attention_heads": 1})
    return {promise.weight for promise in row.promises(one, _FUSED, kv_heads=1).values()}


def figures(shape: Shape, forms: Mapping[str, Callable[[Shape], Any]]) -> tuple[dict[str, Any], str]:
    """Work out closed forms.

    Args:
        forms: by the figure's name.

    Returns:
        The figures, None where a size is not known; and what to give for all of them, empty if there is none.
    """
    found: dict[str, Any] = {}
    missing: set[str] = set()
    reasons: dict[str, None] = {}
    for name, form in forms.items():
        try:
            gaps = _gaps(shape, form)
            found[name] = None if gaps else form(shape)
            missing.update(gaps)
        except UserError as reason:
            found[name] = None
            reasons[str(reason)] = None
    if not shape.is_latent:  # these follow from the others, which are missing too then
        missing.difference_update(_HEADS)
    flags = [flag(name) for name in GIVEN if name in missing]
    return found, "; ".join([*reasons, *([f"give {', '.join(flags)}"] if flags else [])])


def _gaps(shape: Shape, form: Callable[[Shape], Any]) -> list[str]:
    """The sizes that a form is missing."""
    gaps: list[str] = []
    while True:
        try:
            form(shape)
        except Missing as gap:  # fill it with anything, to hear of the next one
            gaps.append(gap.name)
            shape = replace(shape, **{gap.name: 1})
        else:
            return gaps
