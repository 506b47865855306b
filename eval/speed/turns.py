"""Several models on one clock: each takes its turn, block by block, and none always follows the same other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .floors import Gauge
from .runs import Decoder, decoding, prompt_seconds

WARM_TOKENS = 128  # of the prompt that warms up a CPU
PROMPT_SECONDS = 20.0  # that the counted prompts of all models take before no further turn begins


@dataclass(frozen=True)
class Point:
    """What one context and batch size gave: seconds of each model's counted blocks and prompts, turn by turn."""

    context: int
    batch_size: int
    blocks: Mapping[str, list[float]]
    prompts: Mapping[str, list[float]]


def decode_in_turn(
    models: Mapping[str, Any],
    context: int,
    batch_size: int,
    steps: int,
    runs: int,
    expand: Collection[str],
    cuda_graphs: bool,
    gauge: Gauge,
    told: Callable[[int], None],
) -> dict[str, list[float]]:
    """Seconds of every counted block, by model; the device is gauged after each turn of all models."""
    decoders = {}
    for name, model in models.items():
        with decoding(model, expand=name in expand):
            decoders[name] = Decoder(model, batch_size=batch_size, context=context, steps=steps, graph=cuda_graphs)
            decoders[name].block()
    gauge.take()
    told(1)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for run in range(runs):
        for name in _turned(models, run):
            with decoding(models[name], expand=name in expand):
                seconds[name].append(decoders[name].block())
        gauge.take()
        told(run + 2)
    return seconds


def read_in_turn(
    models: Mapping[str, Any],
    context: int,
    batch_size: int,
    runs: int,
    expand: Collection[str],
    told: Callable[[int], None],
) -> dict[str, list[float]]:
    """Seconds of every counted prompt, by model."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    prompts = {}
    for name, model in models.items():
        rows = model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(rows, (batch_size, context), generator=torch.Generator().manual_seed(0))
        prompts[name] = ids.to(model.device)
        # An accelerator's libraries choose what to run by the shapes; a CPU only needs its memory.
        warm = prompts[name][:, :WARM_TOKENS] if model.device.type == "cpu" else prompts[name]
        if runs:
            with decoding(model, expand=name in expand):
                prompt_seconds(model, warm)
    for run in range(runs):
        for name in _turned(models, run):
            with decoding(models[name], expand=name in expand):
                seconds[name].append(prompt_seconds(models[name], prompts[name]))
        told(run + 1)
        if sum(map(sum, seconds.values())) > PROMPT_SECONDS:
            break
    return seconds


def _turned(models: Mapping[str, Any], run: int) -> list[str]:
    """The models' names, each first in its turn, so that none always follows the same other."""
    names = list(models)
    first = run % len(names)
    return names[first:] + names[:first]
