"""Timing models side by side: what is timed, in which order, and what is made of it. No figure here is a speed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from itertools import product

import pytest
import torch
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from kvfold.cli.eval.speed import speed as command
from kvfold.common.errors import UserError
from kvfold.common.loading import load_model
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.mla.convert import convert_mla
from kvfold.eval.cache import measure_cache
from kvfold.eval.speed import floors, turns
from kvfold.eval.speed.floors import ABSORBED, EXPANDED, HEADS, Gauge
from kvfold.eval.speed.footprint import Footprint, measure_footprint
from kvfold.eval.speed.measure import measure_speed, speed
from kvfold.eval.speed.record import SpeedRow
from kvfold.eval.speed.runs import Decoder, decoding

from ..conftest import CONTEXT, make_model
from ..test_cache import MLA


@pytest.fixture
def gauge():
    return Gauge(torch.device("cpu"), torch.float32, copied_bytes=2**20, matrix=64)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Gauges that cost nothing where a test gives none."""
    monkeypatch.setitem(floors.COPIED_BYTES, "cpu", 2**20)
    monkeypatch.setitem(floors.MATRIX, "cpu", 64)


def test_there_is_a_whole_row_for_every_model_context_and_batch_size(gauge):
    models = {"heads": make_model("llama"), "latents": make_model("deepseek_v3", **MLA)}
    models["expanded"] = models["latents"]
    models["heads"].train()
    told = []
    report = measure_speed(
        models,
        contexts=[8, 40, 8],
        batch_sizes=[1, 3, 1],
        steps=2,
        runs=4,
        prefill_runs=2,
        memory_budget=2**20,
        expand=["expanded"],
        gauge=gauge,
        progress=lambda *turns: told.append(turns),
    )
    assert [(r.context, r.batch_size, r.model) for r in report.results] == list(product((8, 40), (1, 3), models))
    assert [r.decoding for r in report.results[:3]] == [HEADS, ABSORBED, EXPANDED]
    for row in report.results:
        figures = asdict(row)
        assert all(value > 0 and math.isfinite(value) for value in figures.values() if not isinstance(value, str))
        for name in ("prefill_tokens_per_second", "tokens_per_second", "milliseconds_per_step"):
            assert figures[f"{name}_min"] <= figures[name] <= figures[f"{name}_max"]
        assert row.tokens_per_second * row.milliseconds_per_step == pytest.approx(1e3 * row.batch_size)
        first = next(r for r in report.results if (r.context, r.batch_size) == (row.context, row.batch_size))
        assert row.x_first == pytest.approx(row.tokens_per_second / first.tokens_per_second)
        bytes_read = row.read_weight_bytes + row.read_cache_bytes
        assert row.memory_floor_ms == pytest.approx(1e3 * bytes_read / report.copy_bytes_per_second)
        assert row.arithmetic_floor_ms == pytest.approx(1e3 * row.flops_per_step / report.matrix_flops_per_second)
        floors = {"memory": row.memory_floor_ms, "arithmetic": row.arithmetic_floor_ms}
        assert floors[row.bound] == max(floors.values())
        assert row.floor_share == pytest.approx(max(floors.values()) / row.milliseconds_per_step)
    assert all(row.x_first == 1 for row in report.results if row.model == "heads")
    assert told == sorted(told)
    assert told[-1] == (28, 28)
    assert models["heads"].training
    assert models["latents"].config._attn_implementation == "sdpa"
    assert not any("expand_kv" in vars(module) for module in models["latents"].modules())
    json.dumps(asdict(report), allow_nan=False)


