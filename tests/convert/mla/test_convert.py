"""From a checkpoint to MLA and into a model: equal where it can be, near where it cannot, refused where it must."""

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from kvfold.common.errors import UserError
from kvfold.convert.calibration import calibrate as calibrating
from kvfold.convert.calibration.calibrate import Runner
from kvfold.convert.calibration.knobs import Calibration
from kvfold.convert.calibration.store import Statistics
from kvfold.convert.calibration.text import CalibText
from kvfold.convert.check import check
from kvfold.convert.mla import convert as converting
from kvfold.convert.mla import stock
from kvfold.convert.mla.convert import convert_mla
from kvfold.convert.plain import convert_plain
from kvfold.convert.source import open_source
from kvfold.convert.verify import verify
from kvfold.recipes.tiny import MODEL_DIR

from ..test_refusals import edit_config
from ..tiny import make_config, make_gpt2, make_model
from .plain_models import difference, exact, logits, make_plain
from .sources import BIASED, SOURCES, WINDOW, equal_heads, knobs, make_source, save_source, twins

PART = {"phi3-part", "stablelm"}
SEPARATE = [case for case in SOURCES if "phi3" not in case and case not in PART]
NONE = {"calib": ["none"], "calib_builtin": True, "calib_windows": 128, "calib_window": None}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "argparse.txt"
    path.write_text(inspect.getsource(argparse))
    return str(path)


