"""What the uptraining of a recipe will take: memory a device, operations, time, from the model's config alone.

1. The checkpoint that is trained is the converted one: its attention is that of the conversion, a latent one in plain
   form. Its tensors are those of the families' tables.
2. Memory: the closed forms of `uptrain.plan`, under the sharding of the recipe's accelerate config.
3. Operations: those of `flops`, and a forward pass of a teacher.
4. Time: operations over what the devices do of them in a second, the share of their peak that training reaches.

Reading the texts, looks at the held-out one and checkpoints come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from ...common.kvcache import fit_context
from ...common.typed import read_table
from ...convert.families import Family, Promise
from ...uptrain.launch import Settings, read_settings
from ...uptrain.plan import MASTER, SHARDINGS, memory
from ...uptrain.plan import shape_of as activations_of
from ...uptrain.recipe import Recipe
from .flops import forward_flops, training_flops
from .machine import MACHINE_DEVICES, Machine
from .models import Planned, elements

_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
_STATE = 12  # bytes of a checkpoint of the run, for a trained parameter: itself and two moments in fp32


@dataclass(frozen=True)
class TrainingPlan:
    """What an uptraining will take. Bytes of memory are of each device.

    Attributes:
        parameters, trained_parameters: of what is trained.
        teacher_parameters: 0 without one.
        accelerate, sharding: the config, and how the processes share the work by it.
        processes: one a device.
        gradient_checkpointing: whether activations are computed twice.
        window, batch_size, micro_batches: tokens of a window; windows a step; forward passes of a process in a step.
        tokens_per_step, steps, layer_steps, tokens: what is read, and the steps that match a teacher's layers.
        weight_bytes ... teacher_bytes: see `uptrain.plan.Memory`.
        device_bytes: their sum.
        host_bytes: of a machine's own memory, where weights are divided among its devices: before that, each of its
            processes reads the whole model to the host, in fp32. 0 where they are not.
        student_flops, teacher_flops: of all steps.
        flops: their sum.
        tokens_per_second: of all devices together.
        seconds: of all steps.
        checkpoint_bytes: of what a run keeps to go on from.
        token_bytes: of the windows that it trains on, if none comes round twice.
    """

    parameters: int
    trained_parameters: int
    teacher_parameters: int
    accelerate: str
    sharding: str
    processes: int
    gradient_checkpointing: bool
    window: int
    batch_size: int
    micro_batches: int
    tokens_per_step: int
    steps: int
    layer_steps: int
    tokens: int
    weight_bytes: int
    copy_bytes: int
    gradient_bytes: int
    moment_bytes: int
    activation_bytes: int
    logit_bytes: int
    teacher_bytes: int
    device_bytes: int
    host_bytes: int
    student_flops: int
    teacher_flops: int
    flops: int
    tokens_per_second: float
    seconds: float
    checkpoint_bytes: int
    token_bytes: int


def plan_training(recipe: Recipe, after: Planned, teacher: Planned | None, machine: Machine) -> TrainingPlan:
    """Say what an uptraining will take.

    Args:
        recipe: of the training.
        after: what the conversion makes.
        teacher: the model to learn from, if the recipe names one.
        machine: where it runs.

    Raises:
        UserError: a number is out of range, or the windows of a step do not divide among the processes.
    """
    from ...common.scoring import chunk_elements
    from ...uptrain.run import DEFAULT_WINDOW, knobs_of

    window = fit_context(after.config, "window", recipe.window, DEFAULT_WINDOW)
    steps = recipe.steps_of(window)
    stages = {stage.name: stage.steps for stage in knobs_of(recipe, steps).course.stages}
    sharding, processes, machines = _spread(recipe, machine.devices)
    precision = recipe.precision if recipe.precision != "auto" else {"cuda": "bf16", "cpu": "fp32"}[machine.kind]
    parameters = elements(after.promises.values())
    trained, added = trained_parameters(after.row, after.promises, recipe.train, recipe.lora_rank)
    parameters += added
    needed = memory(
        recipe,
        activations_of(after.config),
        parameters=parameters,
        trained=trained,
        teacher_parameters=elements(teacher.promises.values()) if teacher else 0,
        window=window,
        width=_WIDTHS[precision],
        sharding=sharding,
        processes=processes,
        chunk=chunk_elements(machine.kind),
    )
    student_flops = teacher_flops = 0
    for stage, count in stages.items():
        windows, head = count * recipe.batch_size, stage != "layers"
        student_flops += windows * training_flops(
            after.shape, window, train=recipe.train, head=head, checkpointing=recipe.gradient_checkpointing
        )
        teacher_flops += windows * forward_flops(teacher.shape, window, head=head) if teacher else 0
    flops = student_flops + teacher_flops
    seconds = flops / (processes * machine.rate)
    tokens = steps * recipe.batch_size * window
    return TrainingPlan(
        parameters=parameters,
        trained_parameters=trained,
        teacher_parameters=elements(teacher.promises.values()) if teacher else 0,
        accelerate=recipe.accelerate or "",
        sharding=sharding,
        processes=processes,
        gradient_checkpointing=recipe.gradient_checkpointing,
        window=window,
        batch_size=recipe.batch_size,
        micro_batches=-(-recipe.windows_per_process(processes) // recipe.micro_batch_size),
        tokens_per_step=recipe.batch_size * window,
        steps=steps,
        layer_steps=stages.get("layers", 0),
        tokens=tokens,
        **asdict(needed),
        device_bytes=needed.total,
        host_bytes=MASTER * parameters * -(-processes // machines) if SHARDINGS[sharding].uniform else 0,
        student_flops=student_flops,
        teacher_flops=teacher_flops,
        flops=flops,
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        checkpoint_bytes=_STATE * trained * recipe.keep,
        token_bytes=tokens * (2 if after.config.vocab_size <= 1 << 16 else 4),
    )


def _spread(recipe: Recipe, devices: int | None) -> tuple[str, int, int]:
    """How the processes share the work, how many there are, and on how many machines."""
    settings = read_settings(recipe.accelerate) if recipe.accelerate else None
    processes = devices or recipe.processes or (settings.processes if settings else None) or 1
    sharding = "ddp" if processes > 1 else "single"
    if settings and settings.kind in _SHARDINGS:
        sharding = _SHARDINGS[settings.kind](settings)
    machines = settings.machines if settings else 1
    return sharding, processes, max(machines, -(-processes // MACHINE_DEVICES)) if devices else machines


def _zero(settings: Settings) -> str:
    """Which of DeepSpeed's stages an accelerate config asks for; 2 where it does not say, as accelerate has it."""
    table = read_table(settings.path, missing="give another")
    return f"zero{(table.get('deepspeed_config') or {}).get('zero_stage', 2)}"


