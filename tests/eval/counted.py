"""What torch's counter of floating-point operations counts in a real model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache


def prompt(model: Any, batch: int, tokens: int) -> dict[str, int]:
    """Of B sequences of T tokens at once, by the name of the module; of the whole model under "". Rotary angles are
    left out, which some releases of transformers make by a product of matrices."""
    with torch.no_grad():
        return _count(model, lambda: model(input_ids=_ids(model, batch, tokens), use_cache=False))


def step(model: Any, batch: int, tokens: int) -> int:
    """Of the last token of B sequences of T tokens, with the others in the cache."""
    ids = _ids(model, batch, tokens)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        output = model(input_ids=ids[:, :-1], use_cache=True, return_dict=True)
        (cache,) = (value for value in output.values() if isinstance(value, Cache))
        return _count(model, lambda: model(input_ids=ids[:, -1:], use_cache=True, **{name: cache}))[""]


def training(model: Any, batch: int, tokens: int) -> int:
    """Of a forward and a backward pass of B sequences of T tokens."""
    ids = _ids(model, batch, tokens)
    return _count(model, lambda: model(input_ids=ids, use_cache=False).logits.sum().backward())[""]


def _count(model: Any, run: Callable[[], Any]) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        run()
    root = type(model).__name__
    found = {
        name.removeprefix(root).removeprefix("."): sum(by_kind.values())
        for name, by_kind in counter.get_flop_counts().items()
        if name != "Global"
    }
    angles = sum(number for name, number in found.items() if name.endswith("rotary_emb"))
    return {**found, "": counter.get_total_flops() - angles}


def _ids(model: Any, batch: int, tokens: int) -> torch.Tensor:
    size = model.config.vocab_size
    return torch.randint(size, (batch, tokens), generator=torch.Generator().manual_seed(0))