@pytest.fixture(scope="module")
def convert(text):
    """Convert to the plain form, calibrated on a few windows."""

    def run(src, out, **options):
        return convert_mla(src, out, **{"form": "plain", **knobs(text), **options})

    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Random sources, each made once: case and number of KV heads -> folder."""
    made = {}

    def find(case, kv_heads=2):
        if (case, kv_heads) not in made:
            made[case, kv_heads] = save_source(make_source(case, kv_heads), tmp_path_factory.mktemp(case))
        return made[case, kv_heads]

    return find


def load(path, dtype=torch.float64, **options):
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True, **options)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]), info
    return exact(model.eval())


def stored(path):
    return load_file(Path(path) / "model.safetensors")


def full_sizes(case, config, distinct=1):
    """All rotation, and the rank that holds the values and still keys of so many distinct heads."""
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    turning = int(d * share)
    still = d if case == "smollm3" else d - turning  # it has a layer without positions
    return {"kv_rank": distinct * (d + still), "rope_dim": turning}


# Full rank.


def assert_is_the_source(src, out, report, sizes):
    source, result = load(src), load(out)
    expected = logits(source)  # positions 0 to 200
    assert difference(logits(result), expected) < 1e-9
    ids = torch.randint(3, 97, (2, 70), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = source(ids, use_cache=False).logits
        for cache in (DynamicCache(config=result.config), StaticCache(result.config, max_cache_len=75)):
            pieces = [
                result(part, past_key_values=cache, use_cache=True).logits for part in ids.split([60, 1, 1, 8], 1)
            ]
            assert difference(torch.cat(pieces, dim=1), expected) < 1e-9
            held = sum(layer.keys[:, :, :70].numel() + layer.values[:, :, :70].numel() for layer in cache.layers)
            assert held == 2 * 70 * 2 * (sizes["kv_rank"] + sizes["rope_dim"])
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        padded = result(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        assert difference(padded[:1, 5:], source(ids[:1, 5:], use_cache=False).logits) < 1e-9
    assert report.kv_elements_per_token_per_layer == sizes["kv_rank"] + sizes["rope_dim"]


@pytest.mark.parametrize("case", [case for case in SOURCES if case != "smollm3"])
def test_one_kv_head_at_full_rank_is_the_source(case, convert, saved, tmp_path):
    src = saved(case, 1)
    sizes = full_sizes(case, load(src).config)
    assert_is_the_source(src, tmp_path / "out", convert(src, tmp_path / "out", **sizes), sizes)


@pytest.mark.parametrize("case", SOURCES)
def test_equal_kv_heads_are_the_source(case, convert, tmp_path):
    src = save_source(model := equal_heads(case, 2), tmp_path / "src")
    sizes = full_sizes(case, model.config)
    assert_is_the_source(src, tmp_path / "out", convert(src, tmp_path / "out", **sizes), sizes)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("case", SEPARATE)
def test_heads_equal_up_to_what_commutes_are_the_source(case, kv_heads, convert, tmp_path):
    src = save_source(model := twins(case, kv_heads), tmp_path / "src")
    sizes = full_sizes(case, model.config)
    assert_is_the_source(src, tmp_path / "out", convert(src, tmp_path / "out", **sizes), sizes)


@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3-part", "stablelm"])
def test_weights_alone_at_full_rank_are_the_source(case, convert, saved, tmp_path):
    src = saved(case, 1)
    sizes = full_sizes(case, load(src).config)
    report = convert(src, tmp_path / "out", **sizes, **NONE)
    assert_is_the_source(src, tmp_path / "out", report, sizes)
    assert ["weights alone" in warning for warning in report.warnings] == [True]
    assert convert(src, tmp_path / "dry", **sizes, **NONE, dry_run=True).warnings == report.warnings


@pytest.mark.parametrize("case", ["phi3-part", "stablelm"])
def test_free_coordinates_of_all_heads_are_kept(case, convert, tmp_path):
    """Heads whose turning coordinates agree, and nothing else."""
    model = equal_heads(case, 2)
    other = make_source(case, 2, seed=5)
    d = model.config.hidden_size // model.config.num_attention_heads
    turning = int(d * model.config.rope_parameters["partial_rotary_factor"])
    with torch.no_grad():
        for ours, theirs in zip(model.model.layers, other.model.layers, strict=True):
            fused = case == "phi3-part"
            ours, theirs = ((a.self_attn.qkv_proj if fused else a.self_attn.k_proj) for a in (ours, theirs))
            start = 64 if fused else 0  # after the queries
            for head in range(2):
                rows = slice(start + head * d + turning, start + (head + 1) * d)
                ours.weight[rows] = theirs.weight[rows]
                if ours.bias is not None:
                    ours.bias[rows] = theirs.bias[rows]
    src = save_source(model, tmp_path / "src")
    sizes = {"kv_rank": 2 * (d - turning) + d, "rope_dim": turning}
    assert_is_the_source(src, tmp_path / "out", convert(src, tmp_path / "out", **sizes), sizes)


# Biases.


def with_key_bias(model, factor):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias *= factor
    return model


@pytest.mark.parametrize("make", [lambda: make_source("qwen2", 1), lambda: twins("qwen2", 4)], ids=["one", "twins"])
def test_key_biases_as_large_as_qwen2_s(make, convert, tmp_path):
    src = save_source(with_key_bias(make(), 50), tmp_path / "src")
    report = convert(src, tmp_path / "out", kv_rank=16, rope_dim=16)
    assert_is_the_source(src, tmp_path / "out", report, {"kv_rank": 16, "rope_dim": 16})
    bias = stored(tmp_path / "out")["model.layers.0.self_attn.kv_a_proj_with_mqa.bias"]
    assert bias[16:].abs().max() > 5


@pytest.mark.parametrize("case", SOURCES)
def test_biases_are_there_where_the_source_has_them(case, convert, saved, tmp_path):
    convert(saved(case), tmp_path / "out", kv_rank=8, rope_dim=4, rope_select="high")
    biases = {
        name.split("self_attn.")[1] for name in stored(tmp_path / "out") if ".self_attn." in name if "bias" in name
    }
    wanted = {f"{name}.bias" for name in ("q_proj", "kv_a_proj_with_mqa", "o_proj")}
    assert biases == (wanted if case in BIASED else set())


def nearly_twins(bias):
    """Two KV heads that nearly agree, mild attention, and biases so many times as large."""
    model, generator = twins("qwen2", 2), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for rows in (attention.k_proj, attention.v_proj):
                noise = torch.randn(rows.weight.shape, generator=generator, dtype=torch.float64)
                rows.weight += 0.1 * rows.weight.std() * noise
                rows.bias *= bias
            for tensor in (attention.q_proj.weight, attention.q_proj.bias):
                tensor *= 0.05
    return model


def kl(ours, theirs):
    ours, theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.mark.parametrize("bias", [1, 50])
@pytest.mark.parametrize("kv_rank", [16, 24])
def test_biased_is_no_worse_than_its_unbiased_twin(kv_rank, bias, convert, text, tmp_path):
    """At reduced rank, on the text that both were calibrated on: so few tokens say little of others."""
    lost = []
    for factor in (bias, 0):
        src, out = save_source(nearly_twins(factor), tmp_path / f"src{factor}"), tmp_path / f"out{factor}"
        convert(src, out, kv_rank=kv_rank, rope_dim=16)
        source, result = load(src), load(out)
        with open_source(str(src)) as opened:
            how = CalibText((text,), knobs(text)["calib_windows"], WINDOW, builtin=False)
            windows = Runner(opened, Calibration(how)).windows().ids
        with torch.no_grad():
            lost.append(mean(kl(result(ids[None]).logits, source(ids[None]).logits) for ids in windows))
    assert lost[0] < 1.1 * lost[1] < 0.1


# Reduced sizes.


@pytest.fixture(scope="module")
def embedded(convert, text, tmp_path_factory):
    """The embedded model at several sizes -> KL to it."""
    folder, found = tmp_path_factory.mktemp("embedded"), {}

    def kl(**sizes):
        key = tuple(sizes.items())
        if key not in found:
            out = folder / str(len(found))
            convert(MODEL_DIR, out, rope_select="high", calib_window=256, **sizes)
            found[key] = verify(MODEL_DIR, out, text=[text], max_windows=4, window=256).kl
        return found[key]

    return kl


def test_more_rank_is_nearer(embedded):
    found = [embedded(kv_rank=rank, rope_dim=32) for rank in (8, 32, 96, 160)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 5 * found[-1]


@pytest.mark.parametrize("case", ["llama", "qwen2", "smollm3", "phi3-part"])
def test_batches_and_offload_do_not_matter(case, convert, saved, tmp_path):
    expected = None
    for number, options in enumerate(({}, {"calib_batch_size": 3}, {"offload": True})):
        os.environ["KVFOLD_CACHE"], cache = str(tmp_path / f"cache{number}"), os.environ["KVFOLD_CACHE"]
        try:
            sizes = {"kv_rank": 12, "rope_dim": 6, "rope_select": "high"}
            convert(saved(case), tmp_path / str(number), **sizes, calib_dtype="float64", **options)
        finally:
            os.environ["KVFOLD_CACHE"] = cache
        found = logits(load(tmp_path / str(number)))
        expected = found if expected is None else expected
        assert difference(found, expected) < 1e-6  # statistics are kept in fp32


@pytest.mark.parametrize("case", ["llama", "qwen2", "smollm3", "stablelm"])
@pytest.mark.parametrize("fisher", [True, False])
def test_three_tokens_are_enough(case, fisher, convert, saved, tmp_path):
    few = {"calib_windows": 1, "calib_window": 3, "fisher": fisher}
    report = convert(saved(case), tmp_path / "out", kv_rank=8, rope_dim=4, rope_select="high", **few)
    assert report.calib_tokens == 3
    assert all(1 <= rank <= 3 for rank in Statistics.open(Path(report.stats)).effective_ranks())
    assert all(tensor.isfinite().all() for tensor in stored(tmp_path / "out").values())
    assert logits(load(tmp_path / "out")).isfinite().all()


@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3-part"])
def test_three_tokens_at_full_rank_are_the_source(case, convert, saved, tmp_path):
    src = saved(case, 1)
    sizes = full_sizes(case, load(src).config)
    report = convert(src, tmp_path / "out", **sizes, calib_windows=1, calib_window=3)
    assert_is_the_source(src, tmp_path / "out", report, sizes)


def test_a_dead_channel(convert, tmp_path):
    model = make_source("llama", 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter[:, 5] = 0
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[5] = 0
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                parameter[3] = 0
    src = save_source(model, tmp_path / "src")
    report = convert(src, tmp_path / "out", kv_rank=16, rope_dim=8, rope_select="fold")
    assert not Statistics.open(Path(report.stats)).layer(0).inputs[5].any()
    assert logits(load(tmp_path / "out")).isfinite().all()


@pytest.mark.parametrize(
    ("term", "calibrated"),
    [("q", True), ("k", True), ("v", True), ("o", True), ("q", False), ("k", False), ("v", False)],
)
def test_a_number_that_is_none_is_refused(term, calibrated, convert, tmp_path):
    model = make_source("llama", 2)
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, f"{term}_proj").weight[3, 4] = torch.nan
    src = save_source(model, tmp_path / "src")
    with pytest.raises(UserError, match=rf"layers\.1\.self_attn\.{term}_proj\.weight") as refused:
        convert(src, tmp_path / "out", kv_rank=8, rope_dim=4, rope_select="high", **({} if calibrated else NONE))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_source_in_bfloat16(convert, text, tmp_path):
    src = save_source(make_source("llama", 1).to(torch.bfloat16), tmp_path / "src")
    convert(src, tmp_path / "out", kv_rank=16, rope_dim=16)
    assert {tensor.dtype for tensor in stored(tmp_path / "out").values()} == {torch.bfloat16}
    one, other = load(src), load(tmp_path / "out")
    assert difference(logits(other), logits(one)) < 0.1  # factors are rounded once
    convert(src, tmp_path / "wide", kv_rank=16, rope_dim=16, dtype="float32")
    assert difference(logits(load(tmp_path / "wide")), logits(one)) < 1e-5


# Budgets and search.


@pytest.mark.parametrize("budget", [{"kv_elements": 20}, {"kv_ratio": 0.3125}], ids=str)
@pytest.mark.parametrize("select", ["high", "stride", "fold"])
def test_a_budget_is_measured(budget, select, convert, saved, tmp_path):
    """20 of the 64 that the source caches."""
    out = tmp_path / "out"
    report = convert(saved("llama"), out, **budget, rope_dim=8, rope_select=select)
    assert (report.kv_lora_rank, report.qk_rope_head_dim, report.rope_select) == (12, 8, select)
    model = load(out)
    cache = model(torch.arange(3, 33)[None], use_cache=True).past_key_values
    assert [layer.keys.numel() + layer.values.numel() for layer in cache.layers] == [30 * 20] * 2
    assert (report.kv_elements_per_token_per_layer, report.source_kv_elements_per_token_per_layer) == (20, 64)
    assert report.kv_ratio == 20 / 64
    assert report.kv_bytes_per_token == 2 * 20 * 8
    assert report.source_kv_bytes_per_token == 2 * 64 * 8


def test_the_search_is_reported_and_written(convert, saved, tmp_path):
    stages = []

    @contextmanager
    def progress(label):
        stages.append(label)
        yield lambda done, total: None

    report = convert(saved("llama"), tmp_path / "out", kv_elements=12, search_windows=2, progress=progress)
    assert stages == ["calibrating", "searching", "writing"] or stages == ["searching", "writing"]
    assert report.search_windows == 2
    found = [(one["loss"], one["rope_select"], one["rope_dim"], one["kv_rank"]) for one in report.search]
    assert len(found) > 2
    assert [one[0] for one in found] == sorted(one[0] for one in found)
    assert found[0] == (report.search_loss, report.rope_select, report.qk_rope_head_dim, report.kv_lora_rank)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (report.kv_lora_rank, report.qk_rope_head_dim)
    recipe = json.loads((tmp_path / "out/kvfold.json").read_text())["recipe"]
    assert recipe["search"] == report.search
    assert recipe["rope_select"] == report.rope_select


def test_dry_run_writes_nothing(convert, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "collect", None)
    report = convert(saved("llama"), tmp_path / "out", kv_elements=24, dry_run=True)
    assert report.dry_run
    assert report.calib_tokens > 0
    assert ["are the first of" in warning for warning in report.warnings] == [True]
    assert report.kv_elements_per_token_per_layer <= 24
    assert not list(tmp_path.iterdir())


def test_same_command_same_bytes(convert, saved, tmp_path):
    for name in (names := ("one", "two")):
        convert(saved("qwen2"), tmp_path / name, kv_rank=12, rope_dim=8, rope_select="fold")
    assert all(torch.equal(*pair) for pair in zip(*(stored(tmp_path / name).values() for name in names), strict=True))


def test_tied_and_untied_heads_stay_so(convert, saved, tmp_path):
    for case, tied in (("llama-tied", True), ("llama", False)):
        convert(saved(case), tmp_path / case, kv_rank=12, rope_dim=8, rope_select="fold")
        assert ("lm_head.weight" in stored(tmp_path / case)) is not tied
        model = load(tmp_path / case)
        assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied


def test_what_is_not_attention_is_copied(convert, saved, tmp_path):
    convert(saved("phi3"), tmp_path / "out", kv_rank=12, rope_dim=8, rope_select="fold")
    before, after = stored(saved("phi3")), stored(tmp_path / "out")
    others = {name for name in before if ".self_attn." not in name}
    assert others == {name for name in after if ".self_attn." not in name}
    assert all(torch.equal(before[name], after[name]) for name in others)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (saved("phi3") / "tokenizer.json").read_bytes()


# Refinement.


def test_refinement_brings_every_layer_nearer(convert, text, tmp_path):
    options = {"calib_window": 128, "kv_rank": 48, "rope_dim": 16, "rope_select": "high"}
    report = convert(MODEL_DIR, tmp_path / "out", **options, refine=4, refine_passes=1)
    assert (report.refine_windows, report.refine_passes) == (4, 1)
    assert len(report.layer_errors_before) == 4
    before, after = report.layer_errors_before, report.layer_errors_after
    assert all(later <= sooner for sooner, later in zip(before, after, strict=True))
    assert mean(after) < 0.97 * mean(before)
    convert(MODEL_DIR, tmp_path / "raw", **options)
    raw, refined = (
        verify(MODEL_DIR, tmp_path / name, text=[text], max_windows=4, window=256) for name in ("raw", "out")
    )
    assert refined.kl < raw.kl
    convert(MODEL_DIR, tmp_path / "stock", **options, refine=4, refine_passes=1, form="deepseek_v3")
    stock = verify(MODEL_DIR, tmp_path / "stock", text=[text], max_windows=4, window=256)
    assert stock.kl == pytest.approx(refined.kl, rel=0.05)


def test_what_is_compared_is_the_state_after_the_mlp(convert, tmp_path, monkeypatch):
    options = {"calib_window": 128, "kv_rank": 48, "rope_dim": 16, "rope_select": "high", "refine": 2}
    after_mlp = convert(MODEL_DIR, tmp_path / "out", **options)
    assert after_mlp.refine_passes == 1
    monkeypatch.setitem(converting.REFINING, "through_mlp", False)
    after_attention = convert(MODEL_DIR, tmp_path / "other", **options)
    assert after_mlp.layer_errors_before[0] != pytest.approx(after_attention.layer_errors_before[0], rel=0.01)


# The stock form.


FRESH = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(Path(folder, "stock"), dtype=torch.float32).eval()
    assert type(model) is DeepseekV3ForCausalLM, type(model)
    ids = torch.load(sys.argv[1])
    with torch.no_grad():
        output = model(ids, use_cache=True)
    made = model.generate(ids[:, :20], max_new_tokens=6, min_new_tokens=6, do_sample=False)
    held = [layer.keys.numel() + layer.values.numel() for layer in output.past_key_values.layers]
    torch.save((output.logits, made, held), Path(folder, "found"))
assert not any(name.startswith("kvfold") for name in sys.modules)
"""
STOCK = ["llama", "llama-tied", "qwen2", "smollm3", "phi3"]
STOCK_SIZES = {"kv_rank": 20, "rope_dim": 8, "rope_select": "fold"}


