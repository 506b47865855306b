"""How a run computes: its precision, the accelerator for it, and what that makes of a model's frozen weights."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..common.errors import UserError
from .recipe import Recipe

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def choose_precision(asked: str, device: str) -> str:
    """The precision of a run's computation: the recipe's, else the launcher's, else the best for the device."""
    if asked != "auto":
        return asked
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    if launched not in ("no", *DTYPES):
        raise UserError(f"mixed_precision {launched} of the accelerate config is not supported; say bf16, fp16 or no")
    if launched != "no":
        return launched
    return "bf16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "fp32"


def make_accelerator(recipe: Recipe, precision: str, folder: Path) -> Accelerator:
    """The accelerator of a run, in the group that `processes.join` has formed.

    Raises:
        UserError: a tracker is not installed, or the device does not compute in the precision.
    """
    if precision == "fp16" and PartialState().device.type == "cpu":
        raise UserError("a CPU computes fp16 as fp32; take precision=bf16 or fp32")
    available = {str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()}
    if missing := [name for name in recipe.track if name not in available]:
        raise UserError(f"the tracker {missing[0]} is not installed; pip install it, or leave it out of track")
    warnings.filterwarnings("ignore", message=r".*broadcast_buffers", category=FutureWarning)  # accelerate's own
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        log_with=list(recipe.track) or None,
        project_dir=str(folder) if recipe.track else None,
        # Gradients are kept in the buckets that travel, once instead of twice.
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)],
    )
    if accelerator.is_fsdp2 and precision != "fp32":  # by itself it would sum gradients, and give losses, in 16 bits
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, DTYPES[precision]), reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    if recipe.track:
        plain = {key: value for key, value in recipe.identity().items() if isinstance(value, bool | int | float | str)}
        accelerator.init_trackers("kvfold", config=plain)
    return accelerator


def lower_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold the weights of frozen linear modules in the dtype that they are multiplied in.

    Autocast would round them to it at every use, so nothing changes but the memory and the time. Embeddings and norms
    stay: what they give is added up in fp32.
    """
    embeddings = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            for parameter in module.parameters(recurse=False):
                if not parameter.requires_grad and id(parameter) not in embeddings:
                    parameter.data = parameter.data.to(dtype)


def checkpoint_activations(model: Any) -> None:
    """Have a model recompute its activations in the backward pass."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name from transformers 5.24 on
    enable = enable or partial(
        model.gradient_checkpointing_enable, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    enable()
