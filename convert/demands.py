"""What each engine demands of a checkpoint, visible in its config and its tensors' names, shapes and dtypes.

The demands are data, in demands.json. A row is one demand:

    engines     whom it concerns; all if left out
    form        of which checkpoints: `deepseek_v3` (MLA; the default), `plain` (kvfold's MLA class), `stock` (another
                architecture that the engine reads), `unknown`
    topic       the row of docs/engines.md
    severity    `refuse` (the default) if the engine would fail or be wrong, `warn` if some way to run it would
    if, needs   conditions, all of which must hold: a row whose `if` holds and whose `needs` does not is violated
    find        instead of `needs`: a function of `FINDERS`, violated once for each thing that it finds
    wrong, mend what is said; `{name}` is a fact, or what the finder found. Where the mend depends, it is a list of
                rows with `if` and `say`, and the first whose `if` holds is said

A condition names a fact by `key` (or several by `each`, every one a demand of its own) and tests it with `OPERATORS`.
Facts are what config.json says, and `_derived` of it. The table of `tensors` has the symbols of `_sizes`; `~` stands
for a decoder layer. `checked` says, by form, how much the demands amount to.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..common.errors import UserError, did_you_mean
from ..common.kvcache import kv_elements
from ..common.sources import one_line_errors
from .checks import account
from .families import FAMILIES
from .headers import TensorInfo
from .latent_form import ENGINE_SHAPES, HeadSizes, edits

_TABLE = json.loads(Path(__file__).with_name("demands.json").read_text(encoding="utf-8"))
ENGINES: tuple[str, ...] = tuple(_TABLE["engines"])
TRANSFORMERS_LATENT_EPS = 1e-6  # of both latent norms in transformers, whatever the config says
_COUNTS = ("num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_size", "intermediate_size", "kv_lora_rank")
_CLOSE = 1e-6  # relative: JSON keeps every digit, but a square root and its square do not
_SHOWN = 3  # tensors named in a message

# Whether a fact passes a test: (fact or None, operand, all facts).
OPERATORS: dict[str, Callable[[Any, Any, Mapping[str, Any]], bool]] = {
    "is": lambda fact, operand, facts: _equal(fact, operand),
    "in": lambda fact, operand, facts: any(_equal(fact, one) for one in operand),
    "not_in": lambda fact, operand, facts: not any(_equal(fact, one) for one in operand),
    "said": lambda fact, operand, facts: (fact is not None) is operand,
    "same_as": lambda fact, operand, facts: fact is not None and _equal(fact, facts.get(operand)),
    "at_least": lambda fact, operand, facts: type(fact) is int and fact >= operand,  # of counts
    "at_most": lambda fact, operand, facts: _is_number(fact) and fact <= operand,
    "at_most_key": lambda fact, operand, facts: (
        not (_is_number(fact) and _is_number(facts.get(operand))) or fact <= facts[operand]
    ),
    "below": lambda fact, operand, facts: _is_number(fact) and fact < operand,
    "lacks": lambda fact, operand, facts: operand not in (fact or ()),
}


@dataclass(frozen=True)
class Violation:
    """A demand that a checkpoint does not meet.

    Attributes:
        engine: who demands it.
        read_from: the release whose sources the demand was read from.
        topic: the row of docs/engines.md.
        severity: `refuse` if the engine would fail or be wrong, `warn` if only some way to run it would.
        wrong: what is wrong, with the number or the tensors.
        mend: what to change.
    """

    engine: str
    read_from: str
    topic: str
    severity: str
    wrong: str
    mend: str


@dataclass(frozen=True)
class Seen:
    """What an engine sees of a checkpoint before it reads a weight."""

    engine: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def facts(self) -> dict[str, Any]:
        return {**self.config, **_derived(self)}

    @cached_property
    def said(self) -> dict[str, Any]:
        """The facts for messages, in which null is not the same as nothing."""
        return {**self.facts, **{name: "null" for name, value in self.config.items() if value is None}}

    @property
    def block(self) -> Mapping[str, Any]:
        """What kvfold said of its export; empty for a checkpoint that is not one."""
        return _mapping(self.config.get("kvfold"))

    @cached_property
    def promised(self) -> dict[str, tuple[int, ...]]:
        """The tensors that `DeepseekV3ForCausalLM` has by this config, and their shapes."""
        sizes, promised = _sizes(self.facts), {}
        # One layer more than can be there is enough to say that it is missing.
        layers = min(self.facts["num_hidden_layers"], len(self.tensors) + 1)
        for row in _TABLE["tensors"]:
            if all(_holds(condition, self.facts) for condition in row.get("if", [])):
                shape = tuple(sizes[symbol] for symbol in row["shape"].split())
                promised |= dict.fromkeys(_names(row["name"], layers), shape)
        return promised


def violations(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], engine: str) -> list[Violation]:
    """Every demand of an engine that a checkpoint does not meet, refusals before warnings.

    Args:
        config: config.json as it stands, or as it will be written.
        tensors: every tensor by name.
        engine: one of `ENGINES`.

    Raises:
        UserError: there is no such engine in the table.
    """
    check_engine(engine)
    seen = Seen(engine, config, tensors)
    found = []
    for row in _TABLE["demands"]:
        if engine in row.get("engines", ENGINES) and row.get("form", "deepseek_v3") == form_of(config, engine):
            found += [_say(row, seen, finding) for finding in _findings(row, seen)]
    return sorted(found, key=lambda violation: violation.severity != "refuse")


def spelled(found: Iterable[Violation]) -> list[str]:
    """Violations in one line each; what several engines say alike is said once, with all their names."""
    engines: dict[str, list[str]] = {}
    for violation in found:
        engines.setdefault(f"{violation.wrong}; {violation.mend}", []).append(violation.engine)
    return [f"{', '.join(names)}: {text}" for text, names in engines.items()]


def checked(config: Mapping[str, Any], engine: str) -> str:
    """How much it means that a checkpoint meets an engine's demands: what of them is known."""
    said = {"engine": engine, "architecture": architecture_of(config)}
    return _TABLE["checked"][form_of(config, engine)].format_map(_Words(said))


