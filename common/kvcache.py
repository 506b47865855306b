"""What a model caches, read from its config alone: elements a token, tokens a layer, bytes.

Everything takes a transformers config and imports neither torch nor transformers, so that a checkpoint can be
described without loading it. One "element" is one number; a token costs `kv_elements` of them in every layer
that caches. `kvfold.eval.cache` measures the same figures on the cache object.
"""

from __future__ import annotations

from .errors import UserError

ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

# Layer types by what they keep (the names are transformers'). A recurrent state does not grow with the text.
_KEEP_ALL = {"full_attention", "indexed_attention", "hybrid", "attention", "deepseek_sparse_attention"}
_KEEP_WINDOW = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
_KEEP_NOTHING = {"conv", "linear_attention", "mamba", "moe", "mlp"}


def _text_config(config):
    return config.get_text_config(decoder=True)


def num_attention_heads(config) -> int:
    """Query heads a layer (H).

    Raises:
        UserError: the model has no attention heads.
    """
    heads = getattr(_text_config(config), "num_attention_heads", None)
    if not heads:
        raise UserError(f"model type {config.model_type} has no attention heads, hence no key/value cache")
    return heads


def num_key_value_heads(config) -> int:
    """Key/value heads a layer (G), under whichever name the family gives them; H where it gives none.

    It is what the weights hold. Falcon's new decoder still caches H of them, as transformers repeats its
    heads before it caches them: the measured figure says so.
    """
    config = _text_config(config)
    # gpt_bigcode and falcon say "one" with a flag, which falcon's new decoder ignores.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads"):
        if (heads := getattr(config, name, None)) is not None:
            return heads
    return num_attention_heads(config)


def head_dim(config) -> int:
    """Coordinates a key or value head has (d): the explicit one, else hidden size over query heads."""
    config = _text_config(config)
    return getattr(config, "head_dim", None) or config.hidden_size // num_attention_heads(config)


def attention_kind(config) -> str:
    """``"MHA"``, ``"GQA"``, ``"MQA"`` or ``"MLA"``. A model with a single query head is MHA."""
    if getattr(_text_config(config), "kv_lora_rank", None):
        return "MLA"
    heads, kv_heads = num_attention_heads(config), num_key_value_heads(config)
    if kv_heads == heads:
        return "MHA"
    return "MQA" if kv_heads == 1 else "GQA"


def kv_elements(config) -> int:
    """Numbers that one token caches in one layer: `2 G d`, or `kv_lora_rank + qk_rope_head_dim` for MLA."""
    if attention_kind(config) == "MLA":
        config = _text_config(config)
        return config.kv_lora_rank + config.qk_rope_head_dim
    return 2 * num_key_value_heads(config) * head_dim(config)


def cached_tokens(config, context: int) -> list[int]:
    """Tokens that each layer still holds after `context` tokens, first layer first.

    A windowed layer holds `window - 1` at most: the next token brings the one that fills its window.

    Raises:
        UserError: the config has a layer type of which we do not know what it keeps.
    """
    config = _text_config(config)
    types = getattr(config, "layer_types", None)
    if types is None:  # one type for all, told by the field that is set
        windowed = (kind for kind, field in _KEEP_WINDOW.items() if getattr(config, field, None) is not None)
        types = [next(windowed, "full_attention")] * config.num_hidden_layers
    held = []
    for kind in types:
        if kind in _KEEP_ALL:
            held.append(context)
        elif kind in _KEEP_WINDOW:
            held.append(min(context, getattr(config, _KEEP_WINDOW[kind]) - 1))
        elif kind in _KEEP_NOTHING:
            held.append(0)
        else:
            raise UserError(f"layer type {kind!r} of {config.model_type} caches in a way unknown here")
    return held


def kv_bytes_per_token(config, element_bytes: int) -> int:
    """Bytes that one more token costs over all layers, while no window is full."""
    return kv_elements(config) * sum(cached_tokens(config, 1)) * element_bytes


def kv_bytes(config, context: int, element_bytes: int) -> int:
    """Bytes that one sequence of `context` tokens keeps cached over all layers."""
    return kv_elements(config) * sum(cached_tokens(config, context)) * element_bytes


def fit_context(config, name: str, asked: int | None, default: int) -> int:
    """A sequence length that the model takes: the one asked for, else `default` or the model's if shorter.

    Raises:
        UserError: more is asked than the model was made for; `name` is what the user calls the number.
    """
    longest = context_length(config)
    if asked is None:
        return min(default, longest or default)
    if longest is not None and asked > longest:
        raise UserError(f"{name} {asked} is longer than the model's context {longest}; give {longest} or less")
    return asked


def context_length(config) -> int | None:
    """Tokens that the model was made for, or `None` where it sets no bound (ALiBi families)."""
    config = _text_config(config)
    for name in ("max_position_embeddings", "max_seq_len"):
        if (length := getattr(config, name, None)) is not None:
            return length
    return None
