"""Families as data: which tensors a model of a family stores, and how heads lie in them.

A family is one `Family` row. Its tensors are lines of text: a name with slots, the shape in symbols, and
at most one rule (`~` stands for `model.layers.{layer}.`):

    ~self_attn.k_proj.weight    K D
    ~self_attn.k_proj.bias      K       if attention_bias
    lm_head.weight              N D     untied

Symbols: N vocabulary, P positions, D hidden size, I MLP width, M expert width, E experts, H query heads,
G key/value heads, d head dimension, Q = H*d (queries), O = H*d (what the output projection reads), K = V = G*d.
`Q+K+V` is a fused axis in this order, `2I` a multiple. They are all that conversion needs to know: an axis that
says K, V or G, or a name with the slot `{kv_head}`, holds key/value heads, one that says Q, O or H, or the slot
`{head}`, holds query heads; nothing else changes.

Rules: `if X` - there exactly when the config attribute, or the entry of `CONDITIONS`, X is true;
`untied` - may be absent when the head is tied; `drop` - a buffer of older releases, left out.

A new family is one row here and one row in tests/convert/tiny.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..common.kvcache import head_dim, num_key_value_heads


def _is_sparse(config: Any, layer: int) -> bool:
    dense_layers = getattr(config, "mlp_only_layers", None) or []
    return layer not in dense_layers and (layer + 1) % (getattr(config, "decoder_sparse_step", None) or 1) == 0


def _is_fused(names: Collection[str]) -> bool:
    """transformers 5 holds the experts of a layer as one tensor, and may save them so."""
    return any(name.endswith("experts.gate_up_proj") for name in names)


# Rules that are more than one config attribute: (config, layer, names in the checkpoint) -> bool.
CONDITIONS: dict[str, Callable[[Any, int, Collection[str]], bool]] = {
    "dense": lambda config, layer, names: not _is_sparse(config, layer),
    "sparse": lambda config, layer, names: _is_sparse(config, layer),
    "experts": lambda config, layer, names: _is_sparse(config, layer) and not _is_fused(names),
    "fused_experts": lambda config, layer, names: _is_sparse(config, layer) and _is_fused(names),
    "serial_residual": lambda config, layer, names: not config.use_parallel_residual,
    "no_q_lora": lambda config, layer, names: getattr(config, "q_lora_rank", None) is None,
    "q_lora_bias": lambda config, layer, names: bool(getattr(config, "q_lora_rank", None) and config.attention_bias),
}


@dataclass(frozen=True)
class Weight:
    """One line of a family's table. ``shape`` holds one tuple of terms an axis: ``("Q", "K", "V")``."""

    template: str
    shape: tuple[tuple[str, ...], ...]
    rule: str = ""
    condition: str = ""

    @classmethod
    def parse(cls, line: str) -> Weight:
        template, *words = line.split()
        cut = next((i for i, word in enumerate(words) if word in ("if", "untied", "drop")), len(words))
        rule, condition = [*words[cut:], "", ""][:2]
        return cls(template, tuple(tuple(word.split("+")) for word in words[:cut]), rule, condition)


@dataclass(frozen=True)
class Promise:
    """A tensor that a checkpoint of a family and config holds.

    Attributes:
        name: `template` with its `slots` filled.
        weight: its line in the table.
        template: the line's name, spelled as this checkpoint does.
        shape: in numbers.
        optional: whether the checkpoint may do without it.
    """

    name: str
    weight: Weight
    template: str
    slots: Mapping[str, int]
    shape: tuple[int, ...]
    optional: bool