def check_engine(engine: str) -> None:
    """Refuse a name that is not one of `ENGINES`.

    Raises:
        UserError: names the nearest one.
    """
    if engine not in ENGINES:
        raise UserError(f"unknown engine {engine!r}{did_you_mean(engine, ENGINES)}")


def read_from(engine: str) -> str:
    """The release of an engine whose sources its demands were read from."""
    return _TABLE["engines"][engine]["read_from"]


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The class that config.json names, or None."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else None


def form_of(config: Mapping[str, Any], engine: str) -> str:
    """Which rows of the table a checkpoint answers to; see the module's docstring."""
    kind = str(config.get("model_type"))
    if kind == "deepseek_v3":
        return "deepseek_v3"
    if kind.startswith("mla_"):
        return "plain"
    known = kind in FAMILIES and architecture_of(config) in _TABLE["engines"][engine]["reads"]
    return "stock" if known else "unknown"


def source_elements(config: Mapping[str, Any]) -> int | None:
    """Elements that the source of an export caches for one token in one layer, or None where there is no source."""
    source = _mapping(_mapping(config.get("kvfold")).get("source"))
    return kv_elements(_Attributes(source)) if source.get("model_type") in FAMILIES else None


def cached(sizes: Mapping[str, Any]) -> int | None:
    """Elements a token and layer of an MLA checkpoint with these sizes; None where they are not said."""
    rank, rope = map(sizes.get, ("kv_lora_rank", "qk_rope_head_dim"))
    return rank + rope if type(rank) is int and type(rope) is int else None


def unpadded(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sizes of an export before it was padded to an engine's shape; its own where it was not."""
    return _mapping(_mapping(config.get("kvfold")).get("plain")) or config


def _derived(seen: Seen) -> dict[str, Any]:
    """The facts that config.json does not say in so many words; None where it leaves out what they need."""
    config = seen.config
    # transformers lets the older key win.
    rope = {**_mapping(config.get("rope_parameters")), **_mapping(config.get("rope_scaling"))}
    sizes = [*map(config.get, ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))]
    known = all(type(size) is int for size in sizes)
    return {
        "engine": seen.engine,
        "form": form_of(config, seen.engine),
        "architecture": architecture_of(config),
        "rope_type": rope.get("rope_type") or rope.get("type") or "default",
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta"),
        "cache_elements": cached(config),
        "unpadded_elements": cached(unpadded(config)),
        "too_large_to_pad": known and not any(shape.holds(HeadSizes(*sizes)) for shape in ENGINE_SHAPES),
        "head_shape": sizes[1:],
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "dtypes": sorted({info.dtype for info in seen.tensors.values()}),
        "latent_scale": seen.block.get("latent_scale"),
        "format_version": seen.block.get("format_version"),
    }