@pytest.fixture(scope="module")
def fresh(convert, saved, tmp_path_factory):
    """What stock transformers makes of the stock forms, in one process without kvfold; folders with both forms."""
    folder = tmp_path_factory.mktemp("fresh")
    for case in STOCK:
        report = convert(saved(case), folder / case / "stock", **STOCK_SIZES, form="deepseek_v3")
        assert "transformers" in report.readable_by
        convert(saved(case), folder / case / "plain", **STOCK_SIZES)
    torch.save(torch.randint(3, 97, (1, 201), generator=torch.Generator().manual_seed(3)), folder / "ids")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", FRESH, folder / "ids", *(folder / case for case in STOCK)]
    subprocess.run(list(map(str, command)), check=True, cwd=folder, env=environment, timeout=300)
    return folder


@pytest.mark.parametrize("case", STOCK)
def test_stock_form_in_a_fresh_process(case, fresh):
    ids = torch.load(fresh / "ids")
    found, made, held = torch.load(fresh / case / "found")
    plain = AutoModelForCausalLM.from_pretrained(fresh / case / "plain", dtype=torch.float32).eval()
    with torch.no_grad():
        assert difference(found, plain(ids).logits) < 1e-4
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(made, plain.generate(ids[:, :20], **options))
    assert held == [201 * 28] * 2
    assert "lm_head.weight" in stored(fresh / case / "stock")
    assert json.loads((fresh / case / "stock/config.json").read_text())["tie_word_embeddings"] is False


