"""From the plain form to a checkpoint that stock engines read: an all-dense `DeepseekV3ForCausalLM`.

Everything is exact in real arithmetic but the latent's norm, see `latent_form.NeutralNorm`. What cannot be held exactly
is refused before a tensor is computed; whether a named reader reads the result right is asked of `demands`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...common.errors import UserError
from ...common.kvcache import head_dim
from ..checkpoint import Checkpoint
from ..checks import account
from ..config import from_raw
from ..demands import ENGINES, Violation, check_engine, spelled, violations
from ..families import Family, Promise
from ..headers import FLOATS, TensorInfo, main_dtype
from ..latent_families import DEEPSEEK, PREFIX
from ..latent_form import BLOCK, LARGE_EPS, SMALL_EPS, Form, HeadSizes, NeutralNorm, engine_shape, neutral_scale
from ..source import Source
from ..stream import Output, compute
from .q_lora import Moment, QuerySplit
from .stock_rope import stock_rope
from .stock_tensors import Folding, stock_outputs

_FIXED_EPS = ("transformers", "vllm-transformers")  # readers that have the latent's eps in their code


@dataclass(frozen=True)
class PlainModel:
    """A plain model on disk, or one that is yet to be computed from its source.

    Attributes:
        config: its config.json.
        family: its row of `latent_families.PLAIN`.
        outputs: its tensors. Their `make` should return fp64, as nothing is rounded between it and the stock tensor.
        checkpoint: where the outputs' sources are stored.
        source: the config.json of what it was, or is, made from; None if unknown.
    """

    config: Mapping[str, Any]
    family: Family
    outputs: Sequence[Output]
    checkpoint: Checkpoint
    source: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Stock:
    """The stock form, to be written.

    Attributes:
        config: its config.json, with the `kvfold` block that the inverse reads.
        outputs: its tensors.
        readable_by: every engine whose demands it meets, those that were asked for included.
        warnings: what the engines that were asked for put up with.
    """

    config: dict[str, Any]
    outputs: list[Output]
    readable_by: tuple[str, ...]
    warnings: list[str] = field(default_factory=list)


def plain_model(source: Source) -> PlainModel:
    """A plain checkpoint on disk; attention biases that are all zero count as none.

    Raises:
        UserError: it is not one, or not whole.
    """
    if not source.config.model_type.startswith(PREFIX):
        raise UserError(f"{source.name} is a {source.config.model_type} model, not one in kvfold's plain MLA form")
    stored, raw = source.checkpoint.tensors, source.config.raw
    promised = account(source.family, source.config, stored)
    outputs = [
        Output(name, info.dtype, info.shape, (info,))
        for name, info in stored.items()
        if promised[name].weight.rule != "drop"
    ]
    plain = PlainModel(raw, source.family, outputs, source.checkpoint, (raw.get(BLOCK) or {}).get("source"))
    return without_zero_biases(plain)


def export(
    plain: PlainModel,
    *,
    readers: Sequence[str] = ("transformers",),
    q_rank: int | None = None,
    query_moment: Moment | None = None,
    pad: bool = False,
    large_eps: bool | None = None,
    dtype: str | None = None,
    latent_sizes: Sequence[float] | None = None,
) -> Stock:
    """Plan the stock form of a plain model; its tensors are computed when they are written.

    Args:
        readers: the engines that must read it right, of `demands.ENGINES`.
        q_rank: a smaller rank for queries, which loses some of them. Without it they stay exact; where a reader or a
            bias demands a rank, it is the hidden size (plus one).
        query_moment: with `q_rank`, what inputs to lose least of; white ones if None.
        pad: to a shape that serving kernels take, see `latent_form.ENGINE_SHAPES`.
        large_eps: scale the residual stream up instead of down, so that the weights survive float16 and Q8_0.
            transformers cannot read that; by default it is done for llama.cpp alone.
        dtype: of the result's tensors; the plain ones' own if None.
        latent_sizes: for every layer the mean of c^2 over tokens and the latent's elements; if None, the largest that
            the weights allow, which reads them.

    Raises:
        UserError: the stock form cannot hold the model, or one of `readers` would not read it right.
    """
    readers = tuple(dict.fromkeys(readers))
    for reader in readers:
        check_engine(reader)
    norm = _norm(readers, large_eps)
    config, tensors = from_raw(deepcopy(dict(plain.config))), _by_template(plain)
    _check_family(plain, config)
    sizes, layers = HeadSizes.of(plain.config), config.num_hidden_layers
    stock = engine_shape(sizes) if pad else sizes
    rope = stock_rope(plain.family, config, config.rope_frequencies, sizes.rope, stock.rope)
    if latent_sizes is None:
        latent_sizes = [_largest_latent(tensors, plain.checkpoint, layer, sizes.rank) for layer in range(layers)]
    if len(latent_sizes) != layers:
        raise UserError(f"{len(latent_sizes)} latent sizes for {layers} layers; give one for each")
    declared = _declared_dtype(plain, tensors)
    form = Form(
        heads=config.num_attention_heads,
        plain=sizes,
        stock=stock,
        softmax_scale=head_dim(config) ** -0.5,
        source_eps=config.rms_norm_eps,
        eps=norm.eps,
        latent_scales=tuple(neutral_scale(size, norm) for size in latent_sizes),
        tied_head="lm_head.weight" not in tensors,
        dtype=declared if dtype and dtype != declared else None,
    )
    written = _stock_config(config, form, rope, config.mla_bias, dtype or FLOATS[main_dtype(tensors.values())])
    rank = _query_rank(config, plain, written, readers, q_rank)
    if rank:
        sizes_in = [_largest_input(tensors, plain, layer, rank, config) for layer in range(layers)]
        form = replace(form, query_rank=rank, query_scales=tuple(neutral_scale(size, norm) for size in sizes_in))
        written["q_lora_rank"] = rank
    source = plain.source or (plain.config.get(BLOCK) or {}).get("source")
    written[BLOCK] = form.block(written, plain.config, source, readers)
    still = frozenset(layer for layer, kept in enumerate(config.rope_frequencies) if not kept)
    outputs = stock_outputs(written, tensors, Folding(form, QuerySplit(q_rank, query_moment), still), dtype)
    readable_by, warnings = _ask(written, outputs, readers)
    if norm is LARGE_EPS:
        warnings.append("the large-eps form is for llama.cpp alone: transformers loads it, and computes another model")
    return Stock(written, outputs, readable_by, warnings)


def _norm(readers: Sequence[str], large_eps: bool | None) -> NeutralNorm:
    if large_eps is None:
        large_eps = set(readers) == {"llama.cpp"}
    if large_eps and (fixed := [reader for reader in readers if reader in _FIXED_EPS]):
        raise UserError(
            f"{fixed[0]} has the latent's eps in its code and cannot read the large-eps form; give --for llama.cpp, or "
            "leave --large-eps out"
        )
    return LARGE_EPS if large_eps else SMALL_EPS


def _check_family(plain: PlainModel, config: Any) -> None:
    """Refuse what is not in the weights' names but in the way.

    Raises:
        UserError: names it.
    """
    row = plain.family
    if row.latent != "stock":
        raise UserError(f"{row.name} has {row.norm} norms where the stock form has RMSNorm; only --form plain holds it")
    if not config.rms_norm_eps > 0:
        raise UserError(f"rms_norm_eps is {config.rms_norm_eps:g}, which no scale turns into another; use --form plain")
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    window = getattr(config, "sliding_window", None) if windowed else None
    if window is not None and window < config.max_position_embeddings:
        raise UserError(f"sliding_window is {window}, but the stock form attends to everything; use --form plain")


def _by_template(plain: PlainModel) -> dict[str, Output]:
    """The plain tensors by their names in the family's table, whatever prefix they are stored with."""
    config = from_raw(deepcopy(dict(plain.config)))
    promised = plain.family.promises(config, [out.name for out in plain.outputs])
    return {_full_name(promised[out.name]): out for out in plain.outputs}