def test_models_take_turns_and_the_first_block_does_not_count(gauge, monkeypatch):
    seconds = {"a": iter([99, 1.0, 4.0, 30.0]), "b": iter([99, 2.0, 3.0, 10.0])}
    models = {name: make_model("llama") for name in seconds}
    names = {id(model): name for name, model in models.items()}
    order = []

    class Fake:
        def __init__(self, model, **_):
            self.name = names[id(model)]

        def block(self):
            order.append(self.name)
            return next(seconds[self.name])

    monkeypatch.setattr(turns, "Decoder", Fake)
    monkeypatch.setattr(gauge, "take", lambda: order.append("gauge"))
    gauge.copy_seconds = gauge.matrix_seconds = 1.0
    report = measure_speed(models, contexts=[8], batch_sizes=[2], steps=5, runs=3, prefill_runs=0, gauge=gauge)
    assert "".join(name[0] for name in order) == "abg" + "abg" + "bag" + "abg"
    a, b = report.results
    assert (a.milliseconds_per_step, b.milliseconds_per_step) == (4000 / 5, 3000 / 5)
    speeds = (b.tokens_per_second, b.tokens_per_second_min, b.tokens_per_second_max)
    assert speeds == pytest.approx((10 / 3, 1, 5))
    assert b.x_first == pytest.approx(4 / 3)  # the median of 1/2, 4/3 and 30/10 is as much
    assert a.prefill_tokens_per_second is a.largest_batch_size is a.largest_context is None


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("gemma3_text", {"sliding_window": 16, "head_dim": 8}), ("deepseek_v3", MLA)],
)
@pytest.mark.parametrize("expand", [False, True])
def test_a_block_decodes_from_all_that_is_cached_and_leaves_it(family, settings, expand):
    model = make_model(family, **settings)
    decoder = Decoder(model, batch_size=2, context=12, steps=3)
    for held in (tensor for layer in decoder.cache.layers for tensor in (layer.keys, layer.values)):
        assert held.shape[-2] == 15
        assert held[:, :, :12].std() > 0.8, "random numbers"
    dynamic = DynamicCache(config=model.config)
    for number, layer in enumerate(decoder.cache.layers):
        dynamic.update(layer.keys[:, :, :12], layer.values[:, :, :12], number)
    with decoding(model, expand=expand), torch.no_grad():
        token = torch.zeros(2, 1, dtype=torch.long)
        expected = []
        for _ in range(3):
            expected.append(model(token, None, None, dynamic).logits[:, -1])
            token = expected[-1].argmax(-1, keepdim=True)
        torch.testing.assert_close(decoder.logits(), expected[0], rtol=1e-4, atol=1e-4)
        decoder.block()
        assert decoder._token.equal(token)
        torch.testing.assert_close(decoder.logits(), expected[0], rtol=1e-4, atol=1e-4)


