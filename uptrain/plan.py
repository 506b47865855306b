"""What a run will take: parameters, memory a device, steps, time. What `--dry-run` prints.

The memory is added up from closed forms over plain numbers, so that it can be said of a model that fits nowhere.

Legend: D hidden size, F inner size of the MLP, L layers, V vocabulary, T tokens that a process holds at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..common.errors import UserError, did_you_mean
from .recipe import Recipe
from .schedule import Stage

MASTER = 4  # bytes of a trained weight, of its gradient and of each of AdamW's two moments: fp32


@dataclass(frozen=True)
class Sharding:
    """What the processes divide among themselves; the rest each of them holds whole.

    Attributes:
        weights, gradients, moments: whether they are divided.
        buckets: whether gradients are held a second time, to be summed over all processes.
        uniform: whether frozen weights must be fp32 too, because they are divided together with the trained ones.
    """

    weights: bool = False
    gradients: bool = False
    moments: bool = False
    buckets: bool = False
    uniform: bool = False


SHARDINGS = {
    "single": Sharding(),
    "ddp": Sharding(buckets=True),
    "zero1": Sharding(moments=True, buckets=True, uniform=True),
    "zero2": Sharding(gradients=True, moments=True, uniform=True),
    "zero3": Sharding(weights=True, gradients=True, moments=True, uniform=True),
    "fsdp2": Sharding(weights=True, gradients=True, moments=True, uniform=True),
}


@dataclass(frozen=True)
class Shape:
    """The numbers of a decoder that its activations depend on.

    Attributes:
        layers, hidden, inner, vocabulary: L, D, F, V. F is over all experts that a token visits.
        query: elements of a token's queries over all heads.
        key: elements of a token's keys over the heads that the attention sees.
        value: the same of its values.
        mixed: elements of the attention's result, before the output projection.
    """

    layers: int
    hidden: int
    inner: int
    vocabulary: int
    query: int
    key: int
    value: int
    mixed: int


def shape_of(config: Any) -> Shape:
    """The shape of a model by its transformers config: MHA, GQA and MQA, or MLA, whose heads are expanded."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    value = head
    if getattr(config, "kv_lora_rank", None):
        head = config.qk_nope_head_dim + config.qk_rope_head_dim
        value, kv_heads = config.v_head_dim, heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    visited = getattr(config, "num_experts_per_tok", None)
    if visited:
        shared = getattr(config, "n_shared_experts", None) or 0
        inner = (getattr(config, "moe_intermediate_size", None) or inner) * (visited + shared)
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=inner,
        vocabulary=config.vocab_size,
        query=heads * head,
        key=kv_heads * head,
        value=kv_heads * value,
        mixed=heads * value,
    )


