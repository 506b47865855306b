"""Open a model or a tokenizer: a checkpoint directory, a GGUF file or a Hub id, in stock classes only.

transformers fills tensors that a checkpoint lacks with random numbers and drops those it has no place for.
Here either is an error that names them: a figure measured on half a checkpoint is worse than none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import EnvironmentFailure, KvfoldError, UserError, did_you_mean

FLOATS = ("bfloat16", "float16", "float32", "float64")
DTYPES = ("auto", "checkpoint", *FLOATS)

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json", "*.tiktoken"),
)


def load_model(model: str | Path, *, dtype: str = "auto", device: str = "auto", revision: str | None = None):
    """Load a causal language model, whole and in evaluation mode.

    Args:
        model: a checkpoint directory, a `.gguf` file, or a Hub id where no such path exists.
        dtype: `float32` etc.; `checkpoint` for the one it is stored in; `auto` for float32 on a CPU and the
            stored one on an accelerator.
        device: as torch names it; `auto` for CUDA where there is one, else the CPU. MPS must be asked for, as
            it lacks float64 and rounds differently.
        revision: branch, tag or commit of a Hub id.

    Returns:
        The `PreTrainedModel`.

    Raises:
        UserError: there is no such checkpoint, it is broken, or its weights do not match its config.
        EnvironmentFailure: the Hub cannot be reached, the memory does not suffice, or a file cannot be read.
    """
    import torch

    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}{did_you_mean(dtype, DTYPES)}")
    device = _resolve_device(device)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "checkpoint"
    source, options = _locate(str(model), revision)
    with _one_line_errors(model), _quiet():
        from transformers import AutoModelForCausalLM

        loaded, info = AutoModelForCausalLM.from_pretrained(
            source,
            **options,
            dtype="auto" if dtype == "checkpoint" else getattr(torch, dtype),
            device_map=device,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they come back by name; they are refused below
        )
    _refuse_mismatch(model, loaded, info)
    return loaded


def load_tokenizer(model: str | Path, *, revision: str | None = None):
    """Load the tokenizer that belongs to a model, given as in `load_model`.

    Raises:
        UserError: there is none.
        EnvironmentFailure: the Hub cannot be reached, or a file cannot be read.
    """
    source, options = _locate(str(model), revision)
    folder = Path(model)
    # transformers would build an empty tokenizer for some families.
    if folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
        raise UserError(f"{model} has no tokenizer; copy the source's tokenizer files into it")
    with _one_line_errors(model), _quiet():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source, **options, trust_remote_code=False)


def _resolve_device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f"device {device!r} is not available here; try --device cpu") from None
    return device


def _locate(model: str, revision: str | None) -> tuple[str, dict[str, str]]:
    """What to give to `from_pretrained`: its first argument, and the options that go with it."""
    path = Path(model)
    if revision and path.exists():
        raise UserError(f"{model} is a path here, which has no revision {revision}; leave --revision out")
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{model} is a file; give the checkpoint's directory, or a .gguf file")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        _check_config(model, path / "config.json")
        return model, {}
    if not _HUB_ID.fullmatch(model):
        raise UserError(f"{model} does not exist; give a checkpoint directory, a .gguf file or a Hub id")
    return model, {"revision": revision} if revision else {}


def _check_config(model: str, path: Path) -> None:
    """Refuse a directory that transformers would refuse with a page of text, or with a misleading line."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{model} has no config.json; give a transformers checkpoint's directory") from None
    except ValueError:
        raise UserError(f"{path} is not valid JSON; copy it again from its source") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise UserError(f"{path} names no model_type, so no class can be chosen for it")
    with _quiet():
        from transformers import CONFIG_MAPPING, __version__
    if kind in CONFIG_MAPPING:
        return
    if "auto_map" in config:
        raise UserError(f"{model} brings its own code ({kind}); kvfold runs stock transformers models only")
    near = did_you_mean(kind, CONFIG_MAPPING)
    near = near if near.startswith("; did") else "; a newer one may know it"  # all the names fill a page
    raise UserError(f"model type {kind!r} is unknown to transformers {__version__}{near}")


def _refuse_mismatch(model: str | Path, loaded, info: dict) -> None:
    """Raise unless every tensor of the checkpoint was used, and every one of the model was read.

    A tied head may be absent, and a buffer present: older checkpoints store the masks and rotary tables that
    newer classes compute.
    """
    if wrong := sorted(info["mismatched_keys"]):
        name, stored, expected = wrong[0]
        also = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(
            f"{model}: {name}{also} is {list(stored)} in the weights but {list(expected)} by its config, "
            "which may be another model's"
        )
    if missing := info["missing_keys"]:
        raise UserError(f"{model}: the weights lack {_some(missing)}; its config may be another model's")
    if unexpected := set(info["unexpected_keys"]) - {name for name, _ in loaded.named_buffers()}:
        raise UserError(
            f"{model}: the weights hold {_some(unexpected)}, for which its config has no place; "
            "it may be another model's"
        )
    if info["error_msgs"]:
        raise UserError(f"{model}: {_first_line(info['error_msgs'][0])}")


def _some(names: Iterable[str], shown: int = 3) -> str:
    names = sorted(names)
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more tensors" if more > 0 else "")


@contextmanager
def _quiet() -> Iterator[None]:
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
def _one_line_errors(model: str | Path) -> Iterator[None]:
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
        causes = list(_causes(error))

        def caused_by(*kinds: type) -> bool:
            return any(isinstance(cause, kinds) for cause in causes)

        if caused_by(hub.GatedRepoError):
            raise UserError(
                f"{model} is gated; ask for access on its page, then run hf auth login"
            ) from error
        if caused_by(hub.RepositoryNotFoundError):
            raise UserError(f"{model} is neither a path here nor a model on the Hub") from error
        if caused_by(hub.RevisionNotFoundError):
            raise UserError(f"{model} has no such revision; see its branches and tags on the Hub") from error
        if caused_by(MemoryError, torch.OutOfMemoryError):
            raise EnvironmentFailure(f"{model} does not fit into memory; try a narrower --dtype") from error
        if not Path(model).exists() and (
            caused_by(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError, TimeoutError)
            or any(type(cause).__module__.split(".")[0] in ("httpx", "requests") for cause in causes)
        ):
            raise EnvironmentFailure(
                f"there is no {model} here, and the Hub cannot be reached; check the path or the network"
            ) from error
        if isinstance(error, OSError) and error.errno and not isinstance(error, FileNotFoundError):
            raise EnvironmentFailure(f"cannot read {model}: {error.strerror}") from error
        if "gguf" in str(error).lower() and caused_by(ImportError):
            raise UserError("reading GGUF needs the gguf package; pip install 'kvfold[gguf]'") from error
        raise UserError(f"cannot load {model} ({type(error).__name__}): {_first_line(error)}") from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(message: object) -> str:
    """The first line of a foreign message, and the next where it ends in a colon; the rest is advice."""
    lines = [line.strip() for line in str(message).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
