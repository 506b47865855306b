"""The closed forms against tiny models that torch measures."""

from dataclasses import asdict, replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OlmoeConfig

from kvfold.common.errors import UserError
from kvfold.uptrain.plan import (
    SHARDINGS,
    Memory,
    activation_bytes,
    copy_bytes,
    layer_bytes,
    logit_bytes,
    memory,
    plan,
    shape_of,
    state_bytes,
    teacher_bytes,
)
from kvfold.uptrain.recipe import Recipe
from kvfold.uptrain.schedule import Stage

RECIPE = Recipe(model="m", out="o", steps=10, batch_size=8)


def tiny(layers=2, **others):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=100, **others)).train()


def choose(model, train):
    chosen = {"attention": ("self_attn",), "attention+norms": ("self_attn", "norm"), "all": ("",)}[train]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in chosen))
    return [p for p in model.parameters() if p.requires_grad], [p for p in model.parameters() if not p.requires_grad]


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("train", ["attention", "attention+norms", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_between_steps_is_exact(train, dtype):
    model = tiny()
    trained, frozen = choose(model, train)
    for parameter in frozen:
        parameter.data = parameter.data.to(dtype)
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    counts = sum(p.numel() for p in trained), sum(p.numel() for p in frozen)
    expected = size(trained + frozen), size(p.grad for p in trained), size(moments)
    assert state_bytes(*counts, width=dtype.itemsize, sharding="single", processes=1) == expected


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("single", (4 * 80 + 2 * 160, 4 * 80, 8 * 80)),
        ("ddp", (4 * 80 + 2 * 160, 2 * 4 * 80, 8 * 80)),
        ("zero1", (4 * 80 + 4 * 160, 2 * 4 * 80, 8 * 10)),
        ("zero2", (4 * 80 + 4 * 160, 4 * 10, 8 * 10)),
        ("zero3", (4 * 10 + 4 * 20, 4 * 10, 8 * 10)),
        ("fsdp2", (4 * 10 + 4 * 20, 4 * 10, 8 * 10)),
    ],
)
def test_what_is_divided_among_eight(sharding, expected):
    assert state_bytes(80, 160, width=2, sharding=sharding, processes=8) == expected
    assert sharding in SHARDINGS


def test_an_unknown_sharding():
    with pytest.raises(UserError, match="unknown sharding 'fsdp'; did you mean fsdp2"):
        state_bytes(1, 1, width=2, sharding="fsdp", processes=1)


def test_copies():
    assert copy_bytes(100, 900, 10, width=4, sharding="ddp") == 0
    assert copy_bytes(100, 900, 10, width=2, sharding="ddp") == 200
    assert copy_bytes(100, 900, 10, width=2, sharding="fsdp2") == 2 * 2 * 100


def saved_bytes(model, autocast, **forward):
    """Bytes that autograd keeps of a forward pass of the layers, apart from weights and narrower copies of them."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {p.shape for p in model.parameters()} | {p.shape[::-1] for p in model.parameters()}
    kept, sizes = [], {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape not in shapes:
            kept.append(tensor)  # so that no storage comes back under the same address
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 100, (2, 128))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16, autocast):
        model.base_model(input_ids=ids, use_cache=False)
    return sum(sizes.values()), ids.numel()


@pytest.mark.parametrize("train", ["attention", "attention+norms", "all"])
@pytest.mark.parametrize("autocast", [False, True])
def test_activations_of_a_layer_are_within_a_quarter(train, autocast):
    measured = []
    for layers in (2, 6):  # the difference leaves out what is there once
        model = tiny(layers)
        _, frozen = choose(model, train)
        for parameter in frozen if autocast else ():
            parameter.data = parameter.data.bfloat16()
        held, tokens = saved_bytes(model, autocast)
        measured.append(held / tokens)
    a_layer = (measured[1] - measured[0]) / 4
    shape = shape_of(model.config)
    width = 2 if autocast else 4
    said = layer_bytes(shape, width=width, norms=train != "attention", mlp=train == "all")
    assert 0.75 < said / a_layer < 1.25, (said, a_layer)
    assert activation_bytes(shape, 10, width=width, norms=train != "attention", mlp=train == "all") == 10 * 6 * said


@pytest.mark.parametrize("layers", [2, 8])
def test_activations_with_checkpointing(layers):
    """Between the passes only the layers' inputs are kept; in the backward pass one layer comes on top."""
    model = tiny(layers)
    choose(model, "all")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    held, tokens = saved_bytes(model, False)
    shape = shape_of(model.config)
    said = activation_bytes(shape, tokens, width=4, norms=True, mlp=True, checkpointing=True)
    inputs = said - tokens * layer_bytes(shape, width=4, norms=True, mlp=True)
    assert inputs == tokens * layers * 64 * 4
    assert inputs <= held <= inputs + tokens * 6 * 64 * 4  # and what stands around the layers


