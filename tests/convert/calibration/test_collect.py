"""Statistics against plain torch, in fp64, on a tiny model of every family row."""

import logging
import tempfile
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import warning_once

from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.common.scoring import head_logits
from kvfold.convert.calibration import collect as collecting
from kvfold.convert.calibration.calibrate import Runner
from kvfold.convert.calibration.collect import collect
from kvfold.convert.calibration.hidden import HiddenStates
from kvfold.convert.calibration.knobs import Calibration
from kvfold.convert.calibration.statistics import LayerStatistics, Moment, MomentOfInputs
from kvfold.convert.calibration.text import CalibText
from kvfold.convert.projections import projections
from kvfold.convert.source import open_source

from ..tiny import CASES, EAGER_EXPERTS, make_config, make_gpt2, make_model

KV_HEADS = 2
EXACT = {"rtol": 1e-12, "atol": 1e-12}
DRAWN = torch.randint(3, 97, (6, 21), generator=torch.Generator().manual_seed(0))
MOMENTS = tuple(field.name for field in fields(LayerStatistics))
EQUAL = [row[None] for row in DRAWN]  # six windows, each [1, 21]
UNEQUAL = [row[None, : 21 - 4 * (i % 3)] for i, row in enumerate(DRAWN)]


def config_of(case, layers=2):
    if case == "gpt2":
        return make_gpt2(n_layer=layers)
    said = make_config(case, KV_HEADS).to_dict() | {"num_hidden_layers": layers}
    said = {key: value for key, value in said.items() if key != "layer_types"}  # one for each layer
    return AutoConfig.for_model(said.pop("model_type"), **said)


@pytest.fixture
def saved(tmp_path):
    """Save a random model of a case, and return where."""

    def save(case, layers=2, **options):
        make_model(config_of(case, layers)).save_pretrained(tmp_path / "src", **options)
        return tmp_path / "src"

    return save


def layered(source, dtype="float64"):
    """The model, its projections, and whether gradients at still keys are taken of it."""
    runner = Runner(source, Calibration(CalibText(), dtype=dtype))
    return runner.model(), projections(source.family, runner.sizes), runner.still


def statistics(path, batches, dtype="float64", **options) -> list[LayerStatistics]:
    found = {}

    def emit(number, layer):
        assert number not in found
        found[number] = layer

    with open_source(str(path)) as source:
        model, places, still = layered(source, dtype)
        collect(model, batches, places, emit=emit, **{"still": still, **options})
    return [found[number] for number in range(len(found))]


def assert_same(one, other, **tolerance):
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        for name in MOMENTS:
            pair = getattr(a, name), getattr(b, name)
            assert (pair[0] is None) == (pair[1] is None)
            if pair[0] is not None:
                torch.testing.assert_close(*pair, **(tolerance or EXACT))


# The model, layer by layer.


def layered_logits(path, ids):
    with open_source(str(path)) as source, torch.no_grad():
        model, *_ = layered(source)
        state = model.embed(ids)
        for number in range(len(model.layers)):
            with model.loaded([number]):
                state = model.call(number, state)
        return head_logits(model.model, model.finish(state))


def stock(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", **EAGER_EXPERTS).eval().requires_grad_(False)


def assert_layered_is_stock(path):
    torch.testing.assert_close(layered_logits(path, DRAWN), stock(path)(DRAWN).logits, **EXACT)


@pytest.mark.parametrize("case", [*CASES, "gpt2"])
def test_layer_by_layer_is_the_same_function(case, saved):
    assert_layered_is_stock(saved(case))


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "qwen3_moe-dense"])
def test_experts_saved_fused(case, saved):
    path = saved(case, save_original_format=False)
    assert any("gate_up_proj" in name for name in load_file(path / "model.safetensors"))
    assert_layered_is_stock(path)


def test_checkpoint_of_the_base_model(tmp_path):
    make_model(make_config("llama-tied")).model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    assert_layered_is_stock(tmp_path)


def test_tied_head_that_is_stored_with_other_weights(saved):
    """transformers unties it then."""
    path = saved("llama-tied")
    state = load_file(path / "model.safetensors")
    state["lm_head.weight"] = torch.randn_like(state["model.embed_tokens.weight"])
    save_file(state, path / "model.safetensors", {"format": "pt"})
    assert_layered_is_stock(path)


def test_nothing_is_said_of_padding(saved):
    path, said, logger = saved("gpt2"), [], logging.getLogger("transformers")
    handler = logging.Handler()
    handler.emit = said.append
    warning_once.cache_clear()
    logger.addHandler(handler)
    try:
        layered_logits(path, torch.zeros(1, 5, dtype=torch.long))  # 0 is the padding
    finally:
        logger.removeHandler(handler)
    assert not said


# Statistics.