@dataclass(frozen=True)
class Family:
    """One row: a model type of transformers.

    Attributes:
        name: the config's `model_type`.
        tensors: the table; see the module's docstring.
        rope: how RoPE pairs coordinates: `half` (i with i + d/2), `interleaved` (2i with 2i + 1) or `none`.
        rotary: `all` coordinates of a head turn, or a `part` (the config's `partial_rotary_factor`).
        after_attention: the submodule of a layer that reads the residual stream after attention; a layer that has none
            of that name runs attention and MLP side by side.
        norm: the block's norm: `rms`, `rms+1` (gain stored minus one) or `layer`.
        qk_norm: norm between projection and RoPE: `no`, `head` (one gain for all heads), `heads` (one gain a
            head) or `all` (one norm over all heads at once).
        qk_norm_if: the config attribute that switches `qk_norm` on; empty if it is always on.
        spelling: the names that config.json has for the attributes of transformers' config, where they differ.
        only_kv_heads: the KV head counts that the target architecture can hold; empty for every divisor.
        becomes: the family of the result, where the source's own architecture cannot hold it.
        config: what the result's config says beside the number of KV heads.
        latent: the forms of multi-head latent attention that it can be converted to: `stock` where DeepSeek's own
            classes can hold the rest of it, `plain` where only kvfold's can; empty if neither.
        refuses: config attributes with the value that cannot be converted, and why.
        before: lines of the table that another family has too, and that stand before `tensors`.
        in_memory: names (after the layer's number) that transformers has in memory only, with the stored ones that
            each is made of: end to end, and stacked where the names have the slot `{expert}`.
    """

    name: str
    tensors: str = field(repr=False)
    rope: str = "half"
    rotary: str = "all"
    after_attention: str = "post_attention_layernorm"
    norm: str = "rms"
    qk_norm: str = "no"
    qk_norm_if: str = ""
    spelling: Mapping[str, str] = field(default_factory=dict)
    only_kv_heads: tuple[int, ...] = ()
    becomes: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    latent: str = ""
    refuses: Mapping[str, tuple[bool, str]] = field(default_factory=dict)
    in_memory: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    before: tuple[Weight, ...] = ()

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        text = self.tensors.replace("~", "model.layers.{layer}.")
        return (*self.before, *(Weight.parse(line) for line in text.splitlines() if line.strip()))

    @cached_property
    def layers(self) -> str:
        """What the names of the decoder layers begin with, such as `model.layers.`."""
        return next(w.template.partition("{layer}")[0] for w in self.weights if "{layer}" in w.template)

    def has_qk_norm(self, config: Any) -> bool:
        return self.qk_norm != "no" and (not self.qk_norm_if or bool(getattr(config, self.qk_norm_if, False)))

    def promises(self, config: Any, names: Collection[str], kv_heads: int | None = None) -> dict[str, Promise]:
        """Every tensor that a checkpoint of this family and config may hold, by name.

        Args:
            config: a transformers config.
            names: the names in the checkpoint; they decide between equivalent spellings (with or without the
                base model's prefix, experts fused or apart).
            kv_heads: the number of KV heads, if not the config's.
        """
        sizes = Sizes(config, kv_heads)
        base = self.weights[0].template.split(".")[0] + "."
        bare = not any(name.startswith(base) for name in names)
        promised = {}
        for weight in self.weights:
            template = weight.template.removeprefix(base) if bare else weight.template
            for slots in _slots(template, sizes):
                if weight.rule == "if" and not _holds(weight.condition, config, slots.get("layer", 0), names):
                    continue
                name = template.format(**slots)
                optional = weight.rule == "drop" or (weight.rule == "untied" and config.tie_word_embeddings)
                shape = tuple(sum(sizes[term] for term in axis) for axis in weight.shape)
                promised[name] = Promise(name, weight, template, slots, shape, optional)
        return promised


# The slots of a name, and the symbol that says how many there are.
_SLOTS = {"layer": "L", "expert": "E", "head": "H", "kv_head": "G"}