def _full_name(promise: Promise) -> str:
    return promise.weight.template.format(**promise.slots)


def without_zero_biases(plain: PlainModel) -> PlainModel:
    """The same model without attention biases, if all of them are zero, for engines that hold none; reads them."""
    biases = [out for out in plain.outputs if ".self_attn." in out.name and out.name.endswith(".bias")]
    if not biases or any(bool(compute(out, plain.checkpoint).any()) for out in biases):
        return plain
    return replace(
        plain,
        config={**plain.config, "mla_bias": False},
        outputs=[out for out in plain.outputs if out not in biases],
    )


def _largest_latent(tensors: Mapping[str, Output], checkpoint: Checkpoint, layer: int, rank: int) -> float:
    """The largest mean square that a layer's latent can have, whatever the text: `|A g x + b|^2 / r`, `|x|^2 <= D`."""
    prefix = f"model.layers.{layer}."

    def read(name: str) -> Tensor:
        return compute(tensors[prefix + name], checkpoint).double()

    rows = read("self_attn.kv_a_proj_with_mqa.weight")[:rank] * read("input_layernorm.weight")
    largest = torch.linalg.eigvalsh(rows @ rows.T)[-1].clamp(min=0)  # the spectral norm's square
    length = (largest * rows.shape[1]).sqrt()
    if prefix + (name := "self_attn.kv_a_proj_with_mqa.bias") in tensors:
        length = length + read(name)[:rank].norm()
    return float(length**2 / rank)