def by_hand(model, windows, fisher=True) -> list[LayerStatistics]:
    """What a plain model's own hooks and autograd say: one window at a time, a zero added to each output."""
    config = model.config
    size = getattr(config, "num_key_value_heads", config.num_attention_heads) * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    modules = {kind: [] for kind in ("k_proj", "v_proj", "qkv_proj", "c_attn")}
    for name, module in model.named_modules():
        if (kind := name.rpartition(".")[2]) in modules:
            modules[kind].append(module)
    fused = modules["qkv_proj"] or modules["c_attn"]
    keys, values = (fused, fused) if fused else (modules["k_proj"], modules["v_proj"])
    seen: dict = {}

    def probe(module, args, output):
        zero = torch.zeros_like(output).requires_grad_()
        seen[module] = args[0].detach(), zero, output.detach().clone()
        return output + zero

    handles = [module.register_forward_hook(probe) for module in {*keys, *values}]
    rows = [([], [], [], [], []) for _ in keys]
    for ids in windows:
        logits = model(ids).logits
        F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").backward()
        for layer, key, value in zip(rows, keys, values, strict=True):
            x = seen[key][0][0]
            layer[0].append(torch.cat([x, torch.ones_like(x[:, :1])], dim=1))
            part = slice(-2 * size, -size) if fused else slice(None)
            layer[1].append(seen[key][1].grad[0][:, part])
            layer[2].append(seen[value][1].grad[0][:, -size:])
            layer[3].append(seen[key][2][0][:, part])
            layer[4].append(seen[value][2][0][:, -size:])
    for handle in handles:
        handle.remove()
    return [moments(*map(torch.cat, layer), fisher) for layer in rows]


def moments(x, key_gradient, value_gradient, key, value, fisher) -> LayerStatistics:
    """Of all tokens of a text at once: inputs [N, D + 1], gradients and outputs [N, K]."""
    if not fisher:
        return LayerStatistics(x.T @ x / len(x), None, None)
    by_key, by_value = (weighted(x, gradient) for gradient in (key_gradient, value_gradient))
    return LayerStatistics((by_key + by_value) / 2, weighted(key_gradient, key), weighted(value_gradient, value))


def weighted(rows, by):
    """E[w r r^T] / E[w], w the square norm of another row of the same token."""
    weights = by.norm(dim=1) ** 2 / by.norm() ** 2  # [N], of sum 1
    return torch.einsum("n,ni,nj->ij", weights, rows, rows)


@pytest.mark.parametrize("case", [*CASES, "gpt2"])
def test_moments_are_those_of_plain_torch(case, saved):
    path = saved(case)
    expected = by_hand(stock(path), UNEQUAL)
    assert all(layer.key_fisher.any() and layer.value_fisher.any() for layer in expected)
    found = statistics(path, UNEQUAL, still=False)
    assert_same(found, expected, rtol=1e-10, atol=1e-10 * float(expected[0].value_fisher.max()))
    assert_same(statistics(path, UNEQUAL, fisher=False), by_hand(stock(path), UNEQUAL, fisher=False))


@pytest.mark.parametrize("case", ["llama-bias", "gpt2"])
def test_batches_and_order_do_not_matter(case, saved):
    path = saved(case)
    expected = statistics(path, EQUAL)
    scale = max(float(layer.value_fisher.max()) for layer in expected)
    for batches in ([DRAWN], list(DRAWN.split(2)), list(DRAWN.split(4)), EQUAL[::-1]):
        assert_same(statistics(path, batches), expected, rtol=1e-10, atol=1e-10 * scale)
    pairs = [torch.cat([UNEQUAL[i], UNEQUAL[i + 3]]) for i in (2, 0, 1)]  # of one length each
    assert_same(statistics(path, pairs), statistics(path, UNEQUAL), rtol=1e-10, atol=1e-10 * scale)


