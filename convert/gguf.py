"""GGUF files as sources: their config for inspection, their weights dequantised for conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.raw_config import check_most
from ..common.sources import one_line_errors, quiet
from .gguf_header import read_gguf_headers


def shortest(value: Any) -> Any:
    """Undo GGUF's fp32 metadata: the shortest decimal that is the same fp32 number (9.9999997e-06 -> 1e-05)."""
    import numpy

    if isinstance(value, dict):
        return {key: shortest(entry) for key, entry in value.items()}
    return float(str(numpy.float32(value))) if isinstance(value, float) else value


def read_gguf_config(path: Path) -> Any:
    """The transformers config that a GGUF file describes, without reading its weights.

    Raises:
        UserError: transformers does not know its architecture, or the file is damaged.
    """
    from transformers import AutoConfig

    read_gguf_headers(path)  # or transformers takes counts as they stand
    with one_line_errors(path), quiet():
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    check_most(path, config.to_dict())
    for key, value in config.to_dict().items():
        if value != (short := shortest(value)):
            setattr(config, key, short)
    return config


def dequantise(path: Path, folder: Path, *, dtype: str = "float32") -> None:
    """Write a GGUF file's model and tokenizer as a normal checkpoint.

    Raises:
        UserError: see `read_gguf_config`.
    """
    config = read_gguf_config(path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with one_line_errors(path), quiet():
        given = {"gguf_file": path.name}
        model = AutoModelForCausalLM.from_pretrained(path.parent, **given, dtype=dtype, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **given, trust_remote_code=False)
    # The weights are plain now, and transformers refuses to save them while the config says otherwise.
    for holder in (config, model.config):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    model.hf_quantizer = None
    for key, value in config.to_dict().items():
        if value != model.config.to_dict().get(key):
            setattr(model.config, key, value)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
