"""What a user may give as a SOURCE - a checkpoint directory, a GGUF file or a Hub id - and how each can be wrong.

Shared by everything that opens one: loading runs it, conversion streams it, inspection reads its headers.
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

from .errors import EnvironmentFailure, KvfoldError, UserError, did_you_mean
from .typed import quoted

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_GGUF_MAGIC = b"GGUF"
ADAPTER = "adapter_config.json"
_LARGEST_JSON = 1 << 25  # bytes; the index of a million million parameters in small experts has half of that
_PATIENCE = 10.0  # seconds for the Hub to say that it knows a model
PASSING = frozenset({408, 429, 500, 502, 503, 504})  # answers of the Hub's that may be others in a while
# What the names of kvfold's own model types begin with, and the module that adds them to transformers: by name, as it
# stands a floor above.
_OWN_TYPES = {"mla_": "kvfold.attention.plain"}
_COUNTS = frozenset(
    {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"}
    | {"n_layer", "n_embd", "n_head"}
)
# What a config may say once, or for each layer, and must be a finite number above 0.
_POSITIVE = frozenset(
    {"intermediate_size", "max_position_embeddings", "n_positions", "factor", "partial_rotary_factor", "rope_theta"}
    | {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon"}
)
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


def source_kind(source: str, revision: str | None = None) -> Literal["folder", "gguf", "hub"]:
    """What a SOURCE is. A path on this machine comes before a Hub id of the same name.

    Raises:
        UserError: it can be none of the three, or a path is given a revision.
    """
    if not source:
        raise UserError("the SOURCE is empty; is a shell variable unset?")
    path = Path(source)
    if path.is_symlink() and not path.exists():
        raise UserError(f"{source} is a link that leads nowhere; mend it")
    if path.is_dir() or path.is_file():
        if revision:
            raise UserError(f"{source} is a path here, which has no revision {revision}; leave --revision out")
        if path.is_dir():
            return "folder"
        _check_gguf(path)
        return "gguf"
    if path.exists():
        raise UserError(f"{source} is a pipe or a device; give a checkpoint directory, a GGUF file or a Hub id")
    if not _HUB_ID.fullmatch(source):
        raise UserError(f"{source} does not exist; give a checkpoint directory, a GGUF file or a Hub id")
    return "hub"


def check_there(source: str | Path, *others: str | Path, revision: str | None = None) -> None:
    """Refuse, before any is opened, what is neither here nor the id of a Hub repository that can be reached.

    Args:
        revision: of the first.

    Raises:
        UserError, EnvironmentFailure: one is not there.
    """
    for number, name in enumerate(map(str, (source, *others))):
        its = None if number else revision
        if source_kind(name, its) == "hub":
            from huggingface_hub import HfApi, try_to_load_from_cache

            if isinstance(try_to_load_from_cache(name, "config.json", revision=its), str):
                continue  # it was fetched before
            with one_line_errors(name):  # a download would be tried again and again
                HfApi().model_info(name, revision=its, timeout=_PATIENCE)


def check_cached(source: str, revision: str | None = None) -> None:
    """Refuse a Hub id that was never fetched where the Hub may not be asked.

    Raises:
        EnvironmentFailure: HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE and not isinstance(
        try_to_load_from_cache(source, "config.json", revision=revision), str
    ):
        raise EnvironmentFailure(
            f"there is no {source} here, and the Hub cannot be reached as HF_HUB_OFFLINE is set; check the path, or "
            "unset it"
        )


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise UserError(f"{path} is a file but not GGUF; give a checkpoint's directory, or a GGUF file")
    if find_spec("gguf") is None:
        raise UserError("reading GGUF needs the gguf package; pip install 'kvfold[gguf]'")
    check_adapter(path.parent)


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
            _check_positive(folder / "config.json", part)
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
            _check_positive(path, part, f" in {name}")


def add_own_types(kind: str | None = None) -> None:
    """Make a model type known to transformers, if it is one of ours; all of ours, if it is not yet known."""
    for prefix, module in _OWN_TYPES.items():
        if kind is None or kind.startswith(prefix):
            import_module(module)


