"""Open a model or a tokenizer: a checkpoint directory, a GGUF file or a Hub id, in stock classes only.

transformers fills tensors that a checkpoint lacks with random numbers and drops those it has no place for.
Here either is an error that names them: a figure measured on half a checkpoint is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .errors import UserError, did_you_mean
from .raw_config import read_raw_config
from .sources import add_own_types, first_line, one_line_errors, quiet, read_config, source_kind

FLOATS = ("bfloat16", "float16", "float32", "float64")
DTYPES = ("auto", "checkpoint", *FLOATS)

_DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu")

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json", "*.tiktoken"),
)


def load_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    fits: Callable[[Any], object] | None = None,
):
    """Load a causal language model, whole and in evaluation mode.

    Args:
        model: a checkpoint directory, a `.gguf` file, or a Hub id where no such path exists.
        dtype: `float32` etc.; `checkpoint` for the one it is stored in; `auto` for float32 on a CPU and the
            stored one on an accelerator.
        device: as torch names it; `auto` for CUDA where there is one, else the CPU. MPS must be asked for, as
            it lacks float64 and rounds differently.
        revision: branch, tag or commit of a Hub id.
        fits: told the config before any weights are read; raises what does not fit it.

    Returns:
        The `PreTrainedModel`.

    Raises:
        UserError: there is no such checkpoint, it is broken, or its weights do not match its config.
        EnvironmentFailure: the Hub cannot be reached, the memory does not suffice, or a file cannot be read.
    """
    import torch

    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}{did_you_mean(dtype, DTYPES)}")
    device = resolve_device(device)
    if dtype == "auto":
        dtype = "float32" if torch.device(device).type == "cpu" else "checkpoint"
    source, options = _locate(str(model), revision)
    if fits is not None:
        with one_line_errors(model), quiet():
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(source, **options, trust_remote_code=False)
        fits(config)
    with one_line_errors(model), quiet():
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
    allow_dtype(loaded, loaded.dtype)
    return loaded


def allow_dtype(model, dtype) -> None:
    """Let a model run in a torch dtype that its experts' default, a grouped product, does not have: fp64."""
    import torch

    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


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
    with one_line_errors(model, "the tokenizer of "), quiet():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source, **options, trust_remote_code=False)


def resolve_device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(device).type not in _DEVICES:
            raise RuntimeError
        torch.empty(0, device=device)
    except Exception:  # each back-end has its own way to be missing
        raise UserError(f"device {device!r} is not available here; try --device cpu") from None
    return device


def _locate(model: str, revision: str | None) -> tuple[str, dict[str, str]]:
    """What to give to `from_pretrained`: its first argument, and the options that go with it."""
    kind = source_kind(model, revision)
    if kind == "gguf":
        return str(Path(model).parent), {"gguf_file": Path(model).name}
    if kind == "folder":
        read_config(Path(model))
        return model, {}
    add_own_types()
    with one_line_errors(model), quiet():
        from huggingface_hub import hf_hub_download
        from transformers.utils import find_adapter_config_file

        config = Path(hf_hub_download(model, "config.json", revision=revision))
        adapter = find_adapter_config_file(model, revision=revision)
    if adapter is not None:
        raise UserError(f"{model} holds a PEFT adapter; merge it into its base model first")
    read_raw_config(config.parent)
    return model, {"revision": revision} if revision else {}


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
        raise UserError(f"{model}: {first_line(info['error_msgs'][0])}")


def _some(names: Iterable[str], shown: int = 3) -> str:
    names = sorted(names)
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more tensors" if more > 0 else "")
