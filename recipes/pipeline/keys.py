"""What each section of a recipe may say: the flags of the command that its stage runs, with underscores.

A flag that takes no value is true or false here, so `--no-speed` is `no_speed: true`. What a pipeline fills in itself
(which model, where to) is no key. The tests hold these tables to the flags of the command line.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...common.errors import UserError, did_you_mean
from ...common.loading import DTYPES, FLOATS
from ...common.typed import AT_LEAST_0, AT_LEAST_1, POSITIVE, Kind, Rule, kinds_of, typed
from ...uptrain.recipe import Recipe

Keys = Mapping[str, Kind]

_TEXT, _TEXTS = Kind(str), Kind(str, many=True)
_COUNT, _FLAG = Kind(int, rule=AT_LEAST_1), Kind(bool)
_COUNTS = Kind(int, many=True, rule=AT_LEAST_1)
_SOME_OR_NONE = Kind(int, rule=AT_LEAST_0)
_RATIO = Kind(float, rule=POSITIVE)
_SCORED: Rule = (lambda x: x >= 2, "at least 2: the first token of a window is not predicted")
_RUN_IN = {"dtype": Kind(str, choices=DTYPES), "device": _TEXT}

_CALIBRATION: Keys = {
    "calib": _TEXTS,
    "calib_windows": _COUNT,
    "calib_window": _COUNT,
    "no_calib_builtin": _FLAG,
    "chat": _FLAG,
    "no_fisher": _FLAG,
    "offload": _FLAG,
}
_CONVERSION: Keys = {
    **_CALIBRATION,
    "calib_batch_size": _COUNT,
    "calib_dtype": Kind(str, choices=DTYPES),
    "stats": _TEXT,
    "refine": _SOME_OR_NONE,
    "refine_passes": _COUNT,
    "device": _TEXT,
    "dtype": Kind(str, choices=FLOATS),
    "max_shard_size": _TEXT,
    "no_hash": _FLAG,
}
# By what a checkpoint is converted to.
CONVERSIONS: Mapping[str, Keys] = {
    "gqa": {
        "kv_heads": _COUNT,
        "method": Kind(str, choices=("svd", "aligned", "mean", "first", "random")),
        "grouping": Kind(str, choices=("contiguous", "similar")),
        "seed": _SOME_OR_NONE,
        **_CONVERSION,
    },
    "mla": {
        "kv_elements": _COUNT,
        "kv_ratio": _RATIO,
        "kv_rank": _COUNT,
        "rope_dim": _SOME_OR_NONE,
        "rope_select": Kind(str, choices=("auto", "high", "stride", "fold")),
        "search_windows": _COUNT,
        "q_rank": _COUNT,
        "form": Kind(str, choices=("deepseek_v3", "plain")),
        "for": Kind(str, many=True, choices=("transformers", "vllm", "vllm-transformers", "sglang", "llama.cpp")),
        "pad_to_engine": _FLAG,
        "large_eps": _FLAG,
        "small_eps": _FLAG,
        **_CONVERSION,
    },
}
# What a conversion cannot do without: any one of these.
NEEDED: Mapping[str, tuple[str, ...]] = {"gqa": ("kv_heads",), "mla": ("kv_elements", "kv_ratio", "kv_rank")}
_SCORING: Keys = {
    "text": _TEXTS,
    "window": Kind(int, rule=_SCORED),
    "max_windows": _COUNT,
    "batch_size": _COUNT,
    "max_ratio": _RATIO,
    **_RUN_IN,
}
# What a pipeline fills in, or does by itself, of an uptraining.
FILLED_IN = frozenset({"model", "revision", "out", "run_dir", "overwrite"})
_TO: Keys = {"to": Kind(str, choices=tuple(CONVERSIONS))}

SECTIONS: Mapping[str, Keys] = {
    "source": {"model": _TEXT, "revision": _TEXT},
    "calibrate": {**_CALIBRATION, "batch_size": _COUNT, **_RUN_IN},
    "convert": {**_TO, **CONVERSIONS["gqa"], **CONVERSIONS["mla"]},
    "uptrain": {name: kind for name, kind in kinds_of(Recipe).items() if name not in FILLED_IN},
    "eval": {**_SCORING, "threshold": Kind(float, rule=AT_LEAST_0)},
    "tasks": {
        "task": _TEXTS,
        "include_path": _TEXTS,
        "num_fewshot": _SOME_OR_NONE,
        "limit": _COUNT,
        "batch_size": _COUNT,
        "apply_chat_template": _FLAG,
        **_RUN_IN,
    },
    "report": {**_SCORING, "no_speed": _FLAG, "context": _COUNTS, "title": _TEXT},
    "publish": {
        "repo_id": _TEXT,
        "revision": _TEXT,
        "tag": _TEXT,
        "private": _FLAG,
        "base_model": _TEXT,
        "license": _TEXT,
        "accept_license": _FLAG,
        "overwrite": _FLAG,
    },
}


def keys_of(section: str, to: object, where: str = "") -> Keys:
    """What a section may say; of a conversion, what it is to goes before.

    Raises:
        UserError: there is no such section, or no such conversion.
    """
    if section not in SECTIONS:
        raise UserError(f"{where}unknown section {section!r}{did_you_mean(section, SECTIONS)}")
    if section != "convert" or to is None:
        return SECTIONS[section]
    name = typed(f"{where}convert.to", to, _TO["to"])
    return {**_TO, **CONVERSIONS[name]}