def test_a_plain_checkpoint_is_exported_as_it_is(convert, fresh, tmp_path):
    """Its latents are not measured, but bounded by its weights."""
    report = convert_mla(fresh / "qwen2/plain", tmp_path / "out")
    assert (report.kv_lora_rank, report.qk_rope_head_dim) == (20, 8)
    assert difference(logits(load(tmp_path / "out")), logits(load(fresh / "qwen2/plain"))) < 1e-5


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_plain_checkpoint_is_planned_once(dry_run, tmp_path, monkeypatch):
    seen, plain_model = [], stock.plain_model
    monkeypatch.setattr(stock, "plain_model", lambda source: seen.append(source) or plain_model(source))
    convert_mla(make_plain(tmp_path / "plain", "qwen2"), tmp_path / "out", dry_run=dry_run)
    assert len(seen) == 1


def test_a_plain_checkpoint_is_exported_by_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(converting, "is_main_process", lambda: False)
    report = convert_mla(make_plain(tmp_path / "plain"), tmp_path / "out")
    assert report.kv_lora_rank == 12
    assert not (tmp_path / "out").exists()


# With a plain checkpoint: options that choose sizes and factors, and what they are called.
CHOOSING = [
    ({"kv_rank": 8}, "--kv-rank"),
    ({"kv_rank": 0}, "--kv-rank"),
    ({"rope_dim": 4}, "--rope-dim"),
    ({"kv_elements": 12}, "--kv-elements"),
    ({"kv_ratio": 0.5}, "--kv-ratio"),
    ({"rope_select": "high"}, "--rope-select"),
    ({"search_windows": 2}, "--search-windows"),
    ({"calib": ["none"]}, "--calib"),
    ({"calib": "builtin"}, "--calib"),
    ({"calib": ["x.txt"], "calib_builtin": False}, "--calib, --no-calib-builtin"),
    ({"calib_windows": 8}, "--calib-windows"),
    ({"calib_window": 64}, "--calib-window"),
    ({"chat": True}, "--chat"),
    ({"fisher": False}, "--no-fisher"),
    ({"stats": "s"}, "--stats"),
    ({"refine": 4}, "--refine"),
    ({"refine_passes": 1}, "--refine-passes"),
    ({"calib_dtype": "float64"}, "--calib-dtype"),
]
# Those that say how to run a model, and none is run; and those that are heeded.
HARMLESS = {"calib_batch_size": 3, "device": "cuda:7", "offload": True}
HEEDED = (
    *("q_rank", "form", "readers", "pad_to_engine", "large_eps", "dtype", "max_shard_size", "overwrite", "dry_run"),
    *("hash", "revision"),
)


