"""The calculator against what conversion and uptraining say of a real model, and against torch's own count."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PhiConfig, Qwen2Config

from kvfold.attention.plain import plain_config
from kvfold.common.embedded import MODEL_DIR
from kvfold.common.errors import UserError
from kvfold.convert.config import from_raw
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.mla.convert import convert_mla
from kvfold.eval.flops import causal_attention
from kvfold.eval.shape import read_any_config, shape_of
from kvfold.recipes.plan.flops import forward_flops, training_flops
from kvfold.recipes.plan.machine import DEVICES
from kvfold.recipes.plan.plan import plan as plan_all
from kvfold.recipes.plan.plan import said
from kvfold.uptrain.computing import checkpoint_activations
from kvfold.uptrain.objective import Trainee
from kvfold.uptrain.plan import UptrainPlan
from kvfold.uptrain.recipe import Recipe
from kvfold.uptrain.run import foresee
from kvfold.uptrain.selection import TRAINED, select
from kvfold.uptrain.teacher import Teacher

SIZES = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_hidden_layers": 3}
MQA = {"to": "gqa", "kv_heads": 1}
LATENT = {"to": "mla", "kv_rank": 24, "rope_dim": 8, "for": ("transformers",)}
GIVEN = {"gqa": {"num_key_value_heads": 1}, "mla": {"kv_lora_rank": 24, "qk_rope_head_dim": 8}}  # to `shape_of`
WINDOW = 32


def llama(**others):
    return LlamaConfig(**{**SIZES, "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": False} | others)


def plan(convert, config, *, source="source", **uptrain):
    uptrain = {"steps": 10, "batch_size": 4, "window": WINDOW, "device": "cpu"} | uptrain
    return planned({"source": {"model": source}, "convert": convert, "uptrain": uptrain}, config)


def planned(sections, config, **machine):
    """A plan, and what it says of training, in one; spread as the recipe says, as the formulas are looked at here."""
    uptrain = {"accelerate": None, "gradient_checkpointing": False} | sections["uptrain"]
    made = plan_all(sections | {"uptrain": uptrain}, config, **machine)
    return SimpleNamespace(whole=made, **vars(made) | vars(made.training))


def converted(config, convert):
    """A model of the shape that a conversion gives, with any weights."""
    if convert["to"] == "gqa":
        config = type(config)(**{**config.to_dict(), "num_key_value_heads": convert["kv_heads"]})
    else:
        rank, rope, d = convert["kv_rank"], convert["rope_dim"], config.hidden_size // config.num_attention_heads
        sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": d, "v_head_dim": d}
        kept = [list(range(rope // 2))] * config.num_hidden_layers
        biased = config.model_type == "qwen2"
        config = from_raw(plain_config(config.to_dict(), **sizes, mla_bias=biased, rope_frequencies=kept))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    angles = sum(
        sum(kinds.values()) for name, kinds in counter.get_flop_counts().items() if name.endswith("rotary_emb")
    )
    return counter.get_total_flops() - angles


IDS = torch.randint(0, 100, (1, WINDOW), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("convert", [MQA, LATENT], ids=["heads", "latent"])
@pytest.mark.parametrize("train", TRAINED)
@pytest.mark.parametrize("head", [True, False], ids=["head", "no head"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_operations_are_those_that_torch_counts(convert, train, head, checkpointing):
    config = llama()
    model = converted(config, convert)
    select(model, train)
    if checkpointing:
        checkpoint_activations(model)
    run = (lambda: model(IDS, use_cache=False).logits) if head else (lambda: model.model(IDS).last_hidden_state)
    given = GIVEN[convert["to"]]
    shape = shape_of(config, given)
    # Eager attention meets every pair of tokens, of which the plan counts the causal half.
    half = causal_attention(shape, WINDOW)
    assert counted(run) - half == forward_flops(shape, WINDOW, head=head)
    planned = training_flops(shape, WINDOW, train=train, head=head, checkpointing=checkpointing)
    assert counted(lambda: run().sum().backward()) - half * (4 if checkpointing else 3) == planned


@pytest.mark.parametrize("convert", [MQA, LATENT], ids=["heads", "latent"])
def test_a_course_of_both_stages_with_a_teacher(convert):
    config = llama()
    student, source = converted(config, convert), converted(config, {"to": "gqa", "kv_heads": 2})
    selection = select(student)
    modules = selection.attention
    trainee, teacher = Trainee(student, attention=modules), Teacher(source, modules)

    def step(stage):
        view = teacher.view(IDS, layers=stage == "layers")
        trainee(IDS, IDS, None, view, stage)[0].backward()

    made = plan(convert, config, teacher="source", layer_share=0.2)
    assert (made.steps, made.layer_steps) == (10, 2)
    ours = shape_of(
        config, {"num_key_value_heads": 1} if convert is MQA else {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
    )
    half = 3 * causal_attention(ours, WINDOW) + causal_attention(shape_of(config, {}), WINDOW)
    assert made.flops == 4 * (2 * (counted(lambda: step("layers")) - half) + 8 * (counted(lambda: step("loss")) - half))
    assert made.flops == made.student_flops + made.teacher_flops
    alone = plan(convert, config)
    assert (alone.teacher_flops, alone.teacher_parameters, alone.teacher_bytes, alone.layer_steps) == (0, 0, 0, 0)


QWEN = Qwen2Config(**SIZES, num_key_value_heads=2, vocab_size=100)
PHI = PhiConfig(**SIZES, num_key_value_heads=4, vocab_size=100, partial_rotary_factor=0.5)


@pytest.mark.parametrize("train", TRAINED)
@pytest.mark.parametrize(
    ("config", "convert"),
    [(llama(), MQA), (llama(tie_word_embeddings=True), LATENT), (QWEN, MQA), (QWEN, LATENT), (PHI, MQA)],
    ids=["llama", "llama latent, tied", "biases", "biases latent", "phi"],
)
def test_parameters_are_those_of_a_real_model(config, convert, train):
    model = converted(config, convert)
    select(model, train)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    made = plan(convert, config, train=train)
    assert (made.parameters, made.trained_parameters) == (sum(p.numel() for p in model.parameters()), trained)


@pytest.mark.parametrize("convert", [MQA, LATENT], ids=["heads", "latent"])
@pytest.mark.parametrize("train", ["attention", "attention+norms"])
def test_parameters_of_adapters(convert, train):
    model = converted(llama(), convert)
    select(model, train, lora_rank=3)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    made = plan(convert, llama(), train=train, lora_rank=3)
    assert (made.parameters, made.trained_parameters) == (sum(p.numel() for p in model.parameters()), trained)


@pytest.mark.parametrize(
    "convert",
    [
        {"to": "gqa", "kv_heads": 2},
        {"to": "mla", "kv_rank": 104, "rope_dim": 24, "for": ("transformers", "llama.cpp")},
        {"to": "mla", "kv_rank": 104, "rope_dim": 24, "for": ("vllm",), "pad_to_engine": True},
    ],
    ids=["heads", "latent with a query latent", "latent padded"],
)
def test_figures_are_those_of_conversion_and_dry_run(tmp_path, convert):
    knobs = {name: value for name, value in convert.items() if name not in ("to", "for")}
    if convert["to"] == "gqa":
        report = convert_gqa(MODEL_DIR, tmp_path / "out", method="mean", **knobs)
    else:
        readers = convert["for"]
        report = convert_mla(MODEL_DIR, tmp_path / "out", calib=("none",), rope_select="high", readers=readers, **knobs)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The {n}th page says {n * n}." for n in range(2000)))
    values = {"data": (str(text),), "window": 64, "batch_size": 4, "micro_batch_size": 2, "steps": 10, "device": "cpu"}
    values |= {"teacher": str(MODEL_DIR), "held_out": 0.1}
    foreseen = foresee(Recipe(model=str(tmp_path / "out"), out=str(tmp_path / "healed"), **values))
    made = plan(convert, read_any_config(MODEL_DIR), source="embedded", **values)
    theirs = {field.name for field in fields(UptrainPlan)} & {field.name for field in fields(made.whole.training)}
    theirs -= {"seconds"}  # of a step that was taken here
    assert len(theirs) == 18
    assert {name: getattr(made, name) for name in theirs} == {name: getattr(foreseen, name) for name in theirs}
    assert made.result_bytes == report.bytes
    for name in ("kv_elements_per_token_per_layer", "kv_bytes_per_token", "source_kv_bytes_per_token", "kv_ratio"):
        assert getattr(made, name) == getattr(report, name)


@pytest.mark.parametrize(
    ("knobs", "spread"),
    [
        ({}, ("single", 1, "cuda")),
        ({"device": "cpu"}, ("single", 1, "cpu")),
        ({"processes": 2}, ("ddp", 2, "cuda")),
        ({"accelerate": "single"}, ("single", 1, "cuda")),
        ({"accelerate": "cpu"}, ("single", 1, "cpu")),
        ({"accelerate": "ddp", "processes": 4}, ("ddp", 4, "cuda")),
        ({"accelerate": "fsdp2"}, ("fsdp2", 8, "cuda")),
        ({"accelerate": "deepspeed_zero3"}, ("zero3", 8, "cuda")),
        ({"accelerate": "multi_node"}, ("fsdp2", 16, "cuda")),
    ],
)
def test_the_sharding_is_that_of_the_accelerate_config(knobs, spread):
    made = plan(MQA, llama(), **{"device": "auto", "batch_size": 16, **knobs})
    sharding, processes, device = spread
    kind = DEVICES[device]
    assert (made.sharding, made.processes) == (sharding, processes)
    assert (made.device_memory_bytes, made.device_flops_per_second) == (kind.memory_bytes, kind.flops_per_second)


def test_devices_share_the_time_and_the_state():
    sections = {
        "source": {"model": "source"},
        "convert": MQA,
        "uptrain": {"steps": 10, "batch_size": 8, "window": WINDOW, "accelerate": "fsdp2", "train": "all"},
    }
    one, eight = (planned(sections, llama(), devices=n, device_flops=1e9, utilization=0.5) for n in (1, 8))
    assert one.flops == eight.flops
    assert one.seconds == one.flops / 0.5e9
    assert one.seconds == pytest.approx(8 * eight.seconds)
    assert one.tokens_per_second * one.seconds == pytest.approx(10 * 8 * WINDOW)
    assert one.moment_bytes == 8 * eight.moment_bytes == 8 * one.trained_parameters
    assert one.fits and not planned(sections, llama(), memory=1000).fits


def test_a_budget_is_planned_as_the_first_choice_that_is_tried():
    made = plan({"to": "mla", "kv_elements": 40}, llama())
    assert (made.kv_lora_rank, made.qk_rope_head_dim, made.kv_elements_per_token_per_layer) == (24, 16, 40)


def test_what_is_said():
    cache = "Cache: 64 -> 32 numbers a token and layer (50.0%); 0.2 KiB a token in float16."
    one = plan(MQA, llama(), teacher="source")
    memory, disk = f"{one.device_bytes / 1e9:.1f} GB", f"{one.disk_bytes / 1e9:.1f} GB"
    minutes = f"{one.flops / (2e11 * 0.4) / 60:.1f} min"
    assert said(one.whole) == [
        f"Planned: one device of {memory}, {minutes} at 40% of 0.2 TFLOP/s, {disk} of disk.",
        cache,
    ]
    many = plan(MQA, llama(), device="auto", batch_size=16, accelerate="multi_node")
    assert many.host_bytes == 8 * 4 * many.parameters  # of one of two machines
    assert said(many.whole)[0].startswith(
        "Planned: 16 devices (fsdp2) of 0.0 GB and 0 GB of host memory, 0.0 min at 40% of 312"
    )
    assert one.host_bytes == 0


@pytest.mark.parametrize(
    ("convert", "uptrain", "said"),
    [
        ({"to": "gqa"}, {}, "says no kv_heads"),
        ({"to": "gqa", "kv_heads": 3}, {}, "2 KV heads cannot form 3 groups; try 1, 2"),
        ({"to": "mqa"}, {}, "it must be gqa or mla"),
        ({"to": "mla"}, {}, "how large the cache may be"),
        (MQA, {"teacher": "another"}, "the teacher another is not the source"),
        (MQA, {"window": 4096}, "longer than the model's context 2048"),
        (MQA, {"processes": 3, "batch_size": 3, "accelerate": "nowhere"}, "no accelerate config 'nowhere'"),
    ],
)
def test_what_cannot_be_planned(convert, uptrain, said):
    with pytest.raises(UserError, match=said):
        plan(convert, llama(), **uptrain)


def test_a_family_without_a_latent_form():
    with pytest.raises(UserError, match="the MLA form of a phi model is not built"):
        plan(LATENT, PHI)


@pytest.mark.parametrize("name", ["source", "convert"])
def test_a_section_is_missing(name):
    sections = {"source": {"model": "source"}, "convert": MQA, "uptrain": {"steps": 10}}
    with pytest.raises(UserError, match=f"no section {name}"):
        plan_all({key: value for key, value in sections.items() if key != name}, llama())


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"utilization": 1.5}, "--utilization is 1.5; it must be at least 0.0001 and at most 1"),
        ({"devices": 0}, "--devices is 0; it must be at least 1"),
        ({"memory": 0}, "--memory is 0"),
        ({"device_flops": float("nan")}, "--device-flops is nan"),
    ],
)
def test_numbers_out_of_range(knobs, said):
    sections = {"source": {"model": "source"}, "convert": MQA, "uptrain": {"steps": 10}}
    with pytest.raises(UserError, match=said):
        plan_all(sections, llama(), **knobs)
