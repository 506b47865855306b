"""The processes of a run: that they are as many as were asked for, and that they form one group.

accelerate (seen with 1.15) trains in one process, or in several that never meet, wherever it finds nothing to form
a group with, and says nothing: `accelerate launch --cpu --num_processes 2` starts a single process; with
`--multi_gpu` or `--use_fsdp` on a machine without a GPU it starts two, each of which takes itself for the only
one. It also leaves FSDP and DeepSpeed aside, in silence, when it computes on a CPU. So nothing is trained here
before the launcher's promise, the recipe's wish and what was found agree.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..common.errors import EnvironmentFailure, UserError
from ..common.parallel import Workers

if TYPE_CHECKING:
    from torch import nn

# How torchrun, and each MPI, tell a process of the others; the first that is set speaks.
_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
_MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT")
_WRAPPED = "FSDP_TRANSFORMER_CLS_TO_WRAP"


def check_world(expected: int | None) -> int:
    """Compare what the launcher promises with what the recipe asks for. Called before anything else in a run.

    What an MPI says is said again in torchrun's names, which is all that torch and `common.parallel` read.

    Args:
        expected: the recipe's `processes`; None for as many as there are.

    Returns:
        The processes that are promised. That they come is checked by `join`.

    Raises:
        UserError: they are not as many as the recipe asks for, or are spread in a way that is not supported.
        EnvironmentFailure: this is one of several processes that do not know of each other.
    """
    size, rank = _number(_SIZE), _number(_RANK)
    asked = expected or "N"
    if size is None and expected != 1 and all(name in os.environ for name in _MEETING_PLACE):
        raise EnvironmentFailure(
            f"a launcher chose a place to meet (MASTER_PORT {os.environ['MASTER_PORT']}) and no WORLD_SIZE: each of "
            f"its processes would train alone; launch with {torchrun(asked)}, or unset MASTER_ADDR and MASTER_PORT"
        )
    promised = 1 if size is None else size
    if expected is not None and promised != expected:
        way = f"launch with {torchrun(expected)}" if expected > 1 else "start it without a launcher"
        raise UserError(f"the recipe asks for {expected} processes and there are {promised}; {way}, or set processes")
    if promised < 1 or (promised > 1 and (rank is None or not 0 <= rank < promised)):
        said = "no RANK" if rank is None else f"RANK {rank}"
        raise EnvironmentFailure(
            f"the launcher says WORLD_SIZE {promised} and {said}; launch with {torchrun(asked)}, or unset WORLD_SIZE"
        )
    if promised > 1:
        os.environ |= {"WORLD_SIZE": str(promised), "RANK": str(rank), "LOCAL_RANK": str(_number(_LOCAL_RANK) or 0)}
    _check_sharding()
    return promised


def join(device: str) -> Workers:
    """Meet the other processes, and have accelerate compute where the recipe says.

    Afterwards `accelerate.Accelerator()` without arguments is right: on a CPU it forms a group, and FSDP 2 and
    DeepSpeed work there too, by gloo.

    Args:
        device: the recipe's; with several processes on accelerators, each takes that of its number.

    Raises:
        UserError: there is no such device.
        EnvironmentFailure: fewer processes came than were promised, or than there are devices for.
    """
    import torch

    from ..common.loading import resolve_device

    device = "cpu" if is_on("ACCELERATE_USE_CPU") else resolve_device(device)
    on_cpu = torch.device(device).type == "cpu"
    local = _number(_LOCAL_RANK) or 0
    if device.startswith("cuda") and local >= torch.cuda.device_count():
        raise EnvironmentFailure(
            f"this is process {local} of its machine, counted from 0, and there are {torch.cuda.device_count()} GPUs; "
            "start one process a GPU"
        )
    workers = Workers(device)
    if workers.size == 1 and ":" in device:
        os.environ["ACCELERATE_TORCH_DEVICE"] = device
    # Told to use a CPU, accelerate would leave DeepSpeed aside; that it computes there it has from the group.
    os.environ["ACCELERATE_USE_CPU"] = str(on_cpu and not is_on("ACCELERATE_USE_DEEPSPEED")).lower()
    if on_cpu and workers.size > 1:
        _shard_on_cpu()
    return workers


def check_fsdp(model: nn.Module, layer: str) -> None:
    """Tell FSDP which modules to shard one by one, unless the user did. A model on the meta device will do.

    Args:
        model: the model, or one of the same class and config.
        layer: the class name of its decoder layers.

    Raises:
        UserError: the user named a class that the model does not have.
    """
    if not is_on("ACCELERATE_USE_FSDP"):
        return
    names = [name.strip() for name in os.environ.get(_WRAPPED, "").split(",") if name.strip()]
    present = {type(module).__name__ for module in model.modules()}
    if missing := [name for name in names if name not in present]:
        raise UserError(
            f"the accelerate config wraps {missing[0]}, and {type(model).__name__} has none; its layers are {layer}: "
            "say fsdp_transformer_layer_cls_to_wrap so, or leave it out"
        )
    os.environ[_WRAPPED] = ",".join(names or [layer])


def sharding() -> str:
    """How the launcher's environment says that the processes share the work: a key of `plan.SHARDINGS`."""
    if is_on("ACCELERATE_USE_DEEPSPEED"):
        return f"zero{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    if is_on("ACCELERATE_USE_FSDP"):
        return "fsdp2"
    return "ddp" if (_number(_SIZE) or 1) > 1 else "single"


def torchrun(processes: int | str) -> str:
    """The command that starts so many processes wherever torch runs."""
    return f"torchrun --nproc_per_node {processes} -m kvfold.uptrain"


def is_on(name: str) -> bool:
    """Whether a variable of accelerate's says yes."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")


def _number(names: tuple[str, ...]) -> int | None:
    """What the first of these variables that is set says."""
    for name in names:
        if said := os.environ.get(name):
            try:
                return int(said)
            except ValueError:
                raise EnvironmentFailure(f"{name} is {said!r}, which is not a number; unset it") from None
    return None


def _check_sharding() -> None:
    """Refuse what the loop was not made for, before anything is loaded."""
    if is_on("ACCELERATE_USE_MEGATRON_LM"):
        raise UserError("Megatron-LM is not supported; use the accelerate config fsdp2 or deepspeed_zero3")
    if is_on("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError("FSDP 1 is not supported; write fsdp_version: 2 under fsdp_config, as the config fsdp2 does")
    if is_on("ACCELERATE_USE_DEEPSPEED") and find_spec("deepspeed") is None:
        raise UserError("the accelerate config asks for DeepSpeed, which is not installed; pip install deepspeed")


def _shard_on_cpu() -> None:
    """Have accelerate take its group of CPU processes for one that it can shard over.

    It sets FSDP and DeepSpeed up over groups of accelerators only, and replicates the model otherwise. Both run
    over gloo; all that is in the way is the name of the kind of group.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    kinds = {
        "ACCELERATE_USE_FSDP": DistributedType.MULTI_GPU,
        "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED,
    }
    for name, kind in kinds.items():
        if is_on(name):
            PartialState._shared_state["distributed_type"] = kind