@pytest.mark.parametrize(("options", "flags"), CHOOSING, ids=str)
def test_a_plain_checkpoint_leaves_nothing_to_choose(options, flags, no_work, tmp_path):
    with pytest.raises(UserError, match=f"is exported as it is; leave out {flags}$"):
        convert_mla(make_plain(tmp_path / "plain"), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_how_to_run_is_of_no_consequence_for_a_plain_checkpoint(tmp_path):
    src = make_plain(tmp_path / "plain")
    convert_mla(src, tmp_path / "one", calib=[])
    convert_mla(src, tmp_path / "two", **HARMLESS)
    one, two = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_no_option_is_ignored_with_a_plain_checkpoint():
    keywords = inspect.signature(convert_mla).parameters.keys() - {"src", "out", "progress"}
    refused = {name for options, _ in CHOOSING for name in options}
    assert sorted(keywords) == sorted([*refused, *HARMLESS, *HEEDED])


def test_a_cache_that_grows_is_said_once(convert, saved, tmp_path):
    """Whoever is to read it, and also where a plain checkpoint of the same size is exported."""
    grown = {"kv_rank": 64, "rope_dim": 8, "rope_select": "high", **NONE}
    plain, unpadded = tmp_path / "plain", "it caches 72 cached numbers a token and layer, more than the "
    warned = [one for one in convert(saved("smollm3"), plain, **grown).warnings if "caches" in one]
    assert warned == [f"{unpadded}source's 64; choose smaller sizes"]
    (warned,) = convert_mla(plain, tmp_path / "stock").warnings
    assert warned == f"{unpadded}64 of the model that the source was made from; convert that one to smaller sizes"
    mild = {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
    src, readers = make_plain(tmp_path / "small", **mild), ["transformers", "vllm", "vllm-transformers"]
    (warned,) = convert_mla(src, tmp_path / "padded", readers=readers, pad_to_engine=True).warnings
    assert "padded to 576 cached numbers a token and layer, more than the source's 16; leave --pad-to" in warned


# Statistics.


@pytest.mark.parametrize("dry_run", [False, True])
def test_statistics_without_gradients_are_told(dry_run, saved, text, tmp_path):
    calibrating.calibrate(saved("llama"), tmp_path / "lean", **knobs(text), fisher=False)
    calibrating.calibrate(saved("llama"), tmp_path / "whole", **knobs(text))

    def warnings(name, **options):
        options |= {**SIZES, "dry_run": dry_run, "stats": tmp_path / name, "overwrite": True}
        return convert_mla(saved("llama"), tmp_path / "out", **options).warnings

    (warning,) = warnings("lean")
    assert f"{tmp_path / 'lean'} hold no Fisher moments, so the result is worse; make them anew" in warning
    assert warnings("lean", fisher=False) == warnings("whole") == []


# Refusals.


SIZES = {"kv_rank": 8, "rope_dim": 4, "rope_select": "high"}


def test_the_source_is_remembered(convert, saved, tmp_path):
    """From the source to an export, back to the plain form, and to an export again."""
    convert(saved("llama"), tmp_path / "stock", kv_rank=8, rope_dim=8, form="deepseek_v3")
    convert_plain(tmp_path / "stock", tmp_path / "plain")
    convert_mla(tmp_path / "plain", tmp_path / "again")
    said = [json.loads((tmp_path / name / "config.json").read_text())["kvfold"]["source"] for name in NAMES]
    assert said[0]["model_type"] == "llama"
    assert said == said[:1] * 3


NAMES = ("stock", "plain", "again")


def test_lossy_queries_mind_the_inputs(convert, saved, tmp_path, monkeypatch):
    seen, export = [], stock.export
    monkeypatch.setattr(stock, "export", lambda plain, **options: seen.append(options) or export(plain, **options))
    report = convert(saved("llama"), tmp_path / "out", kv_rank=8, rope_dim=8, form="deepseek_v3", q_rank=12)
    assert report.q_lora_rank == 12
    moment = seen[-1]["query_moment"](0)
    assert torch.equal(moment, Statistics.open(Path(report.stats)).layer(0).inputs)


def refuse(src, tmp_path, match, **options):
    out = tmp_path / "out"
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=match) as refused:
        convert_mla(src, out, **{**SIZES, "form": "plain", **options})
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.fixture
def no_work(monkeypatch):
    """Neither a tensor is read nor the model run."""

    def fail(*_, **__):
        raise AssertionError("there was work")

    monkeypatch.setattr("kvfold.convert.checkpoint.Checkpoint.tensor", fail)
    monkeypatch.setattr(calibrating, "collect", fail)


OTHERS = {
    "qwen3": "QK-norm",
    "qwen3_moe": "QK-norm",
    "olmo2": "QK-norm",
    "gemma2": "attn_logit_softcapping",
    "gemma3_text": "QK-norm",
    "olmo": "clip_qkv",
    "stablelm-qk-norm": "QK-norm",
    "mistral": "its sliding window of 64 tokens",
    "mixtral": "is not built; it is for llama, mistral, qwen2, smollm3, phi3, stablelm",
    "cohere": "is not built",
    "gpt2": "has no RoPE",
}


@pytest.mark.parametrize("form", ["plain", "deepseek_v3"])
@pytest.mark.parametrize("case", OTHERS)
def test_families_without_an_mla_form(case, form, no_work, tmp_path):
    config = make_gpt2() if case == "gpt2" else make_config(case, 2)
    make_model(config).save_pretrained(tmp_path / "src")
    refuse(tmp_path / "src", tmp_path, f"cannot be converted to MLA: .*{OTHERS[case]}", form=form)


def test_a_window_of_phi3(no_work, tmp_path):
    make_source("phi3", 2, sliding_window=64).save_pretrained(tmp_path / "src")
    refuse(tmp_path / "src", tmp_path, "its sliding window of 64 tokens has no place")


def test_windows_in_some_layers_of_qwen2(no_work, tmp_path):
    extra = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": None}
    make_source("qwen2", 2, **extra).save_pretrained(tmp_path / "src")
    refuse(tmp_path / "src", tmp_path, "its sliding window of 64 tokens has no place")


def test_stablelm_in_stock_form(no_work, tmp_path):
    make_source("stablelm", 2).save_pretrained(tmp_path / "src")
    refuse(tmp_path / "src", tmp_path, "its norm is a LayerNorm; use --form plain", form="deepseek_v3")


def test_mla_sources(convert, saved, tmp_path):
    convert(saved("llama"), tmp_path / "plain", **SIZES)
    refuse(tmp_path / "plain", tmp_path, "is in the plain form already; leave --form out to export it")
    refuse(tmp_path / "plain", tmp_path, "as it is; leave out --kv-rank, --rope-dim, --rope-select", form="deepseek_v3")
    convert(saved("llama"), tmp_path / "stock", **SIZES, form="deepseek_v3")
    refuse(tmp_path / "stock", tmp_path, "its attention is MLA already")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "deepseek"}, "unknown form 'deepseek'; did you mean deepseek_v3?"),
        ({"rope_select": "hig"}, "unknown rotary selection 'hig'; did you mean high?"),
        ({"readers": ["vlm"], "form": "deepseek_v3"}, "vlm"),
        ({"readers": ["vllm"]}, "the plain form is read by kvfold alone"),
        ({"pad_to_engine": True}, "the plain form is read by kvfold alone"),
        ({"q_rank": 8}, "the plain form is read by kvfold alone"),
        ({"kv_rank": 100}, "rank 100 is more than there is beside 4 rotary numbers; give 60 or less"),
        ({"rope_dim": 5}, "a rotary key of 5 numbers is not possible; give an even number, 2 to 16"),
        ({"rope_dim": None}, "say how large the cache may be"),
        ({"search_windows": 0}, "0 windows tell no choices apart"),
        ({"dtype": "int8"}, "dtype int8 cannot be written"),
        ({"max_shard_size": 0}, "a shard of 0 bytes"),
        ({"refine": -1}, "-1 windows refine nothing"),
        ({"refine": 2, "calib": ["none"]}, "--calib none leaves --refine no text"),
        ({"stats": "nowhere.safetensors", "calib": ["x.txt"]}, "--stats were collected on a text already"),
    ],
    ids=str,
)
def test_wrong_requests(options, message, no_work, saved, tmp_path):
    refuse(saved("llama"), tmp_path, message, **options)


