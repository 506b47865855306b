"""What a user may give as a SOURCE - a checkpoint directory, a GGUF file or a Hub id - and how each can be wrong.

Shared by everything that opens one: loading runs it, conversion streams it, inspection reads its headers.
"""

from __future__ import annotations

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
from .raw_config import check_adapter, read_raw_config

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_GGUF_MAGIC = b"GGUF"
_PATIENCE = 10.0  # seconds for the Hub to say that it knows a model
PASSING = frozenset({408, 429, 500, 502, 503, 504})  # answers of the Hub's that may be others in a while
# What the names of kvfold's own model types begin with, and the module that adds them to transformers: by name, as it
# stands a floor above.
_OWN_TYPES = {"mla_": "kvfold.attention.plain"}


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