def _slots(template: str, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    names = re.findall(r"\{(\w+)\}", template)
    for numbers in itertools.product(*(range(sizes[_SLOTS[name]]) for name in names)):
        yield dict(zip(names, numbers, strict=True))


def _holds(condition: str, config: Any, layer: int, names: Collection[str]) -> bool:
    rule = CONDITIONS.get(condition)
    return rule(config, layer, names) if rule else bool(getattr(config, condition, False))


def _first(config: Any, *names: str) -> Any:
    """The first of these attributes that a config has and says something about."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


# What each symbol of the tables means; computed from a config when a table asks for it.
_SYMBOLS: dict[str, Callable[[Any], int]] = {
    "L": lambda config: config.num_hidden_layers,
    "N": lambda config: config.vocab_size,
    "P": lambda config: config.max_position_embeddings,
    "D": lambda config: config.hidden_size,
    "I": lambda config: (
        getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    ),
    "M": lambda config: config.moe_intermediate_size,
    "E": lambda config: _first(config, "num_local_experts", "num_experts"),
    "H": lambda config: config.num_attention_heads,
    "G": num_key_value_heads,
    "d": head_dim,
    "r": lambda config: config.kv_lora_rank,
    "p": lambda config: config.qk_rope_head_dim,
    "q": lambda config: config.q_lora_rank,
    "S": lambda config: config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim),
    "T": lambda config: config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim),
    "U": lambda config: config.num_attention_heads * config.v_head_dim,
}
_PRODUCTS = {"Q": ("H", "d"), "O": ("H", "d"), "K": ("G", "d"), "V": ("G", "d")}


class Sizes(dict[str, int]):
    """The size of every symbol of the tables, for a config and (if given) another number of KV heads."""

    def __init__(self, config: Any, kv_heads: int | None = None):
        super().__init__({"G": kv_heads} if kv_heads else {})
        self.config = config

    def __missing__(self, term: str) -> int:
        if term in _PRODUCTS:
            size = self[_PRODUCTS[term][0]] * self[_PRODUCTS[term][1]]
        elif term[0].isdigit():  # a multiple, such as 2I
            size = int(term[0]) * self[term[1:]]
        else:
            size = _SYMBOLS[term](self.config)
        self[term] = size
        return size


def _when(condition: str, lines: str) -> str:
    """The same lines, each there only if the condition holds."""
    return "".join(f"{line} if {condition}\n" for line in lines.splitlines() if line.strip())


_EMBEDDING = """
    model.embed_tokens.weight           N D
    lm_head.weight                      N D     untied
    model.norm.weight                   D
"""
_QKV = """
    ~self_attn.q_proj.weight            Q D
    ~self_attn.k_proj.weight            K D
    ~self_attn.v_proj.weight            V D
    ~self_attn.rotary_emb.inv_freq      drop
"""
_QKV_BIAS = """
    ~self_attn.q_proj.bias              Q
    ~self_attn.k_proj.bias              K
    ~self_attn.v_proj.bias              V
"""
_O = "~self_attn.o_proj.weight  D O\n"
_O_BIAS = "~self_attn.o_proj.bias  D\n"
_GATED_MLP = """
    ~mlp.gate_proj.weight               I D
    ~mlp.up_proj.weight                 I D
    ~mlp.down_proj.weight               D I
"""
_GATED_MLP_BIAS = """
    ~mlp.gate_proj.bias                 I
    ~mlp.up_proj.bias                   I
    ~mlp.down_proj.bias                 D
"""
_EXPERTS = """
    ~mlp.experts.{expert}.gate_proj.weight  M D
    ~mlp.experts.{expert}.up_proj.weight    M D
    ~mlp.experts.{expert}.down_proj.weight  D M
"""
_FUSED_EXPERTS = """
    ~mlp.experts.gate_up_proj           E 2M D
    ~mlp.experts.down_proj              E D M
"""
_PRE_NORM = "~input_layernorm.weight  D\n"
_POST_NORM = "~post_attention_layernorm.weight  D\n"
_MLP_NORMS = """
    ~pre_feedforward_layernorm.weight   D
    ~post_feedforward_layernorm.weight  D
"""
_HEAD_NORM = """
    ~self_attn.q_norm.weight            d
    ~self_attn.k_norm.weight            d
"""

_PLAIN = _EMBEDDING + _QKV + _O + _GATED_MLP + _PRE_NORM + _POST_NORM
_BIASED = _PLAIN + _when("attention_bias", _QKV_BIAS + _O_BIAS)
_LLAMA = _BIASED + _when("mlp_bias", _GATED_MLP_BIAS)
_GEMMA2 = _BIASED + _MLP_NORMS

_MIXTRAL = (
    _EMBEDDING + _QKV + _O + _PRE_NORM + _POST_NORM
    + _when("experts", """
        ~block_sparse_moe.gate.weight                   E D
        ~block_sparse_moe.experts.{expert}.w1.weight    I D
        ~block_sparse_moe.experts.{expert}.w2.weight    D I
        ~block_sparse_moe.experts.{expert}.w3.weight    I D
    """)
    + _when("fused_experts", """
        ~mlp.gate.weight                                E D
        ~mlp.experts.gate_up_proj                       E 2I D
        ~mlp.experts.down_proj                          E D I
    """)
)  # fmt: skip
_MIXTRAL_IN_MEMORY = {
    "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
    "mlp.experts.gate_up_proj": tuple(f"block_sparse_moe.experts.{{expert}}.{w}.weight" for w in ("w1", "w3")),
    "mlp.experts.down_proj": ("block_sparse_moe.experts.{expert}.w2.weight",),
}
_QWEN3_MOE_IN_MEMORY = {
    "mlp.experts.gate_up_proj": tuple(f"mlp.experts.{{expert}}.{w}_proj.weight" for w in ("gate", "up")),
    "mlp.experts.down_proj": ("mlp.experts.{expert}.down_proj.weight",),
}
_QWEN3_MOE = (
    _EMBEDDING + _QKV + _O + _HEAD_NORM + _PRE_NORM + _POST_NORM
    + _when("attention_bias", _QKV_BIAS + _O_BIAS)
    + _when("dense", _GATED_MLP)
    + _when("sparse", "~mlp.gate.weight  E D")
    + _when("experts", _EXPERTS)
    + _when("fused_experts", _FUSED_EXPERTS)
)  # fmt: skip
_OLMO = (
    "model.embed_tokens.weight  N D\n lm_head.weight  N D  untied\n"  # its norms have no weights
    + _QKV + _O + _GATED_MLP + _when("attention_bias", _QKV_BIAS + _O_BIAS)
)  # fmt: skip
_OLMO2 = (
    _EMBEDDING + _QKV + _O + _GATED_MLP + _POST_NORM + _when("attention_bias", _QKV_BIAS + _O_BIAS)
    + """
        ~post_feedforward_layernorm.weight  D
        ~self_attn.q_norm.weight            Q
        ~self_attn.k_norm.weight            K
    """
)  # fmt: skip
_PHI = _QKV + _QKV_BIAS + """
        model.embed_tokens.weight           N D
        lm_head.weight                      N D     untied
        lm_head.bias                        N
        model.final_layernorm.weight        D
        model.final_layernorm.bias          D
        ~self_attn.dense.weight             D O
        ~self_attn.dense.bias               D
        ~mlp.fc1.weight                     I D
        ~mlp.fc1.bias                       I
        ~mlp.fc2.weight                     D I
        ~mlp.fc2.bias                       D
        ~input_layernorm.weight             D
        ~input_layernorm.bias               D
    """ + _when("qk_layernorm", """
        ~self_attn.q_layernorm.weight       d
        ~self_attn.q_layernorm.bias         d
        ~self_attn.k_layernorm.weight       d
        ~self_attn.k_layernorm.bias         d
    """)  # fmt: skip
_PHI3 = (
    _EMBEDDING
    + _O
    + _PRE_NORM
    + _POST_NORM
    + """
        ~self_attn.qkv_proj.weight          Q+K+V D
        ~self_attn.rotary_emb.inv_freq      drop
        ~mlp.gate_up_proj.weight            2I D
        ~mlp.down_proj.weight               D I
    """
)
_STARCODER2 = (
    _EMBEDDING + _QKV + _O + _PRE_NORM + _POST_NORM + _when("use_bias", _QKV_BIAS + _O_BIAS)
    + """
        model.norm.bias                     D
        ~input_layernorm.bias               D
        ~post_attention_layernorm.bias      D
        ~mlp.c_fc.weight                    I D
        ~mlp.c_proj.weight                  D I
    """
    + _when("use_bias", "~mlp.c_fc.bias  I\n ~mlp.c_proj.bias  D")
)  # fmt: skip
_STABLELM = (
    _EMBEDDING + _QKV + _O + _GATED_MLP + _PRE_NORM + _when("use_qkv_bias", _QKV_BIAS)
    + """
        model.norm.bias                     D
        ~input_layernorm.bias               D
    """
    + _when("serial_residual", _POST_NORM + "~post_attention_layernorm.bias  D")
    + _when("qk_layernorm", """
        ~self_attn.q_layernorm.norms.{head}.weight      d
        ~self_attn.k_layernorm.norms.{kv_head}.weight   d
    """)
)  # fmt: skip
_COHERE = (
    _EMBEDDING + _QKV + _O + _GATED_MLP + _PRE_NORM + _when("attention_bias", _QKV_BIAS + _O_BIAS)
    + _when("use_qk_norm", """
        ~self_attn.q_norm.weight            H d
        ~self_attn.k_norm.weight            G d
    """)
)  # fmt: skip
_GPT2_BLOCK = """
    transformer.wte.weight                          N D
    lm_head.weight                                  N D     untied
    transformer.wpe.weight                          P D
    transformer.ln_f.weight                         D
    transformer.ln_f.bias                           D
    transformer.h.{layer}.ln_1.weight               D
    transformer.h.{layer}.ln_1.bias                 D
    transformer.h.{layer}.attn.c_attn.bias          Q+K+V
    transformer.h.{layer}.attn.c_proj.bias          D
    transformer.h.{layer}.attn.bias                 drop
    transformer.h.{layer}.attn.masked_bias          drop
    transformer.h.{layer}.ln_2.weight               D
    transformer.h.{layer}.ln_2.bias                 D
    transformer.h.{layer}.mlp.c_fc.bias             I
    transformer.h.{layer}.mlp.c_proj.bias           D
"""
# GPT-2's Conv1D stores [in, out]; everybody else's Linear stores [out, in].
_GPT2 = (
    _GPT2_BLOCK
    + """
    transformer.h.{layer}.attn.c_attn.weight        D Q+K+V
    transformer.h.{layer}.attn.c_proj.weight        O D
    transformer.h.{layer}.mlp.c_fc.weight           D I
    transformer.h.{layer}.mlp.c_proj.weight         I D
"""
)
_GPT_BIGCODE = (
    _GPT2_BLOCK
    + """
    transformer.h.{layer}.attn.c_attn.weight        Q+K+V D
    transformer.h.{layer}.attn.c_proj.weight        D O
    transformer.h.{layer}.mlp.c_fc.weight           I D
    transformer.h.{layer}.mlp.c_proj.weight         D I
"""
)

_GPT2_SPELLING = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

_ROWS = (
    Family("llama", _LLAMA, latent="stock"),
    Family("mistral", _PLAIN, latent="stock"),
    Family("mixtral", _MIXTRAL, in_memory=_MIXTRAL_IN_MEMORY),
    Family("qwen2", _PLAIN + _QKV_BIAS, latent="stock"),
    Family("qwen3", _BIASED + _HEAD_NORM, qk_norm="head"),
    Family("qwen3_moe", _QWEN3_MOE, qk_norm="head", in_memory=_QWEN3_MOE_IN_MEMORY),
    Family("gemma", _BIASED, norm="rms+1"),
    Family("gemma2", _GEMMA2, norm="rms+1", after_attention="pre_feedforward_layernorm"),
    Family(
        "gemma3_text",
        _GEMMA2 + _HEAD_NORM,
        norm="rms+1",
        qk_norm="head",
        after_attention="pre_feedforward_layernorm",
    ),
    Family("olmo", _OLMO, norm="layer"),
    Family("olmo2", _OLMO2, qk_norm="all", after_attention="mlp"),
    Family("smollm3", _LLAMA, latent="stock"),
    Family("phi", _PHI, rotary="part", norm="layer", qk_norm="head", qk_norm_if="qk_layernorm"),
    Family("phi3", _PHI3, rotary="part", latent="stock"),
    Family("starcoder2", _STARCODER2, norm="layer"),
    Family(
        "stablelm",
        _STABLELM,
        rotary="part",
        norm="layer",
        qk_norm="heads",
        qk_norm_if="qk_layernorm",
        latent="plain",
    ),
    Family("cohere", _COHERE, rope="interleaved", norm="layer", qk_norm="heads", qk_norm_if="use_qk_norm"),
    Family("granite", _LLAMA),
    Family(
        "gpt2",
        _GPT2,
        spelling=_GPT2_SPELLING,
        rope="none",
        after_attention="ln_2",
        norm="layer",
        only_kv_heads=(1,),
        becomes="gpt_bigcode",
        config={"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "multi_query": True},
        refuses={
            "scale_attn_by_inverse_layer_idx": (True, "gpt_bigcode does not scale attention by the layer number"),
            "add_cross_attention": (True, "gpt_bigcode has no multi-query form of cross attention"),
        },
    ),
    Family(
        "gpt_bigcode",
        _GPT_BIGCODE,
        spelling=_GPT2_SPELLING,
        rope="none",
        after_attention="ln_2",
        norm="layer",
        only_kv_heads=(1,),
        refuses={
            "multi_query": (False, "query, key and value rows are then interleaved head by head"),
            "add_cross_attention": (True, "cross attention is not converted"),
        },
    ),
)
FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}