def read_config(folder: Path) -> Any:
    """The transformers config of a local checkpoint, defaults filled in.

    Refuses, in a line, what transformers would refuse with a page of text, or with a misleading line.

    Raises:
        UserError: there is none, transformers does not know it, or its numbers cannot be.
    """
    raw = read_raw_config(folder)
    with quiet():
        from transformers import CONFIG_MAPPING, AutoConfig, __version__
    add_own_types(kind := raw["model_type"])
    if kind not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise UserError(f"{folder} brings its own code ({kind}); kvfold runs stock transformers models only")
        near = did_you_mean(kind, CONFIG_MAPPING)
        near = near if near.startswith("; did") else "; a newer one may know it"  # all the names fill a page
        raise UserError(f"model type {kind!r} is unknown to transformers {__version__}{near}")
    with one_line_errors(folder), quiet():
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and the Hub's client from warning and drawing; our own errors say what matters."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def one_line_errors(model: str | Path, part: str = "") -> Iterator[None]:
    """Turn what transformers raises while it reads a user's files into our errors.

    Args:
        part: of the model that is read, such as "the tokenizer of ".

    Nothing but its code runs inside, so whatever it is, the checkpoint or the machine is the cause.
    """
    from huggingface_hub import errors as hub

    try:
        yield
    except KvfoldError:
        raise
    except Exception as error:
        chain = list(causes(error))

        def caused_by(*kinds: type) -> bool:
            return any(isinstance(cause, kinds) for cause in chain)

        if caused_by(hub.GatedRepoError):
            raise UserError(f"{model} is gated; ask for access on its page, then run hf auth login") from error
        if caused_by(hub.RepositoryNotFoundError):
            raise UserError(f"{model} is neither a path here nor a model on the Hub") from error
        if caused_by(hub.RevisionNotFoundError):
            raise UserError(f"{model} has no such revision; see its branches and tags on the Hub") from error
        status = next(filter(None, map(http_status, chain)), None)
        if status == 401:
            said = f"the Hub does not take the token, to see {model}; run hf auth login, or mend HF_TOKEN"
            raise UserError(said) from error
        if status in PASSING:
            said = f"the Hub is busy or in trouble (HTTP {status}); ask for {model} again later"
            raise EnvironmentFailure(said) from error
        # Without memory, the interpreter can fail before it has an error to raise.
        torch = sys.modules.get("torch")  # or it has raised nothing
        out_of_memory = (MemoryError, SystemError, *([torch.OutOfMemoryError] if torch else []))
        if caused_by(*out_of_memory) or "can't allocate memory" in str(error):
            raise EnvironmentFailure(f"{model} does not fit into memory; try a narrower --dtype") from error
        if not Path(model).exists() and (
            caused_by(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError, TimeoutError)
            or any(type(cause).__module__.startswith(("httpx", "httpcore", "requests")) for cause in chain)
        ):
            raise EnvironmentFailure(
                f"there is no {model} here, and the Hub cannot be reached; check the path or the network"
            ) from error
        if caused_by(UnpicklingError):
            raise UserError(
                f"the pickled weights of {model} cannot be read as plain weights, and could be code; save the model's "
                "state_dict as safetensors"
            ) from error
        if isinstance(error, OSError) and error.errno and not isinstance(error, FileNotFoundError):
            raise EnvironmentFailure(f"cannot read {model}: {error.strerror}") from error
        said = f"cannot load {part}{model} ({type(error).__name__}): {first_line(error).rstrip('.')}"
        raise UserError(f"{said}; mend it, or fetch it again") from error


def http_status(error: BaseException) -> int | None:
    """The status of the answer that an error of the Hub's client stands for, if any."""
    return getattr(getattr(error, "response", None), "status_code", None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it, the first of all last."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def first_line(message: object) -> str:
    """The start of a foreign message: its first line, and the next where it ends in a colon; the rest is advice."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(message))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return textwrap.shorten(" ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]), 200)
