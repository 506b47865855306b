"""A source's layers as factors, and the plain form's tensors from them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvfold.convert.calibration.reader import tensor_reader
from kvfold.convert.calibration.statistics import LayerStatistics
from kvfold.convert.checks import account
from kvfold.convert.merge.mixing import ridge
from kvfold.convert.mla import layers as module
from kvfold.convert.mla.layers import LayerFactors, _moments
from kvfold.convert.mla.plain_form import has_attention_bias
from kvfold.convert.mla.rotation import channels
from kvfold.convert.source import open_source

from .sources import BIASED, SOURCES, make_source, save_source

RANK, KEPT = 12, 2
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def moment(size, seed):
    rows = torch.randn(3 * size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows.T @ rows / len(rows)


class Collected:
    """Statistics of random text."""

    def __init__(self, size, hidden):
        self.size, self.hidden = size, hidden

    def layer(self, number, device="cpu"):
        both = moment(2 * self.size, 5 * number)
        cross, still = both[: self.size, self.size :], both[self.size :, self.size :]
        key, value = both[: self.size, : self.size], moment(self.size, 5 * number + 1)
        return LayerStatistics(moment(self.hidden + 1, 5 * number + 2), key, value, still, cross)


@pytest.fixture
def factors_of(tmp_path):
    def make(case, statistics=True, kv_heads=2):
        model = make_source(case, kv_heads)
        d = getattr(model.config, "head_dim", None) or 16
        with open_source(str(save_source(model, tmp_path / "src"))) as source:
            made = LayerFactors(
                source,
                tensor_reader(source.checkpoint, account(source.family, source.config, source.checkpoint.tensors)),
                channels=channels("fold", KEPT, 2 if case == "stablelm" else 4),
                rank=RANK,
                biased=has_attention_bias(source.checkpoint.tensors),
                statistics=Collected(kv_heads * d, 64) if statistics else None,
            )
        return model, made

    return make


@pytest.mark.parametrize("case", SOURCES)
def test_shapes_and_biases(case, factors_of):
    model, factors = factors_of(case)
    d = getattr(model.config, "head_dim", None) or 16
    assert factors.biased is (case in BIASED)
    rows = {"q_proj": 4 * (d + 2 * KEPT), "kv_a_proj_with_mqa": RANK + 2 * KEPT, "kv_b_proj": 4 * 2 * d, "o_proj": 64}
    columns = {"kv_b_proj": RANK, "o_proj": 4 * d}
    for name, size in rows.items():
        for layer in range(2):
            weight = factors.tensor(layer, f"{name}.weight")
            assert weight.shape == (size, columns.get(name, 64))
            assert weight.dtype == torch.float64
            if name != "kv_b_proj":
                bias = factors.tensor(layer, f"{name}.bias")
                assert bias.shape == (size,)
                assert factors.biased or not bias.any()


@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3-part"])
def test_query_heads_read_their_kv_head(case, factors_of):
    """Queries 0 and 1 the first, 2 and 3 the second: rows that are read back, and rotary queries."""
    model, factors = factors_of(case)
    made, d = factors.factors(1), 16
    up = factors.tensor(1, "kv_b_proj.weight").unflatten(0, (4, 2 * d))
    queries = factors.tensor(1, "q_proj.weight").unflatten(0, (4, d + 2 * KEPT))
    attention = model.model.layers[1].self_attn
    stored = (attention.qkv_proj if case == "phi3-part" else attention.q_proj).weight[:64].unflatten(0, (4, d))
    for head, group in enumerate((0, 0, 1, 1)):
        torch.testing.assert_close(up[head], torch.cat([made.key_out[group], made.value_out[group]]), **EXACT)
        torch.testing.assert_close(queries[head, :d], stored[head].detach(), **EXACT)
        torch.testing.assert_close(queries[head, d:], made.rotary_out[group].T @ stored[head].detach(), **EXACT)


def test_the_output_takes_the_means_of_values(factors_of):
    model, factors = factors_of("llama-bias")
    made, attention = factors.factors(0), model.model.layers[0].self_attn
    shift = made.value_shift[[0, 0, 1, 1]].flatten()
    assert shift.abs().max() > 0
    expected = attention.o_proj.bias + attention.o_proj.weight @ shift
    torch.testing.assert_close(factors.tensor(0, "o_proj.bias"), expected.detach(), **EXACT)
    torch.testing.assert_close(factors.tensor(0, "o_proj.weight"), attention.o_proj.weight.detach(), **EXACT)


def test_a_layer_without_positions_has_no_rotary_key(factors_of):
    _, factors = factors_of("smollm3")
    rotary = [factors.tensor(layer, "kv_a_proj_with_mqa.weight")[RANK:] for layer in range(2)]
    assert rotary[0].any()
    assert not rotary[1].any()
    queries = factors.tensor(1, "q_proj.weight").unflatten(0, (4, -1))
    assert not queries[:, 16:].any()


@pytest.mark.parametrize("statistics", [True, False])
def test_latent_sizes_are_the_mean_square(statistics, factors_of):
    _, factors = factors_of("qwen2", statistics)
    for layer, size in enumerate(factors.latent_sizes()):
        rows = factors.factors(layer).latent_in
        inputs = factors.statistics.layer(layer).inputs if statistics else torch.eye(65).double()
        squares = [float(row @ inputs @ row) for row in rows]
        assert size == pytest.approx(sum(squares) / RANK)


def test_a_layer_is_factored_once_for_all_its_tensors(factors_of, monkeypatch):
    _, factors = factors_of("llama")
    calls, real = [], module.factorise
    monkeypatch.setattr(module, "factorise", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    names = [f"{name}.weight" for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj")]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: factors.tensor(0, name), names * 3))
    assert len(calls) == 1
    assert all(torch.equal(found[i], found[i + 3]) for i in range(6))


# What is known of a layer.


def test_calibrated_moments_get_one_ridge():
    keys, values = (torch.randn(2, 4, 7, dtype=torch.float64) for _ in range(2))
    seen = Collected(8, 6).layer(0)
    moments = _moments(keys, values, seen)
    on_top = ridge(seen.key_fisher)
    assert on_top.diagonal().min() > 0
    for found, given, more in (
        (moments.inputs, seen.inputs, ridge(seen.inputs)),
        (moments.key, seen.key_fisher, on_top),
        (moments.still, seen.still_fisher, on_top),  # the same, or a key that stands still would not be itself
        (moments.cross, seen.still_cross, on_top),
        (moments.value, seen.value_fisher, ridge(seen.value_fisher)),
    ):
        assert torch.equal(found, given + more)


@pytest.mark.parametrize("seen", [None, LayerStatistics(moment(7, 1))], ids=["none", "inputs"])
def test_without_gradients_keys_count_as_much_as_values(seen):
    keys, values = torch.randn(2, 4, 7, dtype=torch.float64), 30 * torch.randn(2, 4, 7, dtype=torch.float64)
    moments = _moments(keys, values, seen)
    sizes = [
        float((weight * (rows.flatten(0, 1) @ moments.inputs @ rows.flatten(0, 1).T)).sum())
        for weight, rows in ((moments.key, keys), (moments.value, values))
    ]
    assert sizes == pytest.approx([1, 1])
    assert torch.equal(moments.still, moments.key)
    assert moments.cross is None
    zero = _moments(torch.zeros_like(keys), values, seen)
    assert zero.key.isfinite().all()
