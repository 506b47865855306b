"""How fast models read a prompt and decode, side by side, and how close they come to what the machine can do.

All models run in one process and take turns, block by block, so that the machine's moods hit all alike; what a
device copies and multiplies in a second is measured in between (see `floors`). The first block of each is not counted.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import UserError
from ...common.kvcache import cached_tokens, context_length, kv_elements
from ...common.loading import load_model
from ...common.parallel import is_alone, promised_size
from ...common.progress import Progress
from ...convert.check import check_readable
from ..shape import read_any_config
from .record import SpeedProtocol, SpeedReport, SpeedRow

if TYPE_CHECKING:
    import torch

    from .floors import Gauge
    from .footprint import Footprint
    from .turns import Point

DEFAULT_CONTEXTS = (512, 1024, 4096)
LEAST_MEMORY = 2**20  # bytes; less is a number of other units


def speed(
    models: Sequence[str | Path],
    *,
    context: Sequence[int] = (),
    batch_size: Sequence[int] = (1,),
    steps: int = 8,
    runs: int = 5,
    memory: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    absorb: bool = True,
    revision: str | None = None,
    progress: Progress | None = None,
) -> SpeedReport:
    """Time checkpoints side by side.

    Args:
        models: directories, GGUF files or Hub ids; ratios are to the first.
        context: tokens of a prompt, and cached ones that decoding begins with; by default those of 512, 1024 and 4096
            that every model takes.
        batch_size: sequences at a time.
        steps: tokens of a block. A number that is given twice is timed once, as of contexts.
        runs: counted blocks of each model at each context and batch size.
        memory: bytes to say the largest batch and context for.
        revision: of the first model, if it is a Hub id.
        dtype, device: see `common.loading.load_model`.
        absorb: whether models with latents decode without expanding them.
        progress: called with `(turns done, turns in all)`.

    Raises:
        UserError: a number does not fit a model, which is said before any weights are read if a config tells, or a
            model is given twice.
        EnvironmentFailure: see `load_model`.
    """
    _refuse_company()
    names = [str(model) for model in models]
    _refuse_twice(names)
    _check_numbers(batch_size, context, steps=steps, runs=runs, memory=memory)
    revisions = {name: None if number else revision for number, name in enumerate(names)}
    configs = {name: read_any_config(name, of) for name, of in revisions.items()}
    for name, config in configs.items():
        check_readable(name, config)
    _fit(configs, context, steps)
    loaded = {name: load_model(name, dtype=dtype, device=device, revision=of) for name, of in revisions.items()}
    return measure_speed(
        loaded,
        contexts=context,
        batch_sizes=batch_size,
        steps=steps,
        runs=runs,
        memory_budget=memory,
        expand=() if absorb else names,
        progress=progress,
    )


def measure_speed(
    models: Mapping[str, Any],
    *,
    contexts: Sequence[int] = (),
    batch_sizes: Sequence[int] = (1,),
    steps: int = 8,
    runs: int = 5,
    prefill_runs: int = 3,
    memory_budget: int | None = None,
    expand: Collection[str] = (),
    cuda_graphs: bool = False,
    gauge: Gauge | None = None,
    progress: Progress | None = None,
) -> SpeedReport:
    """Time loaded models side by side; they are left as they were.

    Args:
        models: by name; ratios are to the first. One model may have several names.
        prefill_runs: prompts of each model at each context and batch size, at most; 0 for none.
        memory_budget: `memory` of `speed`.
        expand: names of those that decode with their latents expanded.
        cuda_graphs: replay steps from CUDA graphs, as launching them one by one takes longer than small ones run.
        gauge: measures the device; one for it and the models' dtype by default.

    The rest is as in `speed`.

    Raises:
        UserError: a number does not fit a model, or models differ in dtype or device.
    """
    from .floors import Gauge
    from .footprint import measure_footprint
    from .turns import Point, decode_in_turn, read_in_turn

    _refuse_company()
    _check_numbers(batch_sizes, contexts, steps=steps, runs=runs, memory=memory_budget)
    contexts = _fit({name: model.config for name, model in models.items()}, contexts, steps)
    batch_sizes = list(dict.fromkeys(batch_sizes))
    device, dtype = _common_ground(models)
    if cuda_graphs and device.type != "cuda":
        raise UserError(f"CUDA graphs need a CUDA device, and these models are on {device}; go without")
    footprints = {name: measure_footprint(model, name=name) for name, model in models.items()}
    gauge = gauge or Gauge(device, dtype)
    total = len(contexts) * len(batch_sizes) * (runs + 1 + prefill_runs)
    points: list[Point] = []
    for number, (context, batch_size) in enumerate(product(contexts, batch_sizes)):
        done = number * (runs + 1 + prefill_runs)

        def told(turns: int, done: int = done) -> None:
            if progress:
                progress(done + turns, total)

        blocks = decode_in_turn(models, context, batch_size, steps, runs, expand, cuda_graphs, gauge, told)
        prompts = read_in_turn(models, context, batch_size, prefill_runs, expand, lambda n: told(runs + 1 + n))
        points.append(Point(context, batch_size, blocks, prompts))
        told(runs + 1 + prefill_runs)
    return SpeedReport(
        results=[
            _row(name, model, point, steps, footprints[name], gauge, memory_budget, name in expand)
            for point in points
            for name, model in models.items()
        ],
        copy_bytes_per_second=gauge.copy_bytes_per_second,
        matrix_flops_per_second=gauge.matrix_flops_per_second,
        memory_budget_bytes=memory_budget,
        protocol=_protocol(device, dtype, steps, runs, prefill_runs, cuda_graphs),
    )


def _row(
    name: str,
    model: Any,
    point: Point,
    steps: int,
    footprint: Footprint,
    gauge: Gauge,
    memory: int | None,
    expand: bool,
) -> SpeedRow:
    from .floors import step_work
    from .runs import decoding_of

    context, batch_size = point.context, point.batch_size
    kind = decoding_of(model, expand=expand)
    cached = footprint.cache_bytes(context)
    work = step_work(model, kind, context=context, batch_size=batch_size, cache_bytes=cached)
    floors = {
        "memory": 1e3 * (work.weight_bytes + work.cache_bytes) / gauge.copy_bytes_per_second,
        "arithmetic": 1e3 * work.flops / gauge.matrix_flops_per_second,
    }
    bound = max(floors, key=lambda floor: floors[floor])
    step = [1e3 * seconds / steps for seconds in point.blocks[name]]
    first = next(iter(point.blocks.values()))
    prefill = _spread([batch_size * context / seconds for seconds in point.prompts[name]])
    median, least, most = _spread(step)
    return SpeedRow(
        model=name,
        decoding=kind,
        context=context,
        batch_size=batch_size,
        tokens_per_second=1e3 * batch_size / median,
        tokens_per_second_min=1e3 * batch_size / most,
        tokens_per_second_max=1e3 * batch_size / least,
        milliseconds_per_step=median,
        milliseconds_per_step_min=least,
        milliseconds_per_step_max=most,
        x_first=statistics.median(first) / statistics.median(point.blocks[name]),
        memory_floor_ms=floors["memory"],
        arithmetic_floor_ms=floors["arithmetic"],
        bound=bound,
        floor_share=floors[bound] / median,
        read_weight_bytes=work.weight_bytes,
        read_cache_bytes=work.cache_bytes,
        flops_per_step=work.flops,
        weight_bytes=footprint.weight_bytes,
        prefill_tokens_per_second=prefill[0],
        prefill_tokens_per_second_min=prefill[1],
        prefill_tokens_per_second_max=prefill[2],
        largest_batch_size=None if memory is None else footprint.largest_batch_size(context, memory),
        largest_context=None if memory is None else footprint.largest_context(batch_size, memory),
    )


def _spread(figures: Sequence[float]) -> tuple[Any, Any, Any]:
    """Median, least and most; None for each where there are no figures."""
    return (statistics.median(figures), min(figures), max(figures)) if figures else (None, None, None)


def _refuse_company() -> None:
    if not is_alone():
        raise UserError(
            f"{promised_size()} processes would slow each other down; time models in one, without a launcher"
        )


def _refuse_twice(names: Sequence[str]) -> None:
    """Refuse a model in two spellings, too: a path here is the place that it leads to."""
    seen: dict[str, str] = {}
    for name in names:
        place = os.path.realpath(name) if Path(name).exists() else name
        if (before := seen.get(place)) is not None:
            said = f"{name} is given twice" if before == name else f"{before} and {name} are one model"
            raise UserError(f"{said}; give every model once")
        seen[place] = name


def _check_numbers(
    batch_sizes: Sequence[int], contexts: Sequence[int], *, steps: int, runs: int, memory: int | None
) -> None:
    """Refuse what needs no model to be seen to be wrong."""
    if not batch_sizes:
        raise UserError("there is nothing to time; give a batch size")
    for name, given in {"batch_size": batch_sizes, "steps": [steps], "runs": [runs], "context": contexts}.items():
        if wrong := [number for number in given if number < 1]:
            raise UserError(f"{name} {wrong[0]} leaves nothing to time; give 1 or more")
    if memory is not None and memory < LEAST_MEMORY:
        raise UserError(f"a memory of {memory:,} bytes holds no model; give 1MiB or more, with its unit, such as 16GiB")


def _fit(configs: Mapping[str, Any], contexts: Sequence[int], steps: int) -> list[int]:
    """The contexts to time, each once: those asked for, else the default ones that every model takes.

    Args:
        configs: of the models, by name.

    Raises:
        UserError: there is no model, or one has no key/value cache, or is not made for a context and the steps after
            it.
    """
    if not configs:
        raise UserError("there is nothing to time; give a model")
    for config in configs.values():
        kv_elements(config)
        cached_tokens(config, 1)
    limits = {name: longest for name, each in configs.items() if (longest := context_length(each)) is not None}
    name = min(limits, key=lambda each: limits[each]) if limits else ""
    room = limits[name] - steps if limits else max((*contexts, *DEFAULT_CONTEXTS))
    if room < 1:
        raise UserError(f"{steps} steps leave no context of the {limits[name]} tokens that {name} takes; give fewer")
    if long := [context for context in contexts if context > room]:
        raise UserError(
            f"context {long[0]} and {steps} steps are more than the context {limits[name]} of {name}; "
            f"give {room} or less"
        )
    return list(dict.fromkeys(contexts or [each for each in DEFAULT_CONTEXTS if each <= room] or [room]))


def _common_ground(models: Mapping[str, Any]) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of all models.

    Raises:
        UserError: they differ.
    """
    found = {(model.device, model.dtype) for model in models.values()}
    if len(found) > 1:
        each = ", ".join(f"{name} {str(m.dtype).removeprefix('torch.')} on {m.device}" for name, m in models.items())
        raise UserError(f"models compare on one device in one dtype only ({each}); give --dtype")
    return found.pop()


def _protocol(
    device: torch.device, dtype: torch.dtype, steps: int, runs: int, prefill_runs: int, cuda_graphs: bool
) -> SpeedProtocol:
    import torch
    import transformers

    accelerated = device.type == "cuda"
    return SpeedProtocol(
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if accelerated else platform.machine(),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        steps=steps,
        runs=runs,
        prefill_runs=prefill_runs,
        cuda_graphs=cuda_graphs,
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