# accelerate's `distributed_type` -> a key of `uptrain.plan.SHARDINGS`.
_SHARDINGS: Mapping[str, Callable[[Settings], str]] = {"FSDP": lambda settings: "fsdp2", "DEEPSPEED": _zero}


def trained_parameters(row: Family, promises: Mapping[str, Promise], train: str, lora_rank: int = 0) -> tuple[int, int]:
    """How many parameters are trained of a model, as `uptrain.selection.select` chooses them; and those of them that
    are adapters.

    Args:
        row: of the model's family.
        promises: the tensors that it has, by name.
        train: a key of `uptrain.selection.TRAINED`.
        lora_rank: of adapters in the place of the attention's weights; 0 for none.
    """
    from ...uptrain.selection import HEAD_TERMS

    inside = {
        promise.template.partition("}.")[2].partition(".")[0]
        for promise in promises.values()
        if promise.weight.template.startswith(row.layers)
        and any(HEAD_TERMS.intersection(axis) for axis in promise.weight.shape)
    }
    attention, others = [], []
    for p in promises.values():
        (attention if p.template.partition("}.")[2].partition(".")[0] in inside else others).append(p)
    norms = [p for p in others if "norm" in p.name or ".ln_" in p.name]
    chosen = {"attention": [], "attention+norms": norms, "all": others}[train]
    if not lora_rank:
        return elements([*attention, *chosen]), 0
    # The plain form reads kv_b_proj instead of calling it, so that it gets no adapter.
    adapted = [p.shape for p in attention if len(p.shape) == 2 and "norm" not in p.name and ".kv_b_proj." not in p.name]
    adapters = sum(lora_rank * sum(shape) for shape in adapted)
    return adapters + elements(chosen), adapters
