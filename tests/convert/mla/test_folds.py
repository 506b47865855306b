"""Every step of the export by itself, and its inverse."""

import math

import pytest
import torch
from torch.testing import assert_close

from kvfold.attention.rope import Rope, geometric, rotate
from kvfold.common.errors import UserError
from kvfold.convert.latent_form import (
    ENGINE_SHAPES,
    LARGE_EPS,
    SMALL_EPS,
    Form,
    HeadSizes,
    after_norm,
    engine_shape,
    logit_factor,
    neutral_gain,
    neutral_scale,
    residual_factor,
)
from kvfold.convert.mla import folds, inverse
from kvfold.convert.mla.q_lora import identity, low_rank
from kvfold.convert.mla.stock_rope import padded_theta, series_theta

PLAIN, STOCK = HeadSizes(rank=6, nope=5, rope=4, value=3), HeadSizes(rank=8, nope=6, rope=8, value=5)
FORM = Form(
    heads=3,
    plain=PLAIN,
    stock=STOCK,
    softmax_scale=0.3,
    source_eps=1e-5,
    eps=1e-6,
    latent_scales=(2.0**-21,),
    query_rank=7,
    query_scales=(2.0**-22,),
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def norm(x, gain, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def test_interleaved_rows_turn_as_halves_do():
    rows, x = normal(8, 5), normal(1, 1, 201, 5)
    positions, series = torch.arange(201), geometric(8)
    halves = rotate(x @ rows.T, positions, series)
    pairs = rotate(x @ folds.interleave(rows).T, positions, Rope(series.frequencies, interleaved=True))
    assert_close(folds.interleave(halves.mT).mT, pairs, rtol=1e-12, atol=1e-12)
    assert_close(inverse.deinterleave(folds.interleave(rows)), rows, rtol=0, atol=0)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_theta_of_a_series_gives_every_nth_frequency_of_the_source(step):
    source = geometric(32, 5e4).frequencies
    assert geometric(8, series_theta(5e4, step, 32, 8)).frequencies == pytest.approx(source[::step][:4], rel=1e-12)


def test_padded_theta_keeps_the_first_frequencies():
    few, many = geometric(8, 300.0).frequencies, geometric(64, padded_theta(300.0, 8, 64)).frequencies
    assert many[:4] == pytest.approx(few, rel=1e-12)


def test_padding_puts_zeros_behind():
    x = normal(3, 2)
    padded = folds.pad(x, 5, 0)
    assert padded.shape == (5, 2) and padded[3:].eq(0).all()
    assert_close(padded[:3], x, rtol=0, atol=0)


@pytest.mark.parametrize("padded", [False, True])
def test_logits_of_folded_queries_and_keys_are_the_same(padded):
    form = FORM if padded else Form(**{**FORM.__dict__, "stock": PLAIN})
    q, k = normal(3 * 9, 10), normal(6 + 4, 10)
    up, x = normal(3 * (5 + 3), 6), normal(10)
    query = (q @ x).view(3, 9)
    latent, rope = (k @ x).split([6, 4])
    nope = (up @ latent).view(3, 8)[:, :5]
    expected = 0.3 * (query * torch.cat([nope, rope.expand(3, -1)], 1)).sum(1)

    stock = form.stock
    query = (folds.queries(q, form) @ x).view(3, -1)
    latent, rope = (folds.latent_rows(k, form, 0) @ x).split([stock.rank, stock.rope])
    latent = latent / math.sqrt(form.eps) * folds.latent_gain(form, 0)  # the norm at its most neutral
    nope = (folds.expansion(up, form, 0) @ latent).view(3, -1)[:, : stock.nope]
    logits = (query * torch.cat([nope, rope.expand(3, -1)], 1)).sum(1) / math.sqrt(stock.nope + stock.rope)
    assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_values_of_a_folded_latent_come_out_scaled():
    k, up, out, x = normal(10, 10), normal(3 * 8, 6), normal(10, 9), normal(10)
    value = (up @ (k @ x)[:6]).view(3, 8)[:, 5:]
    latent = (folds.latent_rows(k, FORM, 0) @ x)[:8] / math.sqrt(FORM.eps) * folds.latent_gain(FORM, 0)
    padded = (folds.expansion(up, FORM, 0) @ latent).view(3, 11)[:, 6:]
    assert_close(folds.output(out, FORM) @ padded.flatten(), math.sqrt(0.1) * out @ value.flatten(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1e-9, 1e-3, 1.0, 37.0, 1e6])
@pytest.mark.parametrize("row", [SMALL_EPS, LARGE_EPS], ids=["small", "large"])
def test_neutral_norm_stays_within_its_formula(size, row):
    scale = neutral_scale(size, row)
    x = normal(50, 64) * math.sqrt(size)
    error = scale**2 * x.square().mean(-1, keepdim=True) / (2 * row.eps)
    after = norm(scale * x, neutral_gain(scale, row.eps), row.eps) * after_norm(scale, row.eps)
    assert ((after - x).abs() <= error * x.abs() * (1 + 1e-6) + 1e-15 * math.sqrt(size)).all()
    assert scale**2 * size / (2 * row.eps) < row.error
    assert scale == row.largest or (2 * scale) ** 2 * size / (2 * row.eps) >= row.error  # not smaller than needed
    assert math.log2(scale).is_integer() and math.log2(neutral_gain(scale, row.eps)).is_integer()
    assert 0.7 < after_norm(scale, row.eps) < 1.42


def test_an_ordinary_latent_is_scaled_as_the_design_says():
    assert 2.0**-24 <= neutral_scale(1.0, SMALL_EPS) <= 2.0**-20
    assert neutral_scale(0.0, SMALL_EPS) == 2.0**-20


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf")])
def test_sizes_that_cannot_be_are_refused(size):
    with pytest.raises(UserError, match="mean square"):
        neutral_scale(size, SMALL_EPS)


def test_scaled_residual_stream_is_normed_as_before():
    x, gain, factor = 1e-3 * normal(7, 16), normal(16), residual_factor(1e-5, 1e-6)
    assert_close(norm(factor * x, gain, 1e-6), norm(x, gain, 1e-5), rtol=1e-12, atol=0)


def test_softmax_scale_is_folded():
    assert logit_factor(0.25, STOCK) / math.sqrt(STOCK.nope + STOCK.rope) == pytest.approx(0.25, rel=1e-15)


def test_multiplying_in_pieces_rounds_once(monkeypatch):
    monkeypatch.setattr(folds, "_PIECE", 5)
    x = torch.randn(4, 3).bfloat16()
    assert_close(folds.multiply(x, 0.3, torch.float32), (x.double() * 0.3).float(), rtol=0, atol=0)
    assert_close(folds.multiply(x, 0.3, torch.bfloat16), (x.double() * 0.3).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("biased", [False, True])
def test_query_identity_is_exact(biased):
    weight, bias, x = normal(9, 5), normal(9) if biased else None, normal(5)
    factors = identity(weight, bias)
    latent = factors.down @ x + (factors.constant if biased else 0)
    assert_close(factors.up @ latent, weight @ x + (bias if biased else 0), rtol=1e-13, atol=0)


@pytest.mark.parametrize("biased", [False, True])
def test_low_rank_queries_lose_least_where_the_inputs_are(biased):
    weight, bias = normal(9, 5), 50 * normal(9) if biased else None
    inputs = torch.cat([normal(400, 5) * torch.tensor([9.0, 5, 1, 0.1, 0.01]), torch.ones(400, 1)], 1).double()
    moment = inputs.T @ inputs / 400
    exact = inputs[:, :5] @ weight.T + (bias if biased else 0)

    def loss(moment):
        factors = low_rank(weight, bias, 3, moment)
        latent = inputs[:, :5] @ factors.down.T + (factors.constant if biased else 0)
        assert latent.norm() <= inputs.norm()
        return float((latent @ factors.up.T - exact).square().sum())

    best = torch.linalg.svdvals(exact)[3:].square().sum()
    assert loss(moment) == pytest.approx(float(best), rel=1e-6)
    assert loss(moment) < 0.5 * loss(None)


def test_low_rank_is_exact_at_full_rank():
    weight = normal(9, 5)
    factors = low_rank(weight, None, 5)
    assert_close(factors.up @ factors.down, weight, rtol=0, atol=1e-12)


def test_low_rank_wants_the_constant_in_the_moment_of_a_biased_query():
    with pytest.raises(UserError, match="add the constant 1"):
        low_rank(normal(9, 5), normal(9), 3, torch.eye(5))


def test_inverse_steps_undo_the_folds():
    q, k, up, out = normal(27, 10), normal(10, 10), normal(24, 6), normal(10, 9)
    gain = folds.latent_gain(FORM, 0)
    assert_close(inverse.queries(folds.queries(q, FORM), FORM), q, rtol=1e-14, atol=0)
    assert_close(inverse.latent_rows(folds.latent_rows(k, FORM, 0), FORM, 0), k, rtol=0, atol=0)
    assert_close(inverse.expansion(folds.expansion(up, FORM, 0), gain, FORM, 0), up, rtol=1e-14, atol=0)
    assert_close(inverse.output(folds.output(out, FORM), FORM), out, rtol=1e-14, atol=0)
    down, b = normal(7, 10), normal(27, 7)
    rows = folds.query_rows(down, FORM, 0), folds.query_expansion(b, FORM, 0), folds.query_gain(FORM, 0)
    assert_close(inverse.merged_queries(*rows, FORM, 0), b @ down, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "shape"), [((192, 64, 64, 64), 0), ((512, 65, 64, 64), 1), ((512, 64, 2, 129), 2), ((1, 1, 0, 1), 0)]
)
def test_padding_takes_the_smallest_engine_shape(sizes, shape):
    assert engine_shape(HeadSizes(*sizes)) == ENGINE_SHAPES[shape]


def test_sizes_beyond_every_engine_shape_are_refused():
    with pytest.raises(UserError, match=r"rank 600 > 512, rope 128 > 64"):
        engine_shape(HeadSizes(600, 64, 128, 64))
