"""What a pipeline will take, stage by stage, from the source's config alone; and how it can be made to fit.

Nothing of a model is read but its config, so a checkpoint of any size can be planned for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.embedded import named_model
from ...common.errors import UserError
from ...common.kvcache import ELEMENT_BYTES
from ...uptrain.recipe import SOURCE, Recipe
from .machine import UTILIZATION, machine_of
from .models import Planned, cached_numbers, dtype_of, elements, result_of, source_of, written_elements
from .stages import StagePlan, Work, calibrate_stage, convert_stage, refine_stage, shortage
from .training import TrainingPlan
from .ways import find_way


@dataclass(frozen=True)
class Plan:
    """What a pipeline will take, and what it comes to.

    Attributes:
        source: the model that it begins with.
        attention_kind, source_attention_kind: of result and source.
        num_key_value_heads: of the result; None for a latent.
        kv_lora_rank, qk_rope_head_dim: of the result; None for heads. Where the conversion chooses the sizes under a
            budget, the first that it tries.
        source_kv_elements_per_token_per_layer, kv_elements_per_token_per_layer: what is cached, padding included.
        source_kv_bytes_per_token, kv_bytes_per_token: over all layers, in the dtype of the weights.
        kv_ratio: result over source.
        source_parameters, source_bytes: of the source's weights.
        dtype: of the result's weights, and of its cache.
        result_bytes: of the weights of a result; the converted one and the healed one are as large.
        device: its type.
        device_memory_bytes: what each has.
        host_memory_bytes: what a machine has of its own; None where that is not known.
        device_flops_per_second, utilization: the peak, and the share of it that is taken to be reached.
        disk_bytes: of all stages together; not the source.
        seconds: of all stages.
        fits: whether every stage does.
        results: of the stages, in order.
        training: of the uptraining; None without one.
        notes: what to do where something does not fit.
    """

    source: str
    source_attention_kind: str
    attention_kind: str
    num_key_value_heads: int | None
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    source_kv_elements_per_token_per_layer: int
    kv_elements_per_token_per_layer: int
    source_kv_bytes_per_token: int
    kv_bytes_per_token: int
    kv_ratio: float
    source_parameters: int
    source_bytes: int
    dtype: str
    result_bytes: int
    device: str
    device_memory_bytes: int
    host_memory_bytes: int | None
    device_flops_per_second: float
    utilization: float
    disk_bytes: int
    seconds: float
    fits: bool
    results: list[StagePlan]
    training: TrainingPlan | None
    notes: list[str]


def plan(
    sections: Mapping[str, Mapping[str, Any]],
    config: Any,
    *,
    teacher_config: Any | None = None,
    devices: int | None = None,
    memory: float | None = None,
    host_memory: float | None = None,
    device_flops: float | None = None,
    utilization: float = UTILIZATION,
) -> Plan:
    """Say what a pipeline will take, without a weight, a text or the network.

    Args:
        sections: of the recipe, their values typed; `source`, `convert`, `calibrate` and `uptrain` are read.
        config: the source's transformers config.
        teacher_config: of a teacher that is not the source.
        devices, memory, host_memory, device_flops, utilization: see `machine.machine_of`.

    Raises:
        UserError: a section is missing, the model is of a family without a table, the conversion cannot be, a number
            is out of range, or the windows of a step do not divide among the processes.
    """
    for name in ("source", "convert"):
        if not sections.get(name):
            raise UserError(f"the recipe has no section {name}, without which there is nothing to plan; write it")
    source, convert = str(sections["source"].get("model")), sections["convert"]
    machine = machine_of(
        sections.get("uptrain", {}),
        devices=devices,
        memory=memory,
        host_memory=host_memory,
        device_flops=device_flops,
        utilization=utilization,
    )
    config = config.get_text_config(decoder=True)
    before, after = source_of(config), result_of(config, convert)
    dtype = dtype_of(config)
    written = convert.get("dtype") or dtype
    result_bytes = ELEMENT_BYTES[written] * written_elements(after, convert)
    work, notes = Work(before, after, sections, machine), list[str]()
    stages = [calibrate_stage(work)] if work.calibrates else []
    stages.append(convert_stage(work, result_bytes))
    if convert.get("refine"):
        stages.append(refine_stage(work))
    training = None
    if (uptrain := sections.get("uptrain")) is not None:
        recipe = Recipe(**{"model": source, "out": f"{Path(source).name}.healed", **uptrain})
        teacher = _teacher(recipe, source, before, teacher_config)
        training, row, more = find_way(recipe, uptrain, after, teacher, work, result_bytes)
        stages.append(row)
        notes += more
    # What an uptraining lacks comes last, as it says what would do.
    notes[:0] = [
        f"{stage.stage} takes {shortage(stage, machine)}"
        for stage in stages
        if not stage.fits and stage.stage != "uptrain"
    ]
    numbers, cached = before.shape.kv_elements(), cached_numbers(after, convert)
    parameters = elements(before.promises.values())
    return Plan(
        source=source,
        source_attention_kind=str(before.shape.attention_kind),
        attention_kind=str(after.shape.attention_kind),
        num_key_value_heads=after.shape.num_key_value_heads,
        kv_lora_rank=after.shape.kv_lora_rank,
        qk_rope_head_dim=after.shape.qk_rope_head_dim,
        source_kv_elements_per_token_per_layer=numbers,
        kv_elements_per_token_per_layer=cached,
        source_kv_bytes_per_token=ELEMENT_BYTES[dtype] * numbers * before.shape.cached_tokens(1),
        kv_bytes_per_token=ELEMENT_BYTES[written] * cached * after.shape.cached_tokens(1),
        kv_ratio=cached / numbers,
        source_parameters=parameters,
        source_bytes=ELEMENT_BYTES[dtype] * parameters,
        dtype=written,
        result_bytes=result_bytes,
        device=machine.kind,
        device_memory_bytes=machine.memory_bytes,
        host_memory_bytes=machine.host_bytes,
        device_flops_per_second=machine.flops_per_second,
        utilization=machine.utilization,
        disk_bytes=sum(stage.disk_bytes for stage in stages),
        seconds=sum(stage.seconds for stage in stages),
        fits=all(stage.fits for stage in stages),
        results=stages,
        training=training,
        notes=notes,
    )


def _teacher(recipe: Recipe, source: str, of_source: Planned, config: Any | None) -> Planned | None:
    if not recipe.teacher or recipe.teacher in (SOURCE, source, named_model(source)):
        return of_source if recipe.teacher else None
    if config is None:
        raise UserError(f"the teacher {recipe.teacher} is not the source, and nothing is known of it; give its config")
    return source_of(config.get_text_config(decoder=True))


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def said(plan: Plan) -> list[str]:
    """What is planned in two lines, as the heads of recipes have them: training, and the cache."""
    lines = []
    if (training := plan.training) is not None:
        many = training.processes > 1
        devices = f"{training.processes} devices ({training.sharding}) of" if many else "one device of"
        host = f" and {training.host_bytes / 1e9:.0f} GB of host memory" if training.host_bytes else ""
        rate = f"{plan.utilization:.0%} of {plan.device_flops_per_second / 1e12:g} TFLOP/s"
        lines.append(
            f"Planned: {devices} {_gb(training.device_bytes)}{host}, {say_time(training.seconds)} at {rate}, "
            f"{_gb(plan.disk_bytes)} of disk."
        )
    numbers = f"{plan.source_kv_elements_per_token_per_layer} -> {plan.kv_elements_per_token_per_layer} numbers"
    size = f"{plan.kv_bytes_per_token / 1024:.1f} KiB a token in {plan.dtype}"
    return [*lines, f"Cache: {numbers} a token and layer ({plan.kv_ratio:.1%}); {size}."]


def say_time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