def _sizes(facts: Mapping[str, Any]) -> dict[str, int]:
    """The symbols of the tensor table: N vocabulary, D hidden size, I MLP width, P query rank, R latent rank, C what is
    cached, Q queries, U what the latent expands to, O what the output projection reads."""
    heads = facts["num_attention_heads"]
    nope, rope, value = facts["head_shape"]
    return {
        "N": facts["vocab_size"], "D": facts["hidden_size"], "I": facts["intermediate_size"],
        "P": facts.get("q_lora_rank"), "R": facts["kv_lora_rank"], "C": facts["cache_elements"],
        "Q": heads * (nope + rope), "U": heads * (nope + value), "O": heads * value,
    }  # fmt: skip


def _names(template: str, layers: int) -> list[str]:
    if not template.startswith("~"):
        return [template]
    return [f"model.layers.{layer}.{template[1:]}" for layer in range(layers)]


def _findings(row: Mapping[str, Any], seen: Seen) -> Iterator[Mapping[str, Any]]:
    """What violates a row: one mapping a violation, with what its message needs beside the facts."""
    if not all(_holds(condition, seen.facts) for condition in row.get("if", [])):
        return
    if "find" in row:
        yield from FINDERS[row["find"]](seen, row.get("match", ""))
        return
    for condition in row["needs"]:
        for key in condition.get("each", [condition.get("key")]):
            if not _holds({**condition, "key": key}, seen.facts):
                yield {"key": key, "value": seen.said.get(key)}
                if "each" not in condition:
                    return  # conditions of one row are one demand


