"""What a checkpoint is, what it caches, and what can be done with it: from config and headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..common.kvcache import (
    attention_kind,
    context_length,
    head_dim,
    kv_bytes,
    kv_bytes_per_token,
    kv_elements,
    num_attention_heads,
    num_key_value_heads,
)
from ..common.sources import one_line_errors, quiet, read_config, source_kind
from .checkpoint import Checkpoint
from .checks import (
    account,
    channel_obstacle,
    kv_head_choices,
    latent_obstacle,
    obstacle,
    one_or_all,
    whole_head_methods,
)
from .demands import source_elements, unpadded
from .families import FAMILIES, Family
from .headers import FLOATS, ITEM_BYTES, TensorInfo, main_dtype
from .latent_families import DEEPSEEK, KNOWN, PREFIX
from .latent_form import BLOCK, Form
from .mla.convert import FORMS

_NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")


@dataclass(frozen=True)
class Conversion:
    """Whether one conversion is possible: to which `kv_heads`, or in which `forms` of MLA, or why not."""

    to: str
    possible: bool
    kv_heads: list[int]
    reason: str
    forms: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class InspectReport:
    """What a checkpoint is. Cache figures are for elements of `kv_element_bytes`: the checkpoint's own dtype, or 16
    bits where its weights are quantised.

    `kv_bytes` is what one sequence of `context` tokens caches over all layers; layers with a sliding window
    keep no more than it.

    Of a model with MLA, `head_dim` is the size of a query, `rotary_dim` the size of the rotary key. If kvfold exported
    it, the `unpadded_` elements are those that it cached before it was padded to an engine's shape, and the `source_`
    ones those of the model that it was made from; `form` is the one that it was given, and `readers` are the engines
    that it was made for. What is about MLA is None for all others.
    """

    model: str
    family: str
    supported: bool
    architecture: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_kind: str
    attention_biases: str
    qk_norm: str
    rope_type: str
    rope_theta: str
    rope_pairing: str
    rotary_dim: int
    nope_layers: int
    sliding_window: int | None
    sliding_layers: int
    tied_head: bool
    dtype: str
    parameters: int
    weight_bytes: int
    max_position_embeddings: int | None
    kv_elements_per_token_per_layer: int
    kv_element_bytes: int
    kv_bytes_per_token: int
    context: int
    kv_bytes: int
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    qk_nope_head_dim: int | None
    v_head_dim: int | None
    q_lora_rank: int | None
    form: str | None
    readers: list[str] | None
    unpadded_kv_elements_per_token_per_layer: int | None
    source_kv_elements_per_token_per_layer: int | None
    conversions: list[Conversion]
    warnings: list[str]


def inspect_model(src: str | Path, *, context: int | None = None, revision: str | None = None) -> InspectReport:
    """Describe a checkpoint, reading its config and headers only.

    Args:
        src: a checkpoint directory, a GGUF file, or a Hub id (whose headers are fetched by range requests).
        context: tokens for `kv_bytes`; the model's own context if None.
        revision: of a Hub repository.

    Raises:
        UserError: nothing is there, or it is not a checkpoint.
        EnvironmentFailure: the Hub cannot be reached.
    """
    src = str(src)
    if context is not None and context < 1:
        raise UserError(f"a context of {context} tokens caches nothing; give a positive number")
    kind = source_kind(src, revision)
    config, tensors = _read_headers(src, kind, revision)
    with one_line_errors(src):  # transformers accepts values of the wrong kind where it does not need them
        return _describe(src, kind, config, tensors, context)


def _describe(src: str, kind: str, config: Any, tensors: list[TensorInfo], context: int | None) -> InspectReport:
    text = config.get_text_config(decoder=True)
    if missing := [name for name in _NEEDED if not hasattr(text, name)]:
        raise UserError(f"{src} is a {config.model_type} model, not a decoder of text (no {missing[0]} in its config)")
    family, latent = _row(config), _latent(config)
    dtype = main_dtype(tensors)
    element_bytes = ITEM_BYTES[dtype] if dtype in FLOATS else 2  # quantised weights, 16-bit cache
    context = context or context_length(config) or 4096
    rope = _rope(text)
    warnings = []
    if latent.source is not None and kv_elements(config) > latent.source:
        warnings.append(
            f"it caches {kv_elements(config)} elements a token and layer, more than the {latent.source} of the model "
            "that it was made from; choose a smaller rank, or leave out --pad-to-engine where the engine allows it"
        )
    window = getattr(text, "sliding_window", None)
    one_kind = "sliding_attention" if window else "full_attention"
    layer_types = getattr(text, "layer_types", None) or [one_kind] * text.num_hidden_layers
    return InspectReport(
        model=src,
        family=config.model_type,
        supported=family is not None,
        architecture=", ".join(config.architectures or []) or "not said",
        num_hidden_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_attention_heads=num_attention_heads(config),
        num_key_value_heads=num_key_value_heads(config),
        head_dim=latent.query or head_dim(config),
        attention_kind=attention_kind(config),
        attention_biases=_attention_biases(tensors),
        qk_norm=_qk_norm(family, config, tensors),
        rope_type=rope.type,
        rope_theta=rope.theta,
        rope_pairing="none" if rope.dim == 0 else family.rope if family else "unknown",
        rotary_dim=rope.dim,
        nope_layers=text.num_hidden_layers if rope.dim == 0 else _still_layers(text),
        sliding_window=window,
        sliding_layers=sum(kind == "sliding_attention" for kind in layer_types),
        tied_head=bool(config.tie_word_embeddings),
        dtype=FLOATS.get(dtype, dtype),
        parameters=sum(info.numel for info in tensors),
        weight_bytes=sum(info.stored_bytes for info in tensors),
        max_position_embeddings=context_length(config),
        kv_elements_per_token_per_layer=kv_elements(config),
        kv_element_bytes=element_bytes,
        kv_bytes_per_token=kv_bytes_per_token(config, element_bytes),
        context=context,
        kv_bytes=kv_bytes(config, context, element_bytes),
        **{name: latent.sizes.get(name) for name in _LATENT},
        form=latent.form,
        readers=latent.readers,
        unpadded_kv_elements_per_token_per_layer=latent.unpadded,
        source_kv_elements_per_token_per_layer=latent.source,
        conversions=conversions(config, tensors, named_as_saved=kind != "gguf"),
        warnings=warnings,
    )


def _row(config: Any) -> Family | None:
    """The family's row; a DeepSeek-V3 model that kvfold did not write may have what its row does not know: experts."""
    row = KNOWN.get(config.model_type)
    return None if row is DEEPSEEK and not getattr(config, BLOCK, None) else row