def test_a_damaged_source(no_work, tmp_path):
    make_source("llama", 2).save_pretrained(tmp_path / "src")
    edit_config(tmp_path / "src", num_key_value_heads=1)
    refuse(tmp_path / "src", tmp_path, r"k_proj.weight has shape \[32, 64\]; the config says \[16, 64\]")


@pytest.mark.parametrize("reader", ["vllm", "llama.cpp"])
def test_biases_that_an_engine_does_not_read(reader, tmp_path):
    make_source("qwen2", 2).save_pretrained(tmp_path / "src")
    options = {"form": "deepseek_v3", "readers": [reader], "pad_to_engine": reader == "vllm"}
    refuse(tmp_path / "src", tmp_path, f"{reader} would not read it right: .*bias", **options)


def test_out_exists(saved, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("x")
    refuse(saved("llama"), tmp_path, "exists")


def test_report_is_plain_data(convert, saved, tmp_path):
    report = convert(saved("qwen2"), tmp_path / "out", **SIZES)
    assert json.loads(json.dumps(asdict(report))) == asdict(report)
    assert (report.form, report.family, report.qk_nope_head_dim, report.v_head_dim) == ("plain", "qwen2", 16, 16)
    assert report.bytes == sum(tensor.nbytes for tensor in stored(tmp_path / "out").values())


# What a tester once found: wrong models that nobody was told of.


def test_a_partial_rotary_factor_that_the_class_ignores(convert, tmp_path):
    model = make_source("llama", 1)
    model.config.rope_parameters["partial_rotary_factor"] = 0.5
    src = save_source(model, tmp_path / "src")
    convert(src, tmp_path / "out", kv_rank=16, rope_dim=16, rope_select="high", form="deepseek_v3", dtype="float64")
    assert difference(logits(load(tmp_path / "out")), logits(load(src))) < 1e-6  # but for the neutral norm


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("form", ["plain", "deepseek_v3"])
def test_rope_that_scales_what_it_turns(form, no_work, tmp_path):
    src = save_source(make_source("llama", 1, rope_parameters=YARN), tmp_path / "src")
    refuse(src, tmp_path, "its RoPE scales what it turns by 1.277", kv_rank=8, rope_dim=8, form=form)


def test_large_gains_without_statistics(convert, tmp_path):
    """The latent is larger than its weights say, and the norm must not see it."""
    model = make_source("llama", 1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight *= 1000
            layer.self_attn.q_proj.weight /= 1e6
            layer.self_attn.o_proj.weight /= 1000
    src = save_source(model, tmp_path / "src")
    sizes = full_sizes("llama", model.config)
    convert(src, tmp_path / "out", **sizes, rope_select="high", form="deepseek_v3", dtype="float64", **NONE)
    assert difference(logits(load(tmp_path / "out")), logits(load(src))) < 1e-6


BUDGET = {"kv_elements": 24, "kv_rank": None, "rope_dim": None, "rope_select": "auto"}


def test_no_text_to_choose_sizes_on(no_work, saved, tmp_path):
    refuse(saved("llama"), tmp_path, "leaves no text to choose sizes on; give --kv-rank", **BUDGET, **NONE)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_interleave": False},
        {"hidden_act": "gelu"},
        {"rope_scaling": YARN},
        {"is_causal": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {"first_k_dense_replace": 2.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_export_that_was_edited(change, fresh, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(fresh / "llama/stock", folder)
    edit_config(folder, **change)
    report = check(folder, engine="transformers")
    assert not report.passed
    assert any(one.topic == "edited" for one in report.violations)
    with pytest.raises(UserError, match=r"config.json says .* where the export said something else"):
        convert_plain(folder, tmp_path / "plain")