def test_shapes():
    assert asdict(shape_of(tiny().config)) == {
        "layers": 2,
        "hidden": 64,
        "inner": 176,
        "vocabulary": 100,
        "query": 64,
        "key": 32,
        "value": 32,
        "mixed": 64,
    }
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=16)).config
    assert (shape_of(gpt2).inner, shape_of(gpt2).key, shape_of(gpt2).hidden) == (128, 32, 32)
    experts = OlmoeConfig(hidden_size=32, intermediate_size=16, num_experts_per_tok=4, num_attention_heads=2)
    assert shape_of(experts).inner == 64


def test_logits_are_those_of_a_chunk():
    assert logit_bytes(1000, 8, chunk=2**25, teacher=False) == 3 * 4 * 8000
    assert logit_bytes(1000, 10**6, chunk=2**25, teacher=True) == 5 * 4 * 2**25
    assert logit_bytes(1000, 10**6, chunk=2**25, teacher=True, reshaped=True) == 7 * 4 * 2**25


def test_memory_of_a_recipe():
    shape = shape_of(tiny().config)
    numbers = {"parameters": 1000, "trained": 100, "window": 16, "width": 2, "chunk": 2**25}
    alone = memory(RECIPE, shape, **numbers, teacher_parameters=0, sharding="single", processes=1)
    assert isinstance(alone, Memory)
    assert alone.total == sum(asdict(alone).values())
    assert (alone.teacher_bytes, alone.weight_bytes) == (0, 4 * 100 + 2 * 900)
    fuller = memory(
        replace(RECIPE, micro_batch_size=4), shape, **numbers, teacher_parameters=0, sharding="single", processes=1
    )
    assert fuller.activation_bytes == 4 * alone.activation_bytes
    # A process that has fewer windows than a micro-batch holds no more than it has.
    eighth = memory(
        replace(RECIPE, micro_batch_size=4), shape, **numbers, teacher_parameters=0, sharding="ddp", processes=8
    )
    assert eighth.activation_bytes == alone.activation_bytes
    taught = replace(RECIPE, teacher="t")
    told = memory(taught, shape, **numbers, teacher_parameters=1000, sharding="fsdp2", processes=2)
    assert (
        told.teacher_bytes == teacher_bytes(1000, shape, 16, width=2, matches_layers=True) == 2 * (1000 + 16 * 64 * 3)
    )
    with pytest.raises(UserError, match="does not divide among 3"):
        memory(RECIPE, shape, **numbers, teacher_parameters=0, sharding="ddp", processes=3)


def test_plan():
    seconds = {"layers": 2.0, "loss": 3.0}
    report = plan(
        replace(RECIPE, teacher="t"),
        tiny().config,
        parameters=1000,
        trained=100,
        teacher_parameters=1100,
        window=16,
        windows=20,
        stages=(Stage("layers", 2, 1.0), Stage("loss", 8, 1.0)),
        width=4,
        sharding="ddp",
        processes=2,
        device="cuda",
        time_step=seconds.__getitem__,
    )
    assert (report.steps, report.layer_steps, report.tokens_per_step, report.tokens) == (10, 2, 128, 1280)
    assert (report.windows, report.epochs, report.micro_batches) == (20, 4.0, 4)
    assert (report.seconds_per_step, report.seconds) == (3.0, 28.0)
    parts = [
        name for name in asdict(report) if name.endswith("_bytes") and name.split("_")[0] not in ("device", "available")
    ]
    assert report.device_bytes == sum(getattr(report, name) for name in parts)
