"""What a user may give as a SOURCE - a checkpoint directory, a GGUF file or a Hub id - and how each can be wrong.

Shared by everything that opens one: loading runs it, conversion streams it, inspection reads its headers.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from .errors import EnvironmentFailure, KvfoldError, UserError, did_you_mean

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_GGUF_MAGIC = b"GGUF"
_PATIENCE = 10.0  # seconds for the Hub to say that it knows a model
PASSING = frozenset({408, 429, 500, 502, 503, 504})  # answers of the Hub's that may be others in a while
# What the names of kvfold's own model types begin with, and the module that adds them to transformers: by name, as it
# stands a floor above.
_OWN_TYPES = {"mla_": "kvfold.attention.plain"}
_COUNTS = frozenset(
    {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"}
    | {"n_layer", "n_embd", "n_head"}
)


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


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise UserError(f"{path} is a file but not GGUF; give a checkpoint's directory, or a GGUF file")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError("reading GGUF needs the gguf package; pip install 'kvfold[gguf]'") from None


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object from a file of the user's.

    Raises:
        UserError: it is missing, is not a JSON object, or says the same key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path}: the {what} says {twice!r} twice; remove one")
        return table

    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=unique)
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
    """A local checkpoint's config.json as it stands, with a model type and sensible counts.

    Raises:
        UserError: there is none, or what it says cannot be.
    """
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise UserError(f"{folder} is a PEFT adapter, not a model; merge it into its base model first")
    raw = read_json(folder / "config.json", "config")
    if not isinstance(raw.get("model_type"), str):
        raise UserError(f"{folder / 'config.json'} names no model_type, so no class can be chosen for it")
    for name in _COUNTS.intersection(raw):
        if raw[name] is not None and (type(raw[name]) is not int or raw[name] < 1):
            raise UserError(f"{folder / 'config.json'} says {name} = {raw[name]!r}; it must be a positive number")
    return raw


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
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def one_line_errors(model: str | Path) -> Iterator[None]:
    """Turn what transformers raises while it reads a user's files into our errors.

    Nothing but its code runs inside, so whatever it is, the checkpoint or the machine is the cause.
    """
    import torch
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
        if caused_by(MemoryError, SystemError, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise EnvironmentFailure(f"{model} does not fit into memory; try a narrower --dtype") from error
        if not Path(model).exists() and (
            caused_by(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError, TimeoutError)
            or any(type(cause).__module__.startswith(("httpx", "httpcore", "requests")) for cause in chain)
        ):
            raise EnvironmentFailure(
                f"there is no {model} here, and the Hub cannot be reached; check the path or the network"
            ) from error
        if isinstance(error, OSError) and error.errno and not isinstance(error, FileNotFoundError):
            raise EnvironmentFailure(f"cannot read {model}: {error.strerror}") from error
        raise UserError(f"cannot load {model} ({type(error).__name__}): {first_line(error)}") from error


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
