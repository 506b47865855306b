"""The result of a conversion as a model that runs, before it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..config import from_raw
from ..latent_families import KNOWN
from ..stream import Output, compute
from .calibrate import Runner
from .layers import LayeredModel
from .reader import full_names, model_reader


def result_model(
    runner: Runner, outputs: Sequence[Output], config: dict[str, Any], dtype: torch.dtype
) -> tuple[LayeredModel, dict[str, str]]:
    """The model whose layers are computed from the source when they are loaded.

    Args:
        runner: of the source.
        outputs: the result's tensors.
        config: its config.json.

    Returns:
        The model, and the names of its tensors in the result by those that it has for them.
    """
    checkpoint, family, target = runner.source.checkpoint, KNOWN[config["model_type"]], from_raw(config)
    made = {output.name: output for output in outputs}
    promised = family.promises(target, checkpoint.tensors)
    names = full_names({name: promise for name, promise in promised.items() if name in made})
    read = model_reader(family, names, lambda name: compute(made[name], checkpoint), runner.experts)
    return LayeredModel(target, family.layers, read, dtype=dtype, device=runner.device), names