_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank")


@dataclass(frozen=True)
class _Latent:
    """What is said of MLA: its sizes, those of a query, and what was cached before padding, and by the source; and for
    whom kvfold wrote it in which form."""

    sizes: Mapping[str, int | None] = field(default_factory=dict)
    form: str | None = None
    readers: list[str] | None = None
    query: int | None = None
    unpadded: int | None = None
    source: int | None = None


def _latent(config: Any) -> _Latent:
    text = config.get_text_config(decoder=True)
    if attention_kind(config) != "MLA":
        return _Latent()
    sizes = {name: getattr(text, name, None) for name in _LATENT}
    block = {BLOCK: getattr(config, BLOCK, None)}
    plain = unpadded({**sizes, **block})
    said = block[BLOCK] if isinstance(block[BLOCK], Mapping) else {}
    return _Latent(
        sizes,
        form="plain" if text.model_type.startswith(PREFIX) else said.get("form"),
        readers=said.get("readers"),
        query=text.qk_nope_head_dim + text.qk_rope_head_dim,
        unpadded=plain["kv_lora_rank"] + plain["qk_rope_head_dim"],
        source=source_elements(block),
    )


def _still_layers(config: Any) -> int:
    """How many layers have no positions, of a model that has them; a stock form says it of its plain one only."""
    said = unpadded({BLOCK: getattr(config, BLOCK, None)})
    kept = said.get("rope_frequencies") or getattr(config, "rope_frequencies", None)
    return sum(not places for places in kept or getattr(config, "no_rope_layers", None) or [])


def _read_headers(src: str, kind: str, revision: str | None) -> tuple[Any, list[TensorInfo]]:
    """Config and tensor headers of a SOURCE, wherever it is."""
    path = Path(src)
    if kind == "folder":
        config = read_config(path)
        return config, list(Checkpoint.open(path).tensors.values())
    if kind == "gguf":
        from .gguf import read_gguf_config
        from .gguf_header import read_gguf_headers

        return read_gguf_config(path), read_gguf_headers(path)
    from huggingface_hub import HfApi, hf_hub_download

    with one_line_errors(src), quiet():
        config = read_config(Path(hf_hub_download(src, "config.json", revision=revision)).parent)
        remote = HfApi().get_safetensors_metadata(src, revision=revision)
    return config, [
        TensorInfo(name, row.dtype, tuple(row.shape), shard, *row.data_offsets)
        for shard, file in remote.files_metadata.items()
        for name, row in file.tensors.items()
    ]


def _attention_biases(tensors: Iterable[TensorInfo]) -> str:
    """The attention projections that have a bias in any layer, by the last part of their name."""
    names = (info.name.split(".") for info in tensors)
    found = {
        parts[-2]: None
        for parts in names
        if parts[-1] == "bias" and len(parts) > 2 and _is_projection(parts[-3], parts[-2])
    }
    return ", ".join(found) or "none"


def _is_projection(parent: str, name: str) -> bool:
    in_attention = "attn" in parent or "attention" in parent or name.startswith("attn_")
    return in_attention and "norm" not in name


