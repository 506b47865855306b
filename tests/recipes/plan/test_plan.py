"""The plan of all stages: what it is added up from, and how it finds a way that fits."""

import json

import pytest
import torch
from transformers import LlamaConfig

from kvfold.common.embedded import MODEL_DIR
from kvfold.common.errors import UserError
from kvfold.convert import plan as forms
from kvfold.convert.calibration.calibrate import Runner, calibrate
from kvfold.convert.calibration.collect import _Taps
from kvfold.convert.calibration.knobs import Calibration
from kvfold.convert.calibration.text import CalibText
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.projections import projections
from kvfold.convert.source import open_source
from kvfold.eval.shape import read_any_config
from kvfold.recipes.plan.machine import machine_of
from kvfold.recipes.plan.models import result_of, source_of
from kvfold.recipes.plan.plan import plan, said
from kvfold.recipes.plan.stages import Work
from kvfold.recipes.plan.usual import usual_pipeline

EMBEDDED = read_any_config(MODEL_DIR)


def big(**others):
    """A model of 8e9 parameters or so, which nobody makes here."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    return LlamaConfig(**sizes | {"num_key_value_heads": 8, "vocab_size": 128256, "dtype": "bfloat16"} | others)


def planned(config, *overrides, devices=None, **machine):
    pipeline = usual_pipeline("model", config, overrides, devices=devices)
    return plan(pipeline.sections, config, devices=devices, **machine)


def stage(made, name):
    return next(row for row in made.results if row.stage == name)


def extent_of(config):
    convert = {"to": "gqa", "kv_heads": 1}
    return Work(source_of(config), result_of(config, convert), {"convert": convert}, machine_of({})).extent()


@pytest.mark.parametrize("fisher", [True, False])
def test_statistics_and_sums_are_as_large_as_they_are(tmp_path, fisher):
    extent = extent_of(EMBEDDED)
    report = calibrate(MODEL_DIR, tmp_path / "stats", calib_windows=1, calib_window=16, fisher=fisher)
    layers = extent.layers
    header = report.bytes - forms.statistics_bytes(extent, fisher=fisher)
    assert 0 < header < 1000 * layers  # names, hashes and ranks
    with open_source(str(MODEL_DIR)) as source:
        runner = Runner(source, Calibration(CalibText()))
        model = runner.model()
        with model.loaded([0]) as (layer,):
            taps = _Taps(0, layer, projections(source.family, runner.sizes), "cpu", fisher, fisher and runner.still)
    sums = [*taps.inputs.values(), *taps.gradients.values()]
    assert sum(moment.sum.nbytes for moment in sums) == forms.sums_bytes(extent, fisher=fisher)


def test_the_extent_is_that_of_the_tensors():
    extent = extent_of(EMBEDDED)
    with open_source(str(MODEL_DIR)) as source:
        tensors = source.checkpoint.tensors
        layer = [info.numel for name, info in tensors.items() if ".layers.0." in name]
        others = [info.numel for name, info in tensors.items() if ".layers." not in name]
    assert (extent.layer, extent.others) == (sum(layer), sum(others))


def test_what_a_conversion_writes_is_what_it_is_planned_to_write(tmp_path):
    made = planned(EMBEDDED, "convert.kv_heads=2", "convert.method=mean")
    assert (
        stage(made, "convert").disk_bytes == convert_gqa(MODEL_DIR, tmp_path / "out", kv_heads=2, method="mean").bytes
    )


def test_conversion_and_offloaded_calibration_are_flat_in_the_number_of_layers():
    few, many = (planned(big(num_hidden_layers=n), "convert.offload=true") for n in (8, 80))
    assert stage(few, "convert").host_bytes == stage(many, "convert").host_bytes
    assert stage(few, "convert").device_bytes == stage(many, "convert").device_bytes
    assert stage(few, "calibrate").device_bytes == stage(many, "calibrate").device_bytes
    whole = [stage(planned(big(num_hidden_layers=n), memory=1e15), "calibrate").device_bytes for n in (8, 80)]
    assert whole[1] > 5 * whole[0]


def test_a_calibration_that_does_not_fit_is_offloaded():
    roomy, narrow = (stage(planned(big(), memory=memory), "calibrate") for memory in (80e9, 16e9))
    assert roomy.fits and roomy.how == ()
    assert narrow.fits and narrow.how == ("offload=true",)
    assert narrow.device_bytes < 16e9 < roomy.device_bytes
    assert narrow.disk_bytes > roomy.disk_bytes  # hidden states


@pytest.mark.parametrize(
    ("devices", "memory", "how"),
    [
        (1, 200e9, "accelerate=single"),
        (8, 80e9, "accelerate=ddp"),
        (8, 60e9, "accelerate=ddp gradient_checkpointing=true"),
        (8, 40e9, "accelerate=fsdp2"),
        (8, 32e9, "accelerate=fsdp2 gradient_checkpointing=true"),
        (16, 80e9, "accelerate=multi_node"),
    ],
)
def test_the_fastest_way_that_fits(devices, memory, how):
    row = stage(planned(big(), devices=devices, memory=memory), "uptrain")
    assert (row.fits, " ".join(row.how), row.processes) == (True, how, devices)


def test_what_is_asked_for_is_not_chosen():
    asked = ("uptrain.accelerate=ddp", "uptrain.gradient_checkpointing=false")
    made = planned(big(), *asked, devices=8, memory=40e9)
    assert not made.fits and stage(made, "uptrain").how == ()
    assert "uptrain on 8 devices takes" in made.notes[0] and "40.0 GB" in made.notes[0]


def test_a_host_that_is_too_small():
    made = planned(big(), "uptrain.accelerate=fsdp2", devices=8, host_memory=100e9)
    assert not stage(made, "uptrain").fits
    assert "GB of a machine's memory, which has 100.0 GB" in made.notes[0]


def test_how_many_devices_would_do():
    made = planned(big(), "uptrain.teacher=", devices=2, memory=24e9)
    assert not made.fits
    (note,) = made.notes
    enough = int(note.rpartition("; ")[2].split()[0])
    assert planned(big(), "uptrain.teacher=", f"uptrain.batch_size={enough * 4}", devices=enough, memory=24e9).fits
    assert not planned(
        big(), "uptrain.teacher=", f"uptrain.batch_size={enough * 4}", devices=enough // 2, memory=24e9
    ).fits


def test_a_teacher_that_no_device_holds():
    made = planned(big(num_hidden_layers=400), devices=8, memory=80e9)
    assert made.notes[-1].endswith("try uptrain.teacher=") and "each holds the whole teacher" in made.notes[-1]


def test_stages_are_those_that_would_run():
    def names(*overrides):
        return [row.stage for row in planned(big(), *overrides, devices=8).results]

    assert names() == ["calibrate", "convert", "uptrain"]
    assert names("convert.method=mean") == ["convert", "uptrain"]
    assert names("convert.calib=none") == ["convert", "uptrain"]
    assert names("convert.refine=8") == ["calibrate", "convert", "refine", "uptrain"]
    assert names("convert.to=mla") == ["calibrate", "convert", "uptrain"]


def test_the_usual_pipeline():
    sections = usual_pipeline("model", big(), devices=12).sections
    assert sections["convert"] == {"to": "gqa", "kv_heads": 2}
    assert sections["uptrain"]["batch_size"] == 36
    assert usual_pipeline("model", big(), ["convert.to=mla"]).sections["convert"] == {"to": "mla", "kv_ratio": 0.25}
    mine = usual_pipeline("model", big(), ["convert.kv-heads=4", "uptrain.steps=10"]).sections
    assert mine["convert"]["kv_heads"] == 4 and "tokens" not in mine["uptrain"]
    with pytest.raises(UserError, match="a llama model with one KV head cannot have fewer; plan a latent"):
        usual_pipeline("model", big(num_key_value_heads=1))


def test_a_cpu_is_one_memory():
    made = planned(EMBEDDED, "uptrain.device=cpu")
    assert made.device == "cpu" and made.fits
    assert not planned(EMBEDDED, "uptrain.device=cpu", host_memory=1e8).fits
    assert not planned(EMBEDDED, "uptrain.device=cpu", devices=8, memory=1e9).fits
    assert all(row.device_bytes == row.host_bytes > forms.TORCH for row in made.results)
    assert torch.tensor([row.seconds for row in made.results]).gt(0).all()
    assert len(said(made)) == 2


def test_json_is_plain(capsys):
    from dataclasses import asdict

    made = planned(big(), devices=8)
    text = json.dumps(asdict(made), allow_nan=False)
    assert json.loads(text)["training"]["processes"] == 8


def test_a_plan_is_refused_where_the_conversion_would_be():
    from transformers import GPT2Config, MistralConfig, Qwen3Config

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 4}
    qwen = Qwen3Config(**sizes)
    assert usual_pipeline("m", qwen).sections["convert"]["method"] == "mean"
    with pytest.raises(UserError, match="svd mixes channels, which qwen3's QK-norm"):
        planned(qwen, "convert.method=svd")
    with pytest.raises(UserError, match="sliding window of 16 tokens"):
        planned(MistralConfig(**sizes, sliding_window=16), "convert.to=mla")
    gpt2 = GPT2Config(n_embd=64, n_head=8, n_layer=2)
    assert usual_pipeline("m", gpt2).sections["convert"]["kv_heads"] == 1
    with pytest.raises(UserError, match="2 KV heads are not possible: a gpt_bigcode model holds one KV head or all"):
        planned(gpt2, "convert.kv_heads=2")


def test_what_is_latent_already_cannot_be_planned():
    from transformers import DeepseekV3Config

    with pytest.raises(UserError, match="a deepseek_v3 model cannot be converted: its attention is MLA already"):
        planned(DeepseekV3Config())


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"devices": 4097}, "--devices is 4097; it must be at least 1 and at most 4096"),
        ({"device_flops": 1e-300}, "--device-flops is 1e-300; it must be at least 1e"),
        ({"utilization": 5e-324}, "--utilization is"),
    ],
)
def test_numbers_that_nothing_can_be_divided_by(knobs, said):
    with pytest.raises(UserError, match=said):
        planned(big(), **knobs)
