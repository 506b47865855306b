"""What a recipe will take: memory a device, time, cache and disk, from the model's config alone.

1. The checkpoint that is trained is the converted one: its attention is that of the conversion, a latent one in plain
   form. Its tensors are those of the families' tables.
2. Memory: the closed forms of `uptrain.plan`, under the sharding of the recipe's accelerate config.
3. Operations of a window of T tokens, products of matrices only (see `eval.flops`), with C those of causal attention:

       forward                2 T (all weights of linear layers) + C
       backward, activations  the same, attention twice: 2 T (...) + 2 C. Where what comes in is frozen up to the first
                              attention, that one's query, key and value projections need no gradient of their input
       backward, weights      2 T (weights of linear layers that are trained)
       teacher                a forward pass of the source
       checkpointing          the layers' forward pass once more, but for each one's last product, which torch skips

   A step that matches layers has no head in it, neither forward nor backward, nor in its teacher. Adapters are counted
   as the weights that they stand for, and where attention and MLP run side by side, the first MLP's gradient too, which
   nothing asks for.
4. Time: operations over what the devices do of them in a second, the share of their peak that training reaches.

Calibration and conversion come on top, and reading the texts, looks at the held-out one, and checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...common.embedded import named_model
from ...common.errors import UserError
from ...common.kvcache import ELEMENT_BYTES, fit_context
from ...common.typed import read_table
from ...convert.demands import violations
from ...convert.families import FAMILIES, Family, Promise, Sizes
from ...convert.latent_families import DEEPSEEK, KNOWN, PREFIX
from ...convert.latent_form import HeadSizes, engine_shape
from ...convert.mla.budget import Choice, Room, choices
from ...convert.rotary import rotary_of
from ...eval.flops import LINEAR, causal_attention, linear
from ...eval.shape import Shape, shape_of
from ...uptrain.launch import Settings, read_settings
from ...uptrain.plan import MASTER, SHARDINGS, memory
from ...uptrain.plan import shape_of as activations_of
from ...uptrain.recipe import SOURCE, Recipe

# Bytes of memory of a device, and operations a second at its peak, by its type: an A100 of 80 GB with dense bf16
# products, and a small machine of two cores that was measured.
DEVICES = {"cuda": (80e9, 312e12), "cpu": (16e9, 2e11)}
UTILIZATION = 0.4

_DTYPE = "float16"  # of a checkpoint whose config does not say
_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
_STATE = 12  # bytes of a checkpoint of the run, for a trained parameter: itself and two moments in fp32
# The parts of `eval.flops.LINEAR` whose weights are trained, by what `train` says.
_TRAINED = {
    "attention": ("q", "kv", "o"),
    "attention+norms": ("q", "kv", "o"),
    "all": tuple(LINEAR),
}
_STOCK = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LATENT = ("kv_elements", "kv_ratio", "kv_rank", "rope_dim")  # keys of `convert` that say a latent's sizes


@dataclass(frozen=True)
class RecipePlan:
    """What a recipe will take. Bytes of memory are of each device, those of disk and cache of the whole model.

    Attributes:
        source: the model that it begins with.
        attention_kind, source_attention_kind: of result and source.
        num_key_value_heads: of the result; None for a latent.
        kv_lora_rank, qk_rope_head_dim: of the result; None for heads. Where the conversion chooses the sizes under a
            budget, the first that it tries.
        source_kv_elements_per_token_per_layer, kv_elements_per_token_per_layer: what is cached, padding included.
        source_kv_bytes_per_token, kv_bytes_per_token: over all layers, in the dtype of the weights.
        kv_ratio: result over source.
        source_parameters: of the source.
        parameters, trained_parameters: of what is trained.
        teacher_parameters: 0 without one.
        accelerate, sharding: the config, and how the processes share the work by it.
        processes: of training, one a device.
        window, batch_size, micro_batches: tokens of a window; windows a step; forward passes of a process in a step.
        tokens_per_step, steps, layer_steps, tokens: what is read, and the steps that match a teacher's layers.
        weight_bytes ... teacher_bytes: see `uptrain.plan.Memory`.
        device_bytes: their sum.
        host_bytes: of a machine's own memory, where weights are divided among its devices: before that, each of its
            processes reads the whole model to the host, in fp32. 0 where they are not.
        device_memory_bytes: what a device has.
        fits: whether that is enough.
        student_flops, teacher_flops: of all steps.
        flops: their sum.
        device_flops_per_second, utilization: the peak, and the share of it that training is taken to reach.
        tokens_per_second: of all devices together.
        seconds, hours: of all steps.
        dtype: of the result's weights, and of its cache.
        result_bytes: of the weights of a result; the converted one and the healed one are as large.
        checkpoint_bytes: of what a run keeps to go on from.
        token_bytes: of the windows that it trains on, if none comes round twice.
        disk_bytes: both results, and these two; not the source.
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
    parameters: int
    trained_parameters: int
    teacher_parameters: int
    accelerate: str
    sharding: str
    processes: int
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
    device_memory_bytes: int
    fits: bool
    student_flops: int
    teacher_flops: int
    flops: int
    device_flops_per_second: float
    utilization: float
    tokens_per_second: float
    seconds: float
    hours: float
    dtype: str
    result_bytes: int
    checkpoint_bytes: int
    token_bytes: int
    disk_bytes: int


