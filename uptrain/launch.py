"""Choose what really starts the processes of a run, and start it.

On GPUs that is `accelerate launch`. On a CPU it is torchrun, because accelerate starts a single process there whatever
number it is given (see `processes`); a single process needs neither. Whatever is chosen, the run is told how many
processes it must find itself in.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import UserError, did_you_mean
from ..common.launcher import Command, launch
from ..common.text import check_text
from ..common.typed import load_yaml
from ..convert.directory import check_paths
from ..convert.source import check_source
from .processes import is_on
from .recipe import Recipe, read_recipe

CONFIGS = Path(__file__).parent.parent / "recipes" / "accelerate"
MODULE = "kvfold.uptrain"

# Keys of an accelerate config that start other programs, or send the run away, and what they may say all the same.
_FOREIGN = {"compute_environment": "LOCAL_MACHINE", "commands": None, "command_file": None}

_ALONE = ("NO", "MULTI_CPU")  # accelerate's kinds of training for which it starts one process, whatever their number
# Seconds that torchrun lets the processes save after a signal before it kills them; 30 by itself.
# And with a store of its own, processes that it starts again find each other.
_TORCHRUN = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_SHORT_OF_MEMORY = "lower micro_batch_size, or set gradient_checkpointing"


@dataclass(frozen=True)
class Settings:
    """What matters here of an accelerate config.

    Attributes:
        path: its file.
        kind: accelerate's `distributed_type`.
        processes: over all machines; None if it does not say.
        machines: how many.
        on_cpu: whether it forces the CPU.
    """

    path: Path
    kind: str
    processes: int | None
    machines: int
    on_cpu: bool


def config_names() -> list[str]:
    """The accelerate configs that come with kvfold."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def read_settings(name: str | Path) -> Settings:
    """Find an accelerate config by the name of one that comes with kvfold, or by its path.

    Raises:
        UserError: there is none, or it is none.
    """
    path = CONFIGS / f"{name}.yaml" if str(name) in config_names() else Path(name)
    if not path.is_file():
        raise UserError(f"no accelerate config {str(name)!r}{did_you_mean(str(name), config_names())}, or give a file")
    table = load_yaml(path.read_bytes(), str(path))
    kind = table.get("distributed_type") if isinstance(table, dict) else None
    if not isinstance(kind, str):
        raise UserError(f"{path} names no distributed_type; `accelerate config` writes such a file")
    if foreign := [key for key in _FOREIGN if table.get(key) not in (None, "", "null", "~", [], _FOREIGN[key])]:
        raise UserError(f"{path} says {foreign[0]}, which runs something else or elsewhere; remove it")
    try:
        processes, machines = int(table.get("num_processes", -1)), int(table.get("num_machines", 1))
    except (TypeError, ValueError):
        raise UserError(f"{path}: num_processes and num_machines must be whole numbers") from None
    on_cpu = str(table.get("use_cpu", "")).lower() in ("true", "yes", "on", "1")
    return Settings(path, kind.upper(), processes if processes > 0 else None, max(1, machines), on_cpu)


def launch_command(
    config: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    accelerate: str | Path | None = None,
    num_processes: int | None = None,
    dry_run: bool = False,
    as_json: bool = False,
) -> Command:
    """The command that starts a run. What can be told wrong without opening the model is told here.

    Args:
        config: the recipe's file; None if the overrides say everything.
        overrides: ``key=value`` pairs, see `recipe.read_recipe`.
        accelerate: an accelerate config: the name of one that comes with kvfold, or a file. None for the recipe's; if
            that names none either, one process on a CPU, and all GPUs, with the whole model on each, where there are
            some.
        num_processes: over all machines; None for as many as the recipe asks for, else the accelerate config.
        dry_run, as_json: handed on.

    Raises:
        UserError: the recipe or the accelerate config is wrong, or they ask for what cannot be started here.
    """
    recipe = read_recipe(config, overrides)
    for source, revision in ((recipe.model, recipe.revision), (recipe.teacher, recipe.teacher_revision)):
        if source:
            check_source(source, revision)
    check_paths(recipe.model, recipe.out, overwrite=recipe.overwrite)
    for text in (*recipe.data, *recipe.eval_text):
        check_text(text)
    settings, processes, gpus = spread(recipe, accelerate=accelerate, num_processes=num_processes)
    overrides = [*overrides, f"processes={processes}"]
    read_recipe(config, overrides)  # whether the windows of a step divide among them

    run = [MODULE, *([] if config is None else ["--config", str(config)]), *overrides]
    run += ["--dry-run"] * dry_run + ["--json"] * as_json
    env = {**_TORCHRUN, **os.environ}
    if not gpus:
        env["ACCELERATE_USE_CPU"] = "true"
        machines = settings.machines if settings else 1
        if processes > 1:  # or each would start as many threads as there are cores
            env.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // -(-processes // machines))))
    return Command((sys.executable, "-m", *_starter(settings, processes, bool(gpus)), *run), env)


