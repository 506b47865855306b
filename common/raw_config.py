"""A checkpoint's JSON files as they stand: read, and held to what can be, without transformers.

What transformers would make of a hostile or damaged config is slow, misleading, or code of somebody else's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from .errors import UserError
from .typed import quoted

ADAPTER = "adapter_config.json"
_LARGEST_JSON = 1 << 25  # bytes; the index of a million million parameters in small experts has half of that
_COUNTS = frozenset(
    {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"}
    | {"n_layer", "n_embd", "n_head"}
)
# What a config may say once, or for each layer, and must be a finite number above 0.
_POSITIVE = frozenset(
    {"intermediate_size", "max_position_embeddings", "n_positions", "factor", "partial_rotary_factor", "rope_theta"}
    | {"long_factor", "short_factor"}
    | {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon"}
)
# What must be of a type where it is said; everything that reads a config takes that for granted.
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function", "rope_type", "type"), (str,)),
    **dict.fromkeys(("dtype", "torch_dtype"), (str,)),
    **dict.fromkeys(("layer_types", "long_factor", "short_factor"), (list,)),
    **dict.fromkeys(("quantization_config", "text_config"), (dict,)),
    **dict.fromkeys(("attn_implementation", "_attn_implementation", "experts_implementation"), (str, dict)),
    "sliding_window": (int,),
}
_SAID = {str: "a name", list: "a list", dict: "a table", int: "a whole number"}
_ROPE = ("rope_parameters", "rope_scaling")  # tables of numbers, or such a table for each type of layers
MOST_LAYERS = 10_000
# What lists are made of, here and in transformers, and more of it than any model has.
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), MOST_LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 100_000),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim"), 1_000_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1_000_000),
    **dict.fromkeys(("hidden_size", "n_embd", "vocab_size"), 1_000_000_000),
}


class Twice(ValueError):
    """A key stands in a JSON object twice; the argument is the key."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different, for `json.loads`.

    Raises:
        Twice: they are not.
    """
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise Twice(next(name for name in names if names.count(name) > 1))
    return table


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object from a file of the user's.

    Raises:
        UserError: it is missing, is not a JSON object, or says the same key twice.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for, and a device has no end
        raise UserError(f"{path} is no file; copy it again from its source")
    try:
        if (size := path.stat().st_size) > _LARGEST_JSON:
            raise UserError(f"{path}: the {what} has {size:,} bytes, which none has; copy it again from its source")
        value = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except Twice as twice:
        raise UserError(f"{path}: the {what} says {quoted(twice.args[0])} twice; remove one") from None
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}; give a transformers checkpoint's directory") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: the {what} is not valid JSON; copy it again from its source") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: the {what} is not a JSON object; copy it again from its source")
    return value


def read_raw_config(folder: Path) -> dict[str, Any]:
    """A local checkpoint's config.json as it stands, with a model type and sensible numbers.

    Raises:
        UserError: there is none, or what it says cannot be.
    """
    check_adapter(folder)
    raw = read_json(folder / "config.json", "config")
    if not isinstance(raw.get("model_type"), str):
        raise UserError(f"{folder / 'config.json'} names no model_type, so no class can be chosen for it")
    for name in _COUNTS.intersection(raw):
        if raw[name] is not None and (type(raw[name]) is not int or raw[name] < 1):
            raise UserError(f"{folder / 'config.json'} says {name} = {quoted(raw[name])}; it must be a positive number")
    check_most(folder / "config.json", raw)
    _check_kernels(folder / "config.json", raw)
    for part in (raw, raw.get("text_config")):  # the latter of a model that sees or hears as well
        if isinstance(part, dict):
            _check_types(folder / "config.json", part)
            _check_positive(folder / "config.json", part)
            pad, vocabulary = part.get("pad_token_id"), part.get("vocab_size")
            if type(pad) is int and type(vocabulary) is int and pad >= vocabulary:
                said = f"{folder / 'config.json'} says pad_token_id = {quoted(pad)}"
                raise UserError(f"{said}, beyond its vocab_size of {quoted(vocabulary)}; mend either")
            _check_rope(folder / "config.json", part)
    return raw


def check_most(path: Path, raw: dict[str, Any]) -> None:
    """Refuse counts beyond any model's, in the configs of its parts too: a config's own memory grows with them.

    Raises:
        UserError: names the count.
    """
    tables = [raw]
    for table in tables:
        tables += [value for value in table.values() if isinstance(value, dict)]
        for name in _MOST.keys() & table:
            if type(table[name]) in (int, float) and table[name] > _MOST[name]:
                raise UserError(f"{path} says {name} = {quoted(table[name])}; no model has more than {_MOST[name]:,}")


def check_adapter(folder: Path) -> None:
    """Refuse a folder with a PEFT adapter: transformers would put it on the model that stands beside it, or open the
    model that it names, wherever that is.

    Raises:
        UserError: there is one.
    """
    if (folder / ADAPTER).exists():
        beside = f"holds a PEFT adapter beside its model; merge it, or move {ADAPTER} away"
        alone = "is a PEFT adapter, not a model; merge it into its base model first"
        raise UserError(f"{folder} {beside if (folder / 'config.json').exists() else alone}")


def _check_kernels(path: Path, raw: dict[str, Any]) -> None:
    """Refuse a config that names a kernel on the Hub, which is code that transformers would fetch and run.

    Raises:
        UserError: names it.
    """
    tables = [raw]
    for table in tables:
        tables += [value for value in table.values() if isinstance(value, dict)]
        for name in (name for name in table if "implementation" in name):
            for value in table[name].values() if isinstance(table[name], dict) else [table[name]]:
                if isinstance(value, str) and "/" in value:
                    raise UserError(f"{path} says {name} = {quoted(value)}, which is code on the Hub; remove it")


def _check_types(path: Path, table: dict[str, Any], inside: str = "") -> None:
    """Refuse what is not of the type that it must have.

    Raises:
        UserError: names it.
    """
    for name in sorted(_TYPES.keys() & table.keys()):
        if table[name] is not None and type(table[name]) not in _TYPES[name]:
            wanted = " or ".join(_SAID[kind] for kind in _TYPES[name])
            raise UserError(f"{path} says {name} = {quoted(table[name])}{inside}; it must be {wanted}")


def _check_positive(path: Path, table: dict[str, Any], inside: str = "") -> None:
    """Refuse what would make figures of a model NaN, or be read by transformers as something else.

    Args:
        inside: the table's name in the one that it is in.

    Raises:
        UserError: names the number.
    """
    for name in sorted(_POSITIVE & table.keys()):
        for number in table[name] if isinstance(table[name], list) else [table[name]]:
            if number is not None and not (type(number) in (int, float) and 0 < number < math.inf):
                said = f"{path} says {name} = {quoted(table[name])}{inside}"
                raise UserError(f"{said}; it must be a positive number")


def _check_rope(path: Path, table: dict[str, Any]) -> None:
    """Refuse what cannot be the parameters of a RoPE.

    Raises:
        UserError: names them.
    """
    for name in _ROPE:
        parameters = table.get(name) or {}
        if not isinstance(parameters, dict):
            raise UserError(f"{path} says {name} = {quoted(parameters)}; it must be a table")
        for part in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
            if part is not parameters and any(isinstance(value, dict) for value in part.values()):
                raise UserError(f"{path}: {name} is nested deeper than any is; copy it again from its source")
            _check_types(path, part, f" in {name}")
            _check_positive(path, part, f" in {name}")