def test_twice_the_text_is_the_same_mean(saved):
    path = saved("llama")
    assert_same(statistics(path, EQUAL * 2), statistics(path, EQUAL), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("segment", [None, 1])
def test_a_process_without_windows_adds_nothing(segment, saved):
    """Each process sums its own windows; here one after the other, the second with what the first had."""
    path, sums = saved("llama"), []

    def keep(total):
        sums.append(total)
        return total

    whole = statistics(path, UNEQUAL, segment=segment, reduce=keep)
    others = iter(sums)
    assert_same(statistics(path, [], segment=segment, reduce=lambda total: total + next(others)), whole)
    assert next(others, None) is None


# Models that do not fit.


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """Put all hidden states into files; returns where, and the sizes of those that were made."""
    folder, sizes, from_file = tmp_path / "tmp", [], torch.from_file
    folder.mkdir()

    def mapped(path, *, size, **options):
        assert path.startswith(f"{folder}/")
        sizes.append(size)
        return from_file(path, size=size, **options)

    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(collecting, "LIMIT", 0)
    monkeypatch.setattr(torch, "from_file", mapped)
    return folder, sizes


@pytest.mark.parametrize("fisher", [True, False])
@pytest.mark.parametrize("segment", [1, 2])
@pytest.mark.parametrize("case", ["llama-bias", "phi3", "mixtral", "gemma2", "olmo", "phi", "cohere", "gpt2"])
def test_segments_are_the_whole(case, segment, fisher, saved):
    path = saved(case, layers=3)
    whole = statistics(path, UNEQUAL, fisher=fisher)
    assert_same(statistics(path, UNEQUAL, fisher=fisher, segment=segment), whole)


@pytest.mark.parametrize("fisher", [True, False])
@pytest.mark.parametrize("segment", [None, 1, 2])
def test_a_segment_of_layers_is_in_memory_at_a_time(segment, fisher, saved):
    held, seen = [], []
    with open_source(str(saved("llama", layers=3))) as source:
        model, places, _ = layered(source)

        def progress(done, total):
            seen.append((done, total))
            held.append(sum(not parameter.is_meta for layer in model.layers for parameter in layer.parameters()))

        collect(model, UNEQUAL, places, emit=lambda *_: None, fisher=fisher, segment=segment, progress=progress)
        layer = len(list(model.layers[0].parameters()))
    assert max(held) == (segment or 3) * layer
    assert all(parameter.is_meta for layer in model.layers for parameter in layer.parameters())
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert seen[-1][1] == len(UNEQUAL) * (3 if segment is None or not fisher else 2 + 1 + 2)  # all but the last twice


def test_hidden_states_in_files(saved, on_disk):
    path = saved("llama", layers=3)
    folder, sizes = on_disk
    on_disk_too = statistics(path, UNEQUAL, segment=1)
    assert sizes == [sum(ids.numel() for ids in UNEQUAL) * 64] * 2  # before layers 1 and 2
    assert not list(folder.iterdir())
    assert_same(on_disk_too, statistics(path, UNEQUAL))


def test_a_file_of_hidden_states_has_no_name_left(on_disk):
    folder, sizes = on_disk
    states = HiddenStates([(2, 5), (1, 3)], 4, torch.bfloat16, limit=0)
    assert sizes == [(2 * 5 + 1 * 3) * 4]
    states[1] = torch.ones(1, 3, 4, dtype=torch.bfloat16)
    states[0] = torch.full((2, 5, 4), 2.0, dtype=torch.bfloat16)
    assert not list(folder.iterdir())  # so that a killed process leaves none
    assert torch.equal(states[1], torch.ones(1, 3, 4, dtype=torch.bfloat16))
    assert (states[0] == 2).all()


def test_no_room_for_hidden_states(on_disk):
    with pytest.raises(EnvironmentFailure, match="bytes free"):
        HiddenStates([(1 << 20, 1 << 20)], 1 << 10, torch.float32)
    assert not list(on_disk[0].iterdir())


# Numbers.


@pytest.mark.parametrize("fisher", [True, False])
@pytest.mark.parametrize("segment", [None, 1])
def test_the_layer_that_overflows_is_named(segment, fisher, tmp_path):
    model = make_model(config_of("llama", layers=3)).half()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(6e4)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"layer 1 gives NaN or Inf; calibrate in a wider dtype"):
        statistics(tmp_path, EQUAL, "float16", segment=segment, fisher=fisher)
    assert torch.stack([s.inputs.isfinite().all() for s in statistics(tmp_path, EQUAL, "float32")]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_wider_than_the_data(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(50, 7, 5, generator=generator) + 3).mul(100).to(dtype)
    weights = torch.rand(50, 7, generator=generator)
    plain, ones, weighted = Moment(5, "cpu"), MomentOfInputs(5, "cpu"), MomentOfInputs(5, "cpu")
    for batch, weight in zip(rows.split(3), weights.split(3), strict=True):
        plain.add(batch)
        ones.add(batch)
        weighted.add(batch, weight)
    whole = torch.cat([rows.double(), torch.ones(50, 7, 1)], dim=-1).flatten(0, 1)  # [350, 6]
    tolerance = {"rtol": 1e-12 if dtype == torch.float64 else 1e-6, "atol": 0}
    torch.testing.assert_close(ones.mean(), whole.T @ whole / 350, **tolerance)
    torch.testing.assert_close(plain.mean(), (whole.T @ whole)[:5, :5] / 350, **tolerance)
    expected = (whole * weights.flatten()[:, None]).T @ whole / weights.double().sum()
    torch.testing.assert_close(weighted.mean(), expected, rtol=1e-6, atol=0)


def test_where_the_loss_minds_nothing_all_directions_count_alike(saved):
    """Windows of one token predict nothing."""
    (first, last) = statistics(saved("llama"), [DRAWN[:, :1]])
    for layer in (first, last):
        assert torch.equal(layer.inputs, torch.eye(65, dtype=torch.float64))
        assert not layer.key_fisher.any()