def spread(
    recipe: Recipe, *, accelerate: str | Path | None = None, num_processes: int | None = None
) -> tuple[Settings | None, int, int]:
    """How a run is spread: its accelerate config, its processes over all machines, and the GPUs of this one.

    Raises:
        UserError: that cannot be here.
    """
    accelerate = accelerate or recipe.accelerate
    settings = None if accelerate is None else read_settings(accelerate)
    asked = _asked(recipe, num_processes)
    gpus = 0 if _wants_cpu(recipe, settings) else _count_gpus()
    if not gpus and recipe.device.startswith("cuda"):
        raise UserError(f"device {recipe.device!r} is not available here; try device=cpu, or leave device out")
    processes = _count_processes(recipe, settings, asked, gpus)
    if processes > 1 and settings is None and gpus:
        settings = read_settings("ddp")
    return settings, processes, gpus


def launch_run(command: Command) -> int:
    """Run a command of `launch_command`; see `common.launcher.launch`."""
    return launch(command, short_of_memory=_SHORT_OF_MEMORY)


def _asked(recipe: Recipe, num_processes: int | None) -> int | None:
    """The number of processes that is asked for by name, if it is."""
    if num_processes is None:
        return recipe.processes
    if num_processes < 1:
        raise UserError(f"--num-processes is {num_processes}; it must be at least 1")
    if recipe.processes not in (None, num_processes):
        raise UserError(
            f"the recipe asks for {recipe.processes} processes and --num-processes for {num_processes}; leave one out"
        )
    return num_processes


def _wants_cpu(recipe: Recipe, settings: Settings | None) -> bool:
    return recipe.device == "cpu" or is_on("ACCELERATE_USE_CPU") or (settings is not None and settings.on_cpu)


def _count_processes(recipe: Recipe, settings: Settings | None, asked: int | None, gpus: int) -> int:
    """How many processes to start, over all machines."""
    here = max(1, gpus) if recipe.device in ("auto", "cuda") else 1
    processes = asked or here
    if settings is not None:
        if asked is None and not gpus and not settings.on_cpu:
            raise UserError(f"{settings.path.name} is for GPUs and none is used; say --num-processes to use the CPU")
        if asked is None and settings.processes is None:
            raise UserError(f"{settings.path} says no num_processes; say --num-processes")
        processes = asked or settings.processes or 1
    machines = settings.machines if settings else 1
    if processes % machines:
        raise UserError(f"{processes} processes do not divide among {machines} machines; say --num-processes")
    if gpus and processes // machines > gpus:
        raise UserError(f"{processes // machines} processes a machine and {gpus} GPUs; say --num-processes {gpus}")
    if processes > 1 and ":" in recipe.device:
        raise UserError(f"device {recipe.device} is one, and there are {processes} processes; leave device out")
    if processes > 1 and gpus and settings is not None and settings.kind in _ALONE:
        raise UserError(
            f"{settings.path.name} is for one process (distributed_type {settings.kind}) and {processes} are asked "
            "for; take --accelerate ddp or fsdp2"
        )
    return processes


def _starter(settings: Settings | None, processes: int, on_gpus: bool) -> list[str]:
    """What stands between `python -m` and the run."""
    alone = settings is None or settings.kind in _ALONE
    if settings is not None and alone and settings.machines > 1:
        raise UserError(
            f"{settings.path} spreads a run over {settings.machines} machines, and accelerate forms no group of "
            "CPUs; start torchrun --nnodes on each"
        )
    if alone and processes > 1 and not on_gpus:
        count = str(processes)
        return [f"{MODULE}.agent", "torchrun", "--standalone", "--nproc_per_node", count, "-m"]
    if settings is None:
        return []
    file, count = str(settings.path), str(processes)
    return [f"{MODULE}.agent", "accelerate", "--config_file", file, "--num_processes", count, "-m"]


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