@dataclass(frozen=True)
class Memory:
    """Bytes that one device holds at the peak of a step.

    Attributes:
        weight_bytes: of trained weights in fp32 and frozen ones in the dtype of the computation.
        copy_bytes: of trained weights again in that dtype, and of what is gathered of divided ones.
        gradient_bytes, moment_bytes: of the trained weights.
        activation_bytes: kept for the backward pass.
        logit_bytes: of the chunk at hand.
        teacher_bytes: of its weights, and of what is kept of its answers.
    """

    weight_bytes: int
    copy_bytes: int
    gradient_bytes: int
    moment_bytes: int
    activation_bytes: int
    logit_bytes: int
    teacher_bytes: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def state_bytes(trained: int, frozen: int, *, width: int, sharding: str, processes: int) -> tuple[int, int, int]:
    """Bytes of weights, gradients and moments that one process holds between two steps, and during one.

    Args:
        trained, frozen: numbers of parameters.
        width: bytes of an element of the computation's dtype, in which frozen weights are kept where they may be.
        sharding: a key of `SHARDINGS`.
        processes: over which they are divided.

    Raises:
        UserError: the sharding is unknown.
    """
    if sharding not in SHARDINGS:
        raise UserError(f"unknown sharding {sharding!r}{did_you_mean(sharding, SHARDINGS)}")
    how = SHARDINGS[sharding]

    def part(whole: int, divided: bool) -> int:
        return -(-whole // processes) if divided else whole

    return (
        part(MASTER * trained + (MASTER if how.uniform else width) * frozen, how.weights),
        part(MASTER * trained, how.gradients) + (MASTER * trained if how.buckets and processes > 1 else 0),
        part(2 * MASTER * trained, how.moments),
    )


def copy_bytes(trained: int, frozen: int, layers: int, *, width: int, sharding: str) -> int:
    """Bytes of weights that stand there a second time while a step is computed.

    Autocast keeps a narrower copy of every trained weight. Where weights are divided, two layers at a time are
    gathered instead: the one at work, and the next; a layer is taken to be an L-th of the model, which overstates
    it by what the embeddings hold.
    """
    if SHARDINGS[sharding].weights:
        return 2 * width * -(-(trained + frozen) // layers)
    return width * trained if width < MASTER else 0


def layer_bytes(shape: Shape, *, width: int, norms: bool, mlp: bool) -> int:
    """Bytes a token that one layer keeps for its backward pass.

    In the dtype of the computation: the input of the projections, D; queries, keys, values and what the attention
    made of them (its probabilities are recomputed); of a gated MLP the gate, its activation and the other half,
    3 F. Norms take their input in fp32, 2 x 4 D bytes. Frozen weights need no input, so a trained MLP keeps D + F
    more, and trained norms 2 x 4 D bytes.

    Args:
        shape: of the model.
        width: bytes of an element of the computation's dtype.
        norms, mlp: whether their weights are trained; those of the attention are.
    """
    elements = shape.hidden + shape.query + shape.key + shape.value + shape.mixed + 3 * shape.inner
    elements += (shape.hidden + shape.inner) * mlp
    return width * elements + 2 * MASTER * shape.hidden * (1 + norms)


def activation_bytes(
    shape: Shape, tokens: int, *, width: int, norms: bool = False, mlp: bool = False, checkpointing: bool = False
) -> int:
    """Bytes of activations that the backward pass of T tokens needs.

    With checkpointing only the inputs of the layers, in at most fp32, and all of the one layer that is recomputed.
    """
    layer = layer_bytes(shape, width=width, norms=norms, mlp=mlp)
    if checkpointing:
        return tokens * (shape.layers * (MASTER if mlp else width) * shape.hidden + layer)
    return tokens * shape.layers * layer


def logit_bytes(vocabulary: int, tokens: int, *, chunk: int, teacher: bool, reshaped: bool = False) -> int:
    """Bytes of the logits of one chunk, and of what the loss makes of them, in fp32.

    Cross entropy holds two tensors of their size, and a third in 16 bits; a teacher's divergence five, and seven where
    both distributions are `reshaped` by a temperature or to the likeliest tokens. (Measured by torch's profiler.)
    """
    return MASTER * min(tokens * vocabulary, chunk) * (3 if not teacher else 7 if reshaped else 5)


def teacher_bytes(parameters: int, shape: Shape, tokens: int, *, width: int, matches_layers: bool) -> int:
    """Bytes of a whole teacher: its weights, its hidden states [T, D], and what L layers' attention gave out."""
    return width * (parameters + tokens * shape.hidden * (1 + shape.layers * matches_layers))


@dataclass(frozen=True)
class UptrainPlan:
    """What a run will take. Times are None where no step was timed.

    Attributes:
        model, out: as in the recipe.
        parameters, trained_parameters: of the model.
        sharding: how the processes share the work, a key of `SHARDINGS`.
        processes: how many.
        window: tokens of a window.
        tokens_per_step, steps, tokens: what is read; `tokens` is over all steps.
        layer_steps: of the steps, those that match a teacher's layers.
        windows: of the training text; how often they come round is `epochs`.
        micro_batches: forward passes of a process in a step.
        weight_bytes ... teacher_bytes: see `Memory`; of each device.
        device_bytes: their sum.
        available_bytes: what the device has, if that is known.
        seconds_per_step: of the stage that takes most of the steps.
        seconds: of all steps; evaluations and checkpoints come on top.
    """

    model: str
    out: str
    parameters: int
    trained_parameters: int
    sharding: str
    processes: int
    window: int
    tokens_per_step: int
    steps: int
    layer_steps: int
    tokens: int
    windows: int
    epochs: float
    micro_batches: int
    weight_bytes: int
    copy_bytes: int
    gradient_bytes: int
    moment_bytes: int
    activation_bytes: int
    logit_bytes: int
    teacher_bytes: int
    device_bytes: int
    available_bytes: int | None
    seconds_per_step: float | None
    seconds: float | None


def memory(
    recipe: Recipe,
    shape: Shape,
    *,
    parameters: int,
    trained: int,
    teacher_parameters: int,
    window: int,
    width: int,
    sharding: str,
    processes: int,
    chunk: int,
) -> Memory:
    """The memory of one device under a recipe; the arguments are those of the closed forms above.

    Raises:
        UserError: the sharding is unknown, or the windows of a step do not divide among the processes.
    """
    tokens = window * min(recipe.micro_batch_size, recipe.windows_per_process(processes))
    frozen = parameters - trained
    weights, gradients, moments = state_bytes(trained, frozen, width=width, sharding=sharding, processes=processes)
    return Memory(
        weight_bytes=weights,
        copy_bytes=copy_bytes(trained, frozen, shape.layers, width=width, sharding=sharding),
        gradient_bytes=gradients,
        moment_bytes=moments,
        activation_bytes=activation_bytes(
            shape,
            tokens,
            width=width,
            norms=recipe.train != "attention",
            mlp=recipe.train == "all",
            checkpointing=recipe.gradient_checkpointing,
        ),
        logit_bytes=logit_bytes(
            shape.vocabulary,
            tokens,
            chunk=chunk,
            teacher=bool(recipe.teacher),
            reshaped=recipe.temperature != 1 or recipe.top_k > 0,
        ),
        teacher_bytes=teacher_bytes(
            teacher_parameters, shape, tokens, width=width, matches_layers=recipe.layer_share > 0
        )
        if recipe.teacher
        else 0,
    )


def plan(
    recipe: Recipe,
    config: Any,
    *,
    parameters: int,
    trained: int,
    teacher_parameters: int = 0,
    window: int,
    windows: int,
    stages: Sequence[Stage],
    width: int,
    sharding: str,
    processes: int,
    device: str,
    available: int | None = None,
    time_step: Callable[[str], float] | None = None,
) -> UptrainPlan:
    """Say what a run will take.

    Args:
        recipe: of the run.
        config: the model's transformers config.
        parameters, trained, teacher_parameters: how many.
        window: tokens of a window.
        windows: of the training text.
        stages: the steps, see `schedule.course`.
        width: bytes of an element of the computation's dtype.
        sharding: see `processes.sharding`.
        processes: how many.
        device: its type.
        available: bytes that the device has.
        time_step: takes a step of the stage of this name, and returns its seconds.

    Raises:
        UserError: the windows of a step do not divide among the processes.
    """
    from ..common.scoring import chunk_elements

    needed = memory(
        recipe,
        shape_of(config),
        parameters=parameters,
        trained=trained,
        teacher_parameters=teacher_parameters,
        window=window,
        width=width,
        sharding=sharding,
        processes=processes,
        chunk=chunk_elements(device),
    )
    steps = sum(stage.steps for stage in stages)
    seconds = {stage.name: time_step(stage.name) for stage in stages} if time_step else None
    longest = max(stages, key=lambda stage: stage.steps).name
    return UptrainPlan(
        model=recipe.model,
        out=recipe.out,
        parameters=parameters,
        trained_parameters=trained,
        sharding=sharding,
        processes=processes,
        window=window,
        tokens_per_step=recipe.batch_size * window,
        steps=steps,
        layer_steps=sum(stage.steps for stage in stages if stage.name == "layers"),
        tokens=steps * recipe.batch_size * window,
        windows=windows,
        epochs=steps * recipe.batch_size / windows,
        micro_batches=-(-recipe.windows_per_process(processes) // recipe.micro_batch_size),
        **asdict(needed),
        device_bytes=needed.total,
        available_bytes=available,
        seconds_per_step=seconds[longest] if seconds else None,
        seconds=sum(stage.steps * seconds[stage.name] for stage in stages) if seconds else None,
    )