def plan_recipe(
    sections: Mapping[str, Mapping[str, Any]],
    config: Any,
    *,
    teacher_config: Any | None = None,
    processes: int | None = None,
    device_memory: float | None = None,
    device_flops: float | None = None,
    utilization: float = UTILIZATION,
) -> RecipePlan:
    """Say what a recipe will take, without a weight, a text or the network.

    Args:
        sections: of the recipe, their values typed; `source`, `convert` and `uptrain` are read.
        config: the source's transformers config.
        teacher_config: of a teacher that is not the source.
        processes: of training; None for the recipe's, else its accelerate config's, else one.
        device_memory: bytes that a device has; None for those of `DEVICES`.
        device_flops: operations a second at its peak; None likewise.
        utilization: the share of the peak that training reaches.

    Raises:
        UserError: a section is missing, the model is of a family without a table, the conversion cannot be, a number
            is out of range, or the windows of a step do not divide among the processes.
    """
    from ...common.scoring import chunk_elements
    from ...uptrain.run import DEFAULT_WINDOW, knobs_of

    for name in ("source", "convert", "uptrain"):
        if not sections.get(name):
            raise UserError(f"the recipe has no section {name}, without which there is nothing to plan; write it")
    source = str(sections["source"].get("model"))
    convert, recipe = sections["convert"], _recipe(sections["uptrain"], source)
    config = config.get_text_config(decoder=True)
    before, after = _source(config), _result(config, convert)
    teacher = _teacher(recipe, source, before, teacher_config)
    window = fit_context(config, "window", recipe.window, DEFAULT_WINDOW)
    steps = recipe.steps_of(window)
    stages = {stage.name: stage.steps for stage in knobs_of(recipe, steps).course.stages}
    sharding, found, machines, device = _spread(recipe, processes)
    device_memory = DEVICES[device][0] if device_memory is None else device_memory
    device_flops = DEVICES[device][1] if device_flops is None else device_flops
    _check(device_memory=device_memory, device_flops=device_flops, utilization=utilization)
    precision = recipe.precision if recipe.precision != "auto" else {"cuda": "bf16", "cpu": "fp32"}[device]
    parameters = _elements(after.promises.values())
    trained, added = trained_parameters(after.row, after.promises, recipe.train, recipe.lora_rank)
    parameters += added
    needed = memory(
        recipe,
        activations_of(after.config),
        parameters=parameters,
        trained=trained,
        teacher_parameters=_elements(teacher.promises.values()) if teacher else 0,
        window=window,
        width=_WIDTHS[precision],
        sharding=sharding,
        processes=found,
        chunk=chunk_elements(device),
    )
    student_flops = teacher_flops = 0
    for stage, count in stages.items():
        windows, head = count * recipe.batch_size, stage != "layers"
        student_flops += windows * training_flops(
            after.shape, window, train=recipe.train, head=head, checkpointing=recipe.gradient_checkpointing
        )
        teacher_flops += windows * forward_flops(teacher.shape, window, head=head) if teacher else 0
    flops = student_flops + teacher_flops
    seconds = flops / (found * device_flops * utilization)
    tokens = steps * recipe.batch_size * window
    dtype = _dtype(config)
    written = convert.get("dtype") or dtype
    elements, cached = before.shape.kv_elements(), _cached(after, convert)
    result_bytes = ELEMENT_BYTES[written] * _written(after, convert)
    checkpoint_bytes = _STATE * trained * recipe.keep
    token_bytes = tokens * (2 if config.vocab_size <= 1 << 16 else 4)
    return RecipePlan(
        source=source,
        source_attention_kind=str(before.shape.attention_kind),
        attention_kind=str(after.shape.attention_kind),
        num_key_value_heads=after.shape.num_key_value_heads,
        kv_lora_rank=after.shape.kv_lora_rank,
        qk_rope_head_dim=after.shape.qk_rope_head_dim,
        source_kv_elements_per_token_per_layer=elements,
        kv_elements_per_token_per_layer=cached,
        source_kv_bytes_per_token=ELEMENT_BYTES[dtype] * elements * before.shape.cached_tokens(1),
        kv_bytes_per_token=ELEMENT_BYTES[written] * cached * after.shape.cached_tokens(1),
        kv_ratio=cached / elements,
        source_parameters=_elements(before.promises.values()),
        parameters=parameters,
        trained_parameters=trained,
        teacher_parameters=_elements(teacher.promises.values()) if teacher else 0,
        accelerate=recipe.accelerate or "",
        sharding=sharding,
        processes=found,
        window=window,
        batch_size=recipe.batch_size,
        micro_batches=-(-recipe.windows_per_process(found) // recipe.micro_batch_size),
        tokens_per_step=recipe.batch_size * window,
        steps=steps,
        layer_steps=stages.get("layers", 0),
        tokens=tokens,
        **asdict(needed),
        device_bytes=needed.total,
        host_bytes=MASTER * parameters * (found // machines) if SHARDINGS[sharding].uniform else 0,
        device_memory_bytes=int(device_memory),
        fits=needed.total <= device_memory,
        student_flops=student_flops,
        teacher_flops=teacher_flops,
        flops=flops,
        device_flops_per_second=device_flops,
        utilization=utilization,
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        hours=seconds / 3600,
        dtype=written,
        result_bytes=result_bytes,
        checkpoint_bytes=checkpoint_bytes,
        token_bytes=token_bytes,
        disk_bytes=2 * result_bytes + checkpoint_bytes + token_bytes,
    )


def said(plan: RecipePlan) -> tuple[str, str]:
    """What is planned in two lines, as the heads of recipes have them: training, and the cache."""
    devices = f"{plan.processes} devices ({plan.sharding}) of" if plan.processes > 1 else "one device of"
    host = f" and {plan.host_bytes / 1e9:.0f} GB of host memory" if plan.host_bytes else ""
    time = f"{plan.hours:.1f} h" if plan.hours >= 1 else f"{plan.seconds / 60:.1f} min"
    rate = f"{plan.utilization:.0%} of {plan.device_flops_per_second / 1e12:g} TFLOP/s"
    numbers = f"{plan.source_kv_elements_per_token_per_layer} -> {plan.kv_elements_per_token_per_layer} numbers"
    size = f"{plan.kv_bytes_per_token / 1024:.1f} KiB a token in {plan.dtype}"
    return (
        f"Planned: {devices} {plan.device_bytes / 1e9:.1f} GB{host}, {time} at {rate}, "
        f"{plan.disk_bytes / 1e9:.1f} GB of disk.",
        f"Cache: {numbers} a token and layer ({plan.kv_ratio:.1%}); {size}.",
    )


def forward_flops(shape: Shape, window: int, *, head: bool) -> int:
    """Operations of one window's forward pass.

    Args:
        shape: of the model.
        window: its tokens, T.
        head: whether the head is run, at every token.
    """
    return window * (linear(shape) - (0 if head else LINEAR["head"](shape))) + causal_attention(shape, window)


def training_flops(shape: Shape, window: int, *, train: str, head: bool, checkpointing: bool = False) -> int:
    """Operations of one window's forward and backward pass.

    Args:
        shape: of the model.
        window: its tokens, T.
        train: which weights are trained, a key of `uptrain.selection.TRAINED`.
        head: whether the head is run, and gradients come through it.
        checkpointing: whether the layers are run once more in the backward pass.
    """
    forward = forward_flops(shape, window, head=head)
    backward = forward + causal_attention(shape, window)
    if train == "attention" and not checkpointing:  # for which transformers asks for the gradient of the embeddings
        backward -= window * _first_projections(shape)
    weights = sum(LINEAR[part](shape) for part in _TRAINED[train] if head or part != "head")
    again = 0
    if checkpointing:
        down = LINEAR["mlp"](shape) // (3 if shape.gated_mlp else 2)
        again = forward_flops(shape, window, head=False) - window * down
    return forward + backward + window * weights + again


def _first_projections(shape: Shape) -> int:
    """Of one token, what the first layer's attention does with what comes in: its queries, and what is cached."""
    layers, hidden = shape.need("num_hidden_layers", "hidden_size")
    return 2 * (shape.q_weights() // layers + hidden * shape.kv_elements())


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
    attention = [p for p in promises.values() if p.template.partition("}.")[2].partition(".")[0] in inside]
    others = [p for p in promises.values() if p not in attention]
    norms = [p for p in others if "norm" in p.name or ".ln_" in p.name]
    chosen = {"attention": [], "attention+norms": norms, "all": others}[train]
    if not lora_rank:
        return _elements([*attention, *chosen]), 0
    # The plain form reads kv_b_proj instead of calling it, so that it gets no adapter.
    adapted = [p.shape for p in attention if len(p.shape) == 2 and "norm" not in p.name and ".kv_b_proj." not in p.name]
    adapters = sum(lora_rank * sum(shape) for shape in adapted)
    return adapters + _elements(chosen), adapters


@dataclass(frozen=True)
class _Model:
    """A model that is known by its config.

    Attributes:
        config: of transformers.
        row: of its family.
        promises: its tensors, a tied head left out.
        shape: its sizes.
    """

    config: Any
    row: Family
    promises: Mapping[str, Promise]
    shape: Shape


def _source(config: Any) -> _Model:
    """What the recipe begins with."""
    if config.model_type not in KNOWN:
        raise UserError(f"kvfold has no table of {config.model_type} models; known: {', '.join(sorted(FAMILIES))}")
    row = KNOWN[config.model_type]
    return _Model(config, row, _tensors(row, config), shape_of(config, {}))


def _result(config: Any, convert: Mapping[str, Any]) -> _Model:
    """What the conversion makes, in the form that is trained."""
    source, config = _source(config), deepcopy(config)
    if convert.get("to") == "gqa":
        if (kv_heads := convert.get("kv_heads")) is None:
            raise UserError("the section convert says no kv_heads; write kv_heads: 1, or another number")
        groups = Sizes(config)["G"]
        if kv_heads < 1 or groups % kv_heads:
            raise UserError(f"{groups} KV heads cannot form {kv_heads} groups; change kv_heads")
        row, shape = FAMILIES[source.row.becomes or source.row.name], {"num_key_value_heads": kv_heads}
        config.num_key_value_heads = kv_heads
        return _Model(config, row, _tensors(row, config, kv_heads), shape_of(source.config, shape))
    if convert.get("to") != "mla":
        raise UserError(f"the section convert says to: {convert.get('to')}; it must be gqa or mla")
    row = KNOWN.get(PREFIX + config.model_type)
    if row is None:
        raise UserError(f"{config.model_type} has no latent form; convert it to: gqa")
    choice = _choice(source, convert)
    sizes = {"kv_lora_rank": choice.kv_rank, "qk_rope_head_dim": choice.rope_dim}
    d = Sizes(config)["d"]
    biased = any(".self_attn." in name and name.endswith(".bias") for name in source.promises)
    for name, value in {**sizes, "qk_nope_head_dim": d, "v_head_dim": d, "mla_bias": biased}.items():
        setattr(config, name, value)
    return _Model(config, row, _tensors(row, config), shape_of(source.config, sizes))


def _choice(source: _Model, convert: Mapping[str, Any]) -> Choice:
    """The sizes of the latent; where the conversion would choose, the first that it tries."""
    config, sizes = source.config, Sizes(source.config)
    turning = [2 * len(rotary_of(source.row, config, layer).re) for layer in range(config.num_hidden_layers)]
    room = Room(max(turning), sizes["K"], sizes["D"], still_layers=0 in turning)
    asked = {name: convert.get(name) for name in _LATENT}
    return choices(room, **asked, rope_select=convert.get("rope_select") or "auto")[0]


def _cached(model: _Model, convert: Mapping[str, Any]) -> int:
    """Numbers that the result caches of a token in a layer, as it is written."""
    if model.shape.is_latent and convert.get("pad_to_engine"):
        padded = engine_shape(_head_sizes(model))
        return padded.rank + padded.rope
    return model.shape.kv_elements()


def _written(model: _Model, convert: Mapping[str, Any]) -> int:
    """Elements of the result as it is written: of a latent one in the stock form, unless the plain one is asked for."""
    if not model.shape.is_latent or convert.get("form") == "plain":
        return _elements(model.promises.values())
    config, sizes = model.config, _head_sizes(model)
    stock = {
        **{name: getattr(config, name) for name in _STOCK},
        **(engine_shape(sizes) if convert.get("pad_to_engine") else sizes).as_config(),
        "model_type": DEEPSEEK.name,
        "num_key_value_heads": config.num_attention_heads,
        "attention_bias": config.mla_bias,
        "tie_word_embeddings": False,
        "q_lora_rank": None,
    }
    demanded = config.mla_bias or any(
        violation.topic == "query rank"
        for reader in _names(convert.get("for"))
        for violation in violations(stock, {}, reader)
    )
    exact = config.hidden_size + config.mla_bias if demanded else None
    stock["q_lora_rank"] = convert.get("q_rank") or exact
    return _elements(_tensors(DEEPSEEK, SimpleNamespace(**stock)).values())


def _names(value: Any) -> tuple[str, ...]:
    """What stands there with commas between, or as a list."""
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else tuple(value or ())


def _head_sizes(model: _Model) -> HeadSizes:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return HeadSizes(*(getattr(model.config, name) for name in names))


def _tensors(row: Family, config: Any, kv_heads: int | None = None) -> dict[str, Promise]:
    """The tensors of a model in memory, by name: a tied head once, and no buffers."""
    named = row.weights[0].template  # with its prefix, as transformers has it
    return {name: one for name, one in row.promises(config, (named,), kv_heads).items() if not one.optional}


def _elements(promises: Iterable[Promise]) -> int:
    return sum(math.prod(promise.shape) for promise in promises)


def _dtype(config: Any) -> str:
    """Of the source's weights."""
    said = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return said if said in ELEMENT_BYTES else _DTYPE


def _recipe(section: Mapping[str, Any], source: str) -> Recipe:
    """The recipe of the training, with names in the place of the folders that a run fills in."""
    return Recipe(**{"model": source, "out": f"{Path(source).name}.healed", **section})


def _teacher(recipe: Recipe, source: str, of_source: _Model, config: Any | None) -> _Model | None:
    if not recipe.teacher or recipe.teacher in (SOURCE, source, named_model(source)):
        return of_source if recipe.teacher else None
    if config is None:
        raise UserError(f"the teacher {recipe.teacher} is not the source, and nothing is known of it; give its config")
    return _source(config.get_text_config(decoder=True))


def _spread(recipe: Recipe, asked: int | None) -> tuple[str, int, int, str]:
    """How the processes share the work, how many there are, on how many machines, and on what type of device."""
    if asked is not None and asked < 1:
        raise UserError(f"--num-processes is {asked}; it must be at least 1")
    settings = read_settings(recipe.accelerate) if recipe.accelerate else None
    processes = asked or recipe.processes or (settings.processes if settings else None) or 1
    device = "cpu" if recipe.device == "cpu" or (settings and settings.on_cpu) else "cuda"
    sharding = "ddp" if processes > 1 else "single"
    if settings and settings.kind in _SHARDINGS:
        sharding = _SHARDINGS[settings.kind](settings)
    return sharding, processes, settings.machines if settings else 1, device


def _zero(settings: Settings) -> str:
    """Which of DeepSpeed's stages an accelerate config asks for; 2 where it does not say, as accelerate has it."""
    table = read_table(settings.path, missing="give another")
    return f"zero{(table.get('deepspeed_config') or {}).get('zero_stage', 2)}"


# accelerate's `distributed_type` -> a key of `uptrain.plan.SHARDINGS`.
_SHARDINGS: Mapping[str, Callable[[Settings], str]] = {"FSDP": lambda settings: "fsdp2", "DEEPSPEED": _zero}


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        flag, most = f"--{name.replace('_', '-')}", 1.0 if name == "utilization" else math.inf
        if not (math.isfinite(number) and 0 < number <= most):
            raise UserError(f"{flag} is {number:g}; it must be more than 0{' and at most 1' * (most == 1.0)}")