def _largest_input(tensors: Mapping[str, Output], plain: PlainModel, layer: int, rank: int, config: Any) -> float:
    """The largest mean square that the query's latent can have, which is no longer than `[x; 1]`."""
    gain = compute(tensors[f"model.layers.{layer}.input_layernorm.weight"], plain.checkpoint).double()
    return float((config.hidden_size * gain.square().max() + 1) / rank)


def _query_rank(
    config: Any, plain: PlainModel, written: Mapping[str, Any], readers: Sequence[str], asked: int | None
) -> int | None:
    """The rank of the query's latent, or None where queries need none.

    Raises:
        UserError: the rank that was asked for is no rank of queries.
    """
    biased, sizes = config.mla_bias, HeadSizes.of(plain.config)
    exact = config.hidden_size + bool(biased)
    if asked is not None:
        most = min(exact, config.num_attention_heads * (sizes.nope + sizes.rope))
        if not 1 <= asked <= most:
            raise UserError(f"a query rank of {asked} is not possible; give 1 to {most}, or leave --q-rank out")
        return asked
    demanded = any(
        violation.topic == "query rank" for reader in readers for violation in violations(written, {}, reader)
    )
    return exact if biased or demanded else None


# What the stock form says in its source's words.
_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "max_position_embeddings", "initializer_range", "use_cache", "attention_dropout", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


def _stock_config(config: Any, form: Form, rope: Mapping[str, Any], biased: bool, dtype: str) -> dict[str, Any]:
    """The config.json, every value said: readers differ in what they take for an unsaid one."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": DEEPSEEK.name,
        **{key: getattr(config, key) for key in _SAME},
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": None,
        **form.stock.as_config(),
        "attention_bias": biased,
        "rms_norm_eps": form.eps,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": dict(rope),
        "rope_interleave": True,
        "tie_word_embeddings": False,
        # No layer has experts, but readers want to know of them.
        "first_k_dense_replace": config.num_hidden_layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": config.intermediate_size,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "dtype": dtype,
    }


def _declared_dtype(plain: PlainModel, tensors: Mapping[str, Output]) -> str:
    """What the plain model says that it is in: its tensors may be wider, as those are that training has left."""
    return plain.config.get("dtype") or plain.config.get("torch_dtype") or FLOATS[main_dtype(tensors.values())]


def _ask(
    config: Mapping[str, Any], outputs: Sequence[Output], readers: Sequence[str]
) -> tuple[tuple[str, ...], list[str]]:
    """Hold the result against every engine's demands.

    Raises:
        UserError: one that was asked for would not read it right; names the first reason, and who would.
    """
    tensors = {out.name: TensorInfo(out.name, out.dtype, out.shape, "") for out in outputs}
    said: dict[str, list[Violation]] = {engine: violations(config, tensors, engine) for engine in ENGINES}
    refused = {engine: found[0] for engine, found in said.items() if any(one.severity == "refuse" for one in found)}
    readable_by = tuple(engine for engine in ENGINES if engine not in refused)
    for reader in readers:
        if violation := refused.get(reader):
            others = f"; readable by: {', '.join(readable_by)}" if readable_by else ""
            raise UserError(f"{reader} would not read it right: {violation.wrong}; {violation.mend}{others}")
    # What it caches is said of the result, whoever reads it.
    return readable_by, spelled(one for reader in readers for one in said[reader] if one.topic != "cache")