def _qk_norm(family: Family | None, config: Any, tensors: Iterable[TensorInfo]) -> str:
    if family:
        return family.qk_norm if family.has_qk_norm(config) else "no"
    marks = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
    return "yes" if any(mark in info.name for info in tensors for mark in marks) else "no"


@dataclass(frozen=True)
class _Rope:
    type: str
    theta: str
    dim: int


def _rope(config: Any) -> _Rope:
    """RoPE as the config says it: one set of parameters, or one for each layer type."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return _Rope("none", "none", 0)
    sets = parameters if all(isinstance(value, dict) for value in parameters.values()) else {"": parameters}
    part = next(iter(sets.values())).get("partial_rotary_factor") or 1.0

    def say(key: str) -> str:
        values = {kind: str(entry.get(key)) for kind, entry in sets.items()}
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        return ", ".join(f"{value} ({kind})" for kind, value in values.items())

    dim = config.qk_rope_head_dim if attention_kind(config) == "MLA" else int(head_dim(config) * part)
    return _Rope(say("rope_type"), say("rope_theta"), dim)


def conversions(config: Any, tensors: list[TensorInfo], *, named_as_saved: bool) -> list[Conversion]:
    """Every conversion that kvfold knows, and whether this model can go through it.

    Args:
        named_as_saved: whether the tensors carry transformers' names, so that they can be held against the config.
    """
    if attention_kind(config) == "MLA":
        return _of_latent(config, tensors)
    reason = obstacle(config)
    if not reason and named_as_saved:
        try:
            account(FAMILIES[config.model_type], config, {info.name: info for info in tensors})
        except UserError as error:
            reason = str(error)
    if reason:
        return [Conversion(to, False, [], reason) for to in ("gqa", "mqa", "mla")]
    family, heads = FAMILIES[config.model_type], num_key_value_heads(config)
    choices = [n for n in kv_head_choices(config, family) if n < heads]
    note = f"the result is a {family.becomes} model" if family.becomes else ""
    if reason := channel_obstacle(family, config):
        note = f"by --method {', '.join(whole_head_methods())}: {reason} does not allow mixing channels"
    rows = []
    for kind, possible in {"gqa": [n for n in choices if n > 1], "mqa": [n for n in choices if n == 1]}.items():
        if possible:
            why = note
        elif heads == 1:
            why = "it has a single KV head already"
        elif family.only_kv_heads:
            why = one_or_all(family)
        else:
            why = f"{heads} KV heads form no groups other than one"
        rows.append(Conversion(kind, bool(possible), possible, why))
    return [*rows, _to_mla(family, config, tensors if named_as_saved else [])]


def _to_mla(family: Family, config: Any, tensors: Iterable[TensorInfo]) -> Conversion:
    if reason := latent_obstacle(family, config):
        return Conversion("mla", False, [], reason)
    if reason := _stock_obstacle(family, config, tensors):
        return Conversion("mla", True, [], f"not as {FORMS[0]}: {reason}", ["plain"])
    return Conversion("mla", True, [], "", list(FORMS))


def _stock_obstacle(family: Family, config: Any, tensors: Iterable[TensorInfo]) -> str | None:
    """Why DeepSeek's classes cannot hold what surrounds a model's attention, or its RoPE, or None."""
    from .mla.stock_rope import stock_rope

    if family.latent != "stock":
        return "its norm is a LayerNorm"
    if homeless := [info.name for info in tensors if info.name.endswith(".bias") and ".self_attn." not in info.name]:
        return f"DeepseekV3ForCausalLM has no place for {homeless[0]}"
    # Of a model that keeps all frequencies, the one that every selection does.
    kept = getattr(config, "rope_frequencies", None) or [[0]] * config.num_hidden_layers
    size = getattr(config, "qk_rope_head_dim", 2)
    try:
        stock_rope(family, config, kept, size, size)
    except UserError as error:
        return str(error)
    return None


def _of_latent(config: Any, tensors: Iterable[TensorInfo]) -> list[Conversion]:
    """The rows of a model with MLA: a plain one can be exported, an export can be turned back."""
    why = obstacle(config) or ""
    rows = [Conversion(to, False, [], why) for to in ("gqa", "mqa")]
    if config.model_type.startswith(PREFIX):
        reason = _stock_obstacle(KNOWN[config.model_type], config, tensors)
        mla = Conversion("mla", False, [], reason) if reason else Conversion("mla", True, [], "as it is", [FORMS[0]])
        return [*rows, mla, Conversion("plain", False, [], "it is in the plain form already")]
    try:
        Form.read(config.to_dict())
        account(DEEPSEEK, config, {info.name: info for info in tensors})
    except UserError as error:
        plain = Conversion("plain", False, [], str(error))
    else:
        plain = Conversion("plain", True, [], "", ["plain"])
    return [*rows, Conversion("mla", False, [], why), plain]