class Called(TorchDispatchMode):
    """Hears which operations run inside."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("deepseek_v3", MLA)])
def test_a_step_asks_the_device_nothing(family, settings):
    """As no CUDA graph could record that; nor that something comes from the host."""
    model = make_model(family, **settings)
    decoder = Decoder(model, batch_size=2, context=12, steps=3)
    with decoding(model), torch.no_grad(), Called() as called:
        decoder._step()
    assert {"mm", "index_copy_"} <= called.names
    assert not called.names & {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "lift_fresh"}


BUDGETS = [0, 999, 1000, 1001, 1000 + 3 * 64 * 10, 20_000]


@pytest.mark.parametrize("memory", BUDGETS)
@pytest.mark.parametrize("settings", [{}, {"sliding_window": 16, "model_type": "mistral"}], ids=["full", "windowed"])
def test_what_fits_is_what_counting_up_finds(settings, memory):
    settings = {"model_type": "llama", **settings}
    footprint = Footprint(make_model(settings.pop("model_type"), **settings).config, 1000, 64 * 20, 2 * 10)

    def fits(batch_size, context):
        return footprint.weight_bytes + batch_size * footprint.cache_bytes(context) <= memory

    for context in (1, 10, 33, CONTEXT):
        batch_sizes = [n for n in range(1, 1000) if fits(n, context)]
        assert footprint.largest_batch_size(context, memory) == max(batch_sizes, default=0)
    for batch_size in (1, 3, 20):
        contexts = [n for n in range(1, CONTEXT + 1) if fits(batch_size, n)]
        assert footprint.largest_context(batch_size, memory) == max(contexts, default=0)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("mistral", {"sliding_window": 16}),
        ("deepseek_v3", MLA),
    ],
)
def test_the_cache_of_any_context_follows_from_the_one_that_was_measured(family, settings):
    model = make_model(family, **settings)
    footprint = measure_footprint(model, name="m")
    for context in (1, 10, 40):
        assert footprint.cache_bytes(context) == measure_cache(model, model="m", context=context).measured_kv_bytes


REFUSALS = {
    "long": ({"contexts": [60, 61], "steps": 4}, "context 61 and 4 steps are more than the context 64 of m; give 60"),
    "no context": ({"contexts": [0]}, "context 0 leaves nothing to time; give 1 or more"),
    "no batch": ({"batch_sizes": [1, 0]}, "batch_size 0 leaves"),
    "no batches": ({"batch_sizes": []}, "nothing to time"),
    "no steps": ({"steps": 0}, "steps 0 leaves"),
    "no model's memory": ({"memory_budget": 16}, "a memory of 16 bytes holds no model; give .* unit, such as 16GiB"),
    "no runs": ({"runs": -1}, "runs -1 leaves"),
    "many steps": ({"steps": 64}, "64 steps leave no context of the 64 tokens that m takes"),
    "graphs": ({"cuda_graphs": True}, "CUDA graphs need a CUDA device"),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(options, message, llama):
    with pytest.raises(UserError, match=message):
        measure_speed({"m": llama}, **options)


def test_models_that_do_not_compare(llama, save, monkeypatch):
    with pytest.raises(UserError, match="one dtype only \\(a float32 on cpu, b float64 on cpu\\); give --dtype"):
        measure_speed({"a": llama, "b": make_model("llama").double()})
    with pytest.raises(UserError, match="x is given twice"):
        speed(["x", "y", "x"])
    folder = save(llama, tokenizer=False)
    with pytest.raises(UserError, match=f"{folder} and {folder}/ are one model; give every model once"):
        speed([folder, "y", f"{folder}/"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes would slow each other down"):
        measure_speed({"a": llama})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": [CONTEXT]}, "context 64 and 8 steps are more than the context 64"),
        ({"steps": CONTEXT}, "64 steps leave no context"),
        ({"runs": 0}, "runs 0 leaves"),
        ({"memory": 2**20 - 1}, "a memory of 1,048,575 bytes holds no model"),
    ],
)
def test_a_config_is_enough_to_refuse(options, message, llama, tmp_path, monkeypatch):
    llama.config.save_pretrained(tmp_path)
    monkeypatch.setattr("kvfold.eval.speed.measure.load_model", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises(UserError, match=message):
        speed([tmp_path], **options)


def test_a_revision_is_the_first_models(llama, save, monkeypatch):
    heads, others = save(llama, tokenizer=False), save(make_model("gpt2"), "other", tokenizer=False)
    asked = []

    def local(model, revision=None, **_):
        asked.append((str(model), revision))
        return load_model(heads if str(model) == "org/model" else others)

    monkeypatch.setattr("kvfold.eval.speed.measure.read_any_config", lambda *given: local(*given).config)
    monkeypatch.setattr("kvfold.eval.speed.measure.load_model", local)
    speed(["org/model", others], revision="v1", context=[8], steps=1, runs=1)
    assert asked == [("org/model", "v1"), (others, None)] * 2
    assert "of the first MODEL" in CliRunner().invoke(command, ["--help"]).stdout


def test_a_window_of_one_token_keeps_nothing(gauge, monkeypatch):
    model = make_model("mistral", sliding_window=1)
    (row,) = measure_speed(
        {"m": model}, contexts=[8], steps=2, runs=1, memory_budget=2**20, gauge=gauge, prefill_runs=0
    ).results
    assert (row.read_cache_bytes, row.largest_batch_size, row.largest_context) == (0, None, CONTEXT)
    footprint = measure_footprint(model, name="m")
    less = footprint.weight_bytes - 1
    assert (footprint.largest_batch_size(8, less), footprint.largest_context(1, less)) == (0, 0)
    monkeypatch.setattr("kvfold.eval.speed.footprint.context_length", lambda config: None)
    assert footprint.largest_context(1, 2**20) is None


def test_rows_tell_decoding_before_prompts():
    names = [field.name for field in fields(SpeedRow)]
    assert names[:5] == ["model", "decoding", "context", "batch_size", "tokens_per_second"]
    assert [name for name in names if name.startswith(("prefill", "largest"))] == names[-5:]


def test_default_contexts_are_what_every_model_takes(llama, gauge):
    def contexts(models):
        return [row.context for row in measure_speed(models, steps=4, runs=1, prefill_runs=0, gauge=gauge).results]

    long = make_model("llama", max_position_embeddings=1028)
    assert contexts({"long": long}) == [512, 1024]
    assert contexts({"long": long, "short": llama}) == [CONTEXT - 4] * 2


def test_checkpoints_of_every_form(llama, save, tmp_path):
    src = save(llama, tokenizer=False)
    convert_gqa(src, tmp_path / "gqa", kv_heads=1, method="mean")
    sizes = {"kv_rank": 10, "rope_dim": 4, "rope_select": "high", "calib": ["none"]}
    for form in ("plain", "deepseek_v3"):
        convert_mla(src, tmp_path / form, form=form, **sizes)
    models = [src, *(str(tmp_path / name) for name in ("gqa", "plain", "deepseek_v3"))]
    options = {"context": [16], "steps": 2, "runs": 1}
    report = speed(models, **options, memory=2**20)
    assert [row.model for row in report.results] == models
    assert [row.decoding for row in report.results] == [HEADS, HEADS, ABSORBED, ABSORBED]
    assert [row.read_cache_bytes for row in report.results] == [16 * 2 * 4 * n for n in (32, 16, 14, 14)]
    assert report.protocol.dtype == "float32"
    report = speed(models[2:], **options, absorb=False)
    assert [row.decoding for row in report.results] == [EXPANDED, EXPANDED]

    flags = [*models[:2], "--context", "16", "--steps", "2", "--runs", "1", "--memory", "1MiB"]
    said = CliRunner().invoke(command, [*flags, "--json"], catch_exceptions=False)
    rows = json.loads(said.stdout)["results"]
    assert [(row["model"], row["largest_context"]) for row in rows] == [(model, CONTEXT) for model in models[:2]]
    said = CliRunner().invoke(command, flags, catch_exceptions=False).stdout
    assert "copy_bytes_per_second" in said
    titles = ("decode tok/s", "largest batch", "largest context, the model's at most", "arithmetic floor ms")
    assert all(title in said for title in (*titles, *models[:2]))