def _holds(condition: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    if "present" in condition:
        return (condition["key"] in facts) is condition["present"]
    tests = {name: operand for name, operand in condition.items() if name in OPERATORS}
    return all(OPERATORS[name](facts.get(condition["key"]), operand, facts) for name, operand in tests.items())


def _say(row: Mapping[str, Any], seen: Seen, finding: Mapping[str, Any]) -> Violation:
    words = _Words({**seen.said, **finding})
    return Violation(
        engine=seen.engine,
        read_from=read_from(seen.engine),
        topic=row["topic"],
        severity=row.get("severity", "refuse"),
        wrong=row["wrong"].format_map(words),
        mend=_mend(row, seen).format_map(words),
    )


def _mend(row: Mapping[str, Any], seen: Seen) -> str:
    if isinstance(row["mend"], str):
        return row["mend"]
    return next(one["say"] for one in row["mend"] if all(_holds(test, seen.facts) for test in one.get("if", [])))


class _Words(dict):
    """Facts as messages spell them."""

    def __getitem__(self, key: str) -> Any:
        return _spell(self.get(key))


def _spell(value: Any) -> Any:
    if value is None:
        return "not said"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"({', '.join(map(str, value))})"
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    """A part of a config that should be a table, or nothing."""
    return value if isinstance(value, Mapping) else {}


def _equal(fact: Any, operand: Any) -> bool:
    """Equality in which true is not 1."""
    return fact == operand and isinstance(fact, bool) == isinstance(operand, bool)


def _is_number(fact: Any) -> bool:
    return isinstance(fact, int | float) and not isinstance(fact, bool)


def _listed(names: Iterable[str]) -> Iterator[dict[str, str]]:
    """One finding for all names, if there are any."""
    names = list(names)
    if names:
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield {"tensors": ", ".join(names[:_SHOWN]) + rest}


def _are_sizes_said(seen: Seen) -> bool:
    """Whether the config says every size; where it does not, a row of its own says so, and shapes mean nothing."""
    rank = seen.facts.get("q_lora_rank")
    sizes = [*map(seen.facts.get, _COUNTS), *seen.facts["head_shape"], 1 if rank is None else rank]
    return all(type(size) is int and size > 0 for size in sizes)


def _stored(seen: Seen, match: str) -> Iterator[dict[str, str]]:
    return _listed(name for name in seen.tensors if re.search(match, name))


def _without_place(seen: Seen, match: str) -> Iterator[dict[str, str]]:
    if _are_sizes_said(seen):
        yield from _listed(name for name in seen.tensors if name not in seen.promised and re.search(match, name))


def _missing(seen: Seen, match: str) -> Iterator[dict[str, str]]:
    if _are_sizes_said(seen):
        yield from _listed(name for name in seen.promised if name not in seen.tensors)


def _misshapen(seen: Seen, match: str) -> Iterator[dict[str, str]]:
    if _are_sizes_said(seen):
        yield from _listed(
            f"{name} has shape {list(info.shape)}, the config says {list(seen.promised[name])}"
            for name, info in seen.tensors.items()
            if name in seen.promised and info.shape != seen.promised[name]
        )


def _unlike_family(seen: Seen, match: str) -> Iterator[dict[str, str]]:
    """What the family's own table says of a checkpoint that is not MLA, by the first tensor that is wrong."""
    kind = seen.config["model_type"]
    try:
        account(FAMILIES[kind], _Attributes(seen.config), seen.tensors)
    except UserError as error:
        yield {"reason": str(error)}


def _other_latent_eps(seen: Seen, match: str) -> Iterator[dict[str, Any]]:
    """An export whose neutral latent norm was made for another eps than the engine runs it with."""
    configured, block = seen.config.get("rms_norm_eps"), seen.block
    if not block or not _is_number(configured):
        return
    by_transformers = seen.engine.endswith("transformers")
    eps = TRANSFORMERS_LATENT_EPS if by_transformers else configured
    readers = block.get("readers")
    fixed = isinstance(readers, list) and any(reader in readers for reader in ("transformers", "vllm-transformers"))
    built_for = TRANSFORMERS_LATENT_EPS if fixed else configured
    if not math.isclose(eps, built_for, rel_tol=_CLOSE):
        rule = "fixed there" if by_transformers else "the config's rms_norm_eps"
        yield {"eps": eps, "built_for": built_for, "rule": rule}


def _other_residual_eps(seen: Seen, match: str) -> Iterator[dict[str, Any]]:
    """An export whose rms_norm_eps is not the source's times the square of the residual scale."""
    configured = seen.config.get("rms_norm_eps")
    scale, source = map(seen.block.get, ("residual_scale", "rms_norm_eps"))
    if not all(map(_is_number, (configured, scale, source))):
        return
    if not math.isclose(configured, wanted := source * scale**2, rel_tol=_CLOSE):
        yield {"scale": scale, "wanted": wanted}


def _larger_than_source(seen: Seen, match: str) -> Iterator[dict[str, Any]]:
    ours, source = seen.facts["cache_elements"], source_elements(seen.config)
    if ours is not None and source is not None and ours > source:
        yield {"source": source}


def _edited(seen: Seen, match: str) -> Iterator[dict[str, Any]]:
    """What an export's config.json says otherwise than when it was written."""
    yield from ({"edit": edit} for edit in edits(seen.config))


# What violates a row beyond a condition: (checkpoint, the row's `match`) -> a mapping for every violation.
FINDERS: dict[str, Callable[[Seen, str], Iterator[Mapping[str, Any]]]] = {
    "edited": _edited,
    "larger_than_source": _larger_than_source,
    "missing": _missing,
    "misshapen": _misshapen,
    "other_latent_eps": _other_latent_eps,
    "other_residual_eps": _other_residual_eps,
    "stored": _stored,
    "unlike_family": _unlike_family,
    "without_place": _without_place,
}


class _Attributes:
    """A config.json with the attributes of transformers' config, which is asked only for what is not said.

    Raises:
        UserError: transformers is asked, and refuses the config.
    """

    def __init__(self, raw: Mapping[str, Any]):
        self._raw = raw
        row = FAMILIES.get(raw["model_type"])
        self._spelling: Mapping[str, str] = row.spelling if row else {}

    @cached_property
    def _full(self) -> Any:
        from .config import from_raw

        with one_line_errors("config.json"):
            return from_raw(dict(self._raw))

    def __getattr__(self, name: str) -> Any:
        value = self._raw.get(self._spelling.get(name, name))
        return getattr(self._full, name) if value is None else value

    def get_text_config(self, decoder: bool = True) -> _Attributes:
        return self
