"""The factors of one layer, against an attention written out here; fp64, random layers."""

from dataclasses import dataclass, replace

import pytest
import torch

from kvfold.common.errors import UserError
from kvfold.convert.merge.mixing import ridge
from kvfold.convert.mla.factorise import Moments, factorise
from kvfold.convert.mla.rotation import channels, full_rank
from kvfold.convert.rotary import Rotary

HEADS, D, TOKENS = 4, 48, 60  # 4 query heads for any number of KV heads
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def rotary(turning, free):
    half = turning // 2
    return Rotary(tuple(range(half)), tuple(range(half, turning)), tuple(range(turning, turning + free)))


WHOLE, PART, STILL = rotary(8, 0), rotary(4, 5), rotary(0, 6)


def normal(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Layer:
    """Rows of the projections: queries [H, d, D + 1], keys and values [G, d, D + 1]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def layer_of(groups, rotary, bias=1.0, seed=0):
    d = rotary.head_dim
    made = [normal(heads, d, D + 1, seed=seed + i) for i, heads in enumerate((HEADS, groups, groups))]
    for rows in made:
        rows[..., -1] *= bias
    return Layer(*made)


def inputs(seed=9):
    """Tokens [x; 1] with a mean, [TOKENS, D + 1]."""
    x = normal(TOKENS, D, seed=seed) @ normal(D, D, seed=seed + 1) / D**0.5 + normal(D, seed=seed + 2)
    return torch.cat([x, torch.ones(TOKENS, 1)], dim=1)


def moments_of(x, size, rotary, seed=20, tokens=500):
    """Moments of random gradients; those at free coordinates are the same whether keys turn or not."""
    rows = normal(tokens, 3 * size, seed=seed) @ normal(3 * size, 3 * size, seed=seed + 1)
    gradient, still, value = rows.chunk(3, dim=1)
    free = torch.tensor(rotary.free, dtype=torch.long)
    places = (torch.arange(0, size, rotary.head_dim)[:, None] + free).flatten()
    gradient[:, places] = still[:, places]
    key, stood, value, cross = ((a.T @ b) / tokens for a, b in (
        (gradient, gradient), (still, still), (value, value), (gradient, still)
    ))  # fmt: skip
    on_top = ridge(key)
    seen = x.T @ x / len(x)
    return Moments(seen + ridge(seen), key + on_top, stood + on_top, cross + on_top, value + ridge(value))


def turned(x, pairs, frequencies):
    """Heads [n, T, d] whose first coordinates, `pairs` in halves, are turned to positions 0, 1, ...."""
    re, im, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    turns = torch.polar(torch.ones(()).double(), torch.arange(x.shape[1])[:, None] * frequencies)
    z = torch.complex(re, im) * turns
    return torch.cat([z.real, z.imag, rest], dim=-1)


def frequencies_of(rotary):
    return 100.0 ** -(torch.arange(len(rotary.re)).double() / max(len(rotary.re), 1))


def softmax(scores):
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def attended(layer, x, rotary):
    """What each head of the source attends to, [H, T, d]."""
    each = HEADS // len(layer.keys)
    q, k, v = (rows @ x.T for rows in (layer.queries, layer.keys, layer.values))  # [n, d, T]
    q, k = (turned(rows.mT, len(rotary.re), frequencies_of(rotary)) for rows in (q, k))
    scores = q @ k.repeat_interleave(each, 0).mT / rotary.head_dim**0.5
    return softmax(scores) @ v.mT.repeat_interleave(each, 0)


def latent_attended(layer, factors, kept, x, rotary):
    """What each head attends to by the factors, [H, T, d]."""
    each = HEADS // len(layer.keys)
    rotary_out, key_out, value_out, shift = (
        maps.repeat_interleave(each, 0)
        for maps in (factors.rotary_out, factors.key_out, factors.value_out, factors.value_shift)
    )
    q = (layer.queries @ x.T).mT  # [H, T, d]
    latent, key = x @ factors.latent_in.T, x @ factors.rotary_in.T  # [T, r], [T, 2F]
    q_turned, key = q @ rotary_out, key[None]
    if rotary.re:
        at = frequencies_of(rotary)[[channel[0] for channel in kept]]
        q_turned, key = (turned(rows, len(kept), at) for rows in (q_turned, key))
    scores = (q_turned @ key.mT + q @ key_out @ latent.T) / rotary.head_dim**0.5
    return softmax(scores) @ latent @ value_out.mT + shift[:, None]


def factored(layer, rotary, kept, rank, *, biased, x=None, moments=None):
    x = inputs() if x is None else x
    moments = moments or moments_of(x, layer.keys[..., 0].numel(), rotary)
    return factorise(layer.keys, layer.values, moments, rotary, kept, rank, biased=biased)


def all_of(rotary):
    """All channels; one of zeros where a layer has none."""
    return channels("high", len(rotary.re), len(rotary.re)) if rotary.re else ((0,),)


def twins(groups, rotary, bias=1.0):
    """KV heads equal up to a complex factor for each pair of key coordinates, and an invertible map of the values; free
    coordinates of the keys are anything."""
    layer, half = layer_of(groups, rotary, bias), len(rotary.re)
    re, im = layer.keys[:, :half], layer.keys[:, half : 2 * half]
    factor = torch.complex(normal(groups, half, seed=50), normal(groups, half, seed=51))
    z = torch.complex(re[:1], im[:1]) * factor[..., None]
    keys = torch.cat([z.real, z.imag, layer.keys[:, 2 * half :]], dim=1)
    d = rotary.head_dim
    return replace(layer, keys=keys, values=normal(groups, d, d, seed=52) @ layer.values[:1])


# Full rank.


@pytest.mark.parametrize("bias", [0.0, 1.0, 50.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rotary", [WHOLE, PART, STILL], ids=["whole", "part", "still"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_full_rank_is_the_source(groups, rotary, biased, bias):
    """The inputs' last row holds the biases, so that even a result without biases (here) can have them."""
    layer, x = twins(groups, rotary, bias), inputs()
    kept = all_of(rotary)
    rank = groups * len(rotary.free) + rotary.head_dim  # of the free keys and the values
    assert rank <= full_rank(groups * rotary.head_dim, 2 * len(rotary.re), D)
    factors = factored(layer, rotary, kept, rank, biased=biased, x=x)
    found, expected = latent_attended(layer, factors, kept, x, rotary), attended(layer, x, rotary)
    torch.testing.assert_close(found, expected, **EXACT)
    assert factors.loss < 1e-9 * factored(layer, rotary, kept, 1, biased=biased, x=x).loss


@pytest.mark.parametrize("rotary", [WHOLE, PART], ids=["whole", "part"])
def test_heads_that_differ_are_not_the_source(rotary):
    """Or the test above would prove nothing."""
    layer, x, kept = layer_of(2, rotary), inputs(), all_of(rotary)
    factors = factored(layer, rotary, kept, full_rank(2 * rotary.head_dim, 2 * len(rotary.re), D), biased=False, x=x)
    difference = latent_attended(layer, factors, kept, x, rotary) - attended(layer, x, rotary)
    assert difference.abs().max() > 0.1


# What is lost.


def weighed(fisher, rows):
    return float(((fisher @ rows) * rows).sum())


def minded(layer, factors, moments):
    """E[(g . (k - T kappa) - s . U c)^2] + E[(g_v . (v - U c))^2], gradients and inputs independent."""
    keys, values = layer.keys.flatten(0, 1), layer.values.flatten(0, 1)
    rest = keys - factors.rotary_out.flatten(0, 1) @ factors.rotary_in
    stood, kept = (out.flatten(0, 1) @ factors.latent_in for out in (factors.key_out, factors.value_out))
    both = torch.cat([rest, -stood]) @ root_of(moments.inputs)
    fisher = torch.cat(
        [torch.cat([moments.key, moments.cross], 1), torch.cat([moments.cross.T, moments.still], 1)]
    )  # of [g; s]
    return weighed(fisher, both) + weighed(moments.value, (values - kept) @ root_of(moments.inputs))


def minded_by_head(layer, factors, moments):
    """The same where g - M^T s, what a head's s cannot tell of its g, has nothing to do with any s."""
    keys, values = layer.keys.flatten(0, 1), layer.values.flatten(0, 1)
    rest = (keys - factors.rotary_out.flatten(0, 1) @ factors.rotary_in) @ root_of(moments.inputs)
    latent = factors.latent_in @ root_of(moments.inputs)
    tells, beyond = told(moments, len(layer.keys))
    lost = values @ root_of(moments.inputs) - factors.value_out.flatten(0, 1) @ latent
    still = tells @ rest - factors.key_out.flatten(0, 1) @ latent
    return weighed(beyond, rest) + weighed(moments.still, still) + weighed(moments.value, lost)


def told(moments, heads):
    """M, which has each head's g regressed on its own s, and E[(g - M^T s)(g - M^T s)^T]."""
    size = len(moments.still) // heads
    parts = [slice(start, start + size) for start in range(0, len(moments.still), size)]
    tells = torch.block_diag(*(torch.linalg.solve(moments.still[p, p], moments.cross[p, p].T) for p in parts))
    both = torch.cat(
        [torch.cat([moments.key, moments.cross], 1), torch.cat([moments.cross.T, moments.still], 1)]
    )  # of [g; s]
    left = torch.cat([torch.eye(len(tells)).double(), -tells])
    return tells, left.T @ both @ left


def root_of(moment):
    return torch.linalg.cholesky(moment)


@pytest.mark.parametrize("rank", [1, 5, 12])
@pytest.mark.parametrize("rotary", [WHOLE, PART, STILL], ids=["whole", "part", "still"])
def test_loss_of_one_head_is_what_the_moments_say(rotary, rank):
    layer, x = layer_of(1, rotary), inputs()
    moments = moments_of(x, rotary.head_dim, rotary)
    factors = factored(layer, rotary, all_of(rotary)[:1], rank, biased=False, x=x, moments=moments)
    assert factors.loss == pytest.approx(minded(layer, factors, moments), rel=1e-6)


@pytest.mark.parametrize("rank", [1, 5, 12])
@pytest.mark.parametrize("rotary", [WHOLE, PART, STILL], ids=["whole", "part", "still"])
def test_loss_is_told_head_by_head(rotary, rank):
    layer, x = layer_of(2, rotary), inputs()
    moments = moments_of(x, 2 * rotary.head_dim, rotary)
    factors = factored(layer, rotary, all_of(rotary)[:1], rank, biased=False, x=x, moments=moments)
    assert factors.loss == pytest.approx(minded_by_head(layer, factors, moments), rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_no_other_latent_loses_less(seed):
    layer, x = layer_of(2, PART), inputs()
    moments = moments_of(x, 2 * PART.head_dim, PART)
    factors = factored(layer, PART, all_of(PART), 6, biased=False, x=x, moments=moments)
    best = minded_by_head(layer, factors, moments)
    for name in ("key_out", "value_out", "latent_in"):
        maps = getattr(factors, name)
        for step in (1e-3, -1e-3):  # a slope would lose less one way
            other = maps + step * maps.norm() * normal(*maps.shape, seed=seed) / maps.numel() ** 0.5
            assert minded_by_head(layer, replace(factors, **{name: other}), moments) > best


@pytest.mark.parametrize("which", ["rotary_in", "rotary_out"])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_rotary_channel_loses_less(seed, which):
    """Of what no still key makes good, averaged over all turns."""
    layer, x, pair = layer_of(3, rotary(2, 0)), inputs(), rotary(2, 0)
    moments = moments_of(x, 6, pair)
    factors = factored(layer, pair, ((0,),), 5, biased=False, x=x, moments=moments)
    into = torch.linalg.lstsq(layer.keys.flatten(0, 1).T, factors.rotary_in.T).solution.T  # [2, 6], of the keys
    size, beyond = complex_moment(layer.keys.flatten(0, 1) @ root_of(moments.inputs)), told(moments, 3)[1]
    beyond = complex_moment(torch.linalg.cholesky((beyond + beyond.T) / 2))
    maps = {"rotary_in": into[0, 0::2] - 1j * into[0, 1::2], "rotary_out": torch.complex(*factors.rotary_out[..., 0].T)}

    def lost(maps):
        left = torch.eye(3).to(size) - torch.outer(maps["rotary_out"], maps["rotary_in"])
        return float((beyond @ left @ size @ left.mH).diagonal().sum().real)

    noise = torch.complex(normal(3, seed=seed), normal(3, seed=seed + 40))
    for step in (1e-3, -1e-3):  # a slope would lose less one way
        assert lost(maps) < lost(maps | {which: maps[which] + step * maps[which].norm() * noise})


def complex_moment(root):
    """E[z z^H] of a moment R R^T of the real coordinates of n heads with one pair each, re and im side by side."""
    z = torch.complex(root[0::2], root[1::2])
    return z @ z.mH


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rotary", [WHOLE, PART, STILL], ids=["whole", "part", "still"])
def test_more_rank_loses_less(rotary, biased):
    layer, x = layer_of(2, rotary), inputs()
    most = full_rank(2 * rotary.head_dim, 2 * len(rotary.re), D)
    losses = [factored(layer, rotary, all_of(rotary), rank, biased=biased, x=x).loss for rank in range(1, most + 1)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_more_channels_lose_less():
    layer, x = layer_of(2, WHOLE), inputs()
    losses = [
        factored(layer, WHOLE, channels("stride", kept, 4), 16 - 2 * kept, biased=False, x=x).loss for kept in (1, 2, 4)
    ]
    assert losses == sorted(losses, reverse=True)


def test_without_gradients_what_is_largest_turns():
    """All rotation counts: the channel holds the largest mixture of its frequency, and a key stands in for itself."""
    layer, pair = layer_of(3, rotary(2, 0)), rotary(2, 0)
    seen = moments_of(inputs(), 6, pair).inputs
    white = torch.eye(6).double()
    moments = Moments(seen, white, white, None, white)
    factors = factored(layer, pair, ((0,),), 4, biased=False, moments=moments)
    size = complex_moment(layer.keys.flatten(0, 1) @ root_of(seen))
    top = torch.linalg.eigh(size)[1][:, -1]
    channel = torch.complex(*factors.rotary_out[..., 0].T)
    torch.testing.assert_close((top.conj() @ channel).abs(), channel.norm(), rtol=1e-9, atol=0)
    whole = factored(layer, pair, ((0,),), 10, biased=False, moments=moments)
    rest = layer.keys - whole.rotary_out @ whole.rotary_in
    torch.testing.assert_close(whole.key_out @ whole.latent_in, rest, **EXACT)


# What must not matter.


def maps(factors):
    """What the gauge leaves alone."""
    rotary = factors.rotary_out.flatten(0, 1) @ factors.rotary_in
    return rotary, factors.key_out @ factors.latent_in, factors.value_out @ factors.latent_in, factors.value_shift


@pytest.mark.parametrize("biased", [False, True])
def test_scales_of_sums_do_not_matter(biased):
    layer, x = layer_of(2, PART), inputs()
    moments = moments_of(x, 18, PART)
    one, *others = (
        factored(layer, PART, ((0,),), 7, biased=biased, moments=scaled)
        for scaled in (
            moments,
            Moments(10 * moments.inputs, moments.key, moments.still, moments.cross, moments.value),
            Moments(moments.inputs, *(1e-6 * getattr(moments, n) for n in ("key", "still", "cross", "value"))),
        )
    )
    for other in others:
        for found, expected in zip(maps(other), maps(one), strict=True):
            torch.testing.assert_close(found, expected, **EXACT)


def test_a_constant_of_the_values_passes():
    layer, x, more = layer_of(2, WHOLE), inputs(), 100 * normal(2, 8, seed=60)
    moments, kept = moments_of(x, 16, WHOLE), channels("high", 2, 4)
    shifted = replace(layer, values=torch.cat([layer.values[..., :-1], (layer.values[..., -1] + more)[..., None]], -1))
    one, other = (factored(each, WHOLE, kept, 4, biased=True, moments=moments) for each in (layer, shifted))
    torch.testing.assert_close(other.value_shift, one.value_shift + more, rtol=0, atol=1e-9)
    torch.testing.assert_close(other.loss, one.loss, rtol=1e-9, atol=0)
    for found, expected in zip(maps(other)[:3], maps(one), strict=False):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("rotary", [PART, STILL], ids=["part", "still"])
def test_a_constant_of_still_keys_drops_out(rotary):
    layer, x, d = layer_of(2, rotary), inputs(), rotary.head_dim
    moments, kept = moments_of(x, 2 * d, rotary), all_of(rotary)
    keys = layer.keys.clone()
    keys[:, list(rotary.free), -1] += 100 * normal(2, len(rotary.free), seed=61)
    shifted = replace(layer, keys=keys)
    outputs = [
        latent_attended(each, factored(each, rotary, kept, 5, biased=True, moments=moments), kept, x, rotary)
        for each in (layer, shifted)
    ]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-8)
    torch.testing.assert_close(attended(shifted, x, rotary), attended(layer, x, rotary), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rank", [2, 6, 10])
@pytest.mark.parametrize("rotary", [PART, STILL], ids=["part", "still"])
def test_biases_of_what_stands_still_cost_nothing(rotary, rank):
    """At reduced rank: as much is lost as without biases, in what the loss is made of and in what is attended to."""
    layer, x, kept = layer_of(2, rotary, bias=0.0), inputs(), all_of(rotary)
    moments = moments_of(x, 2 * rotary.head_dim, rotary)
    keys, values = layer.keys.clone(), layer.values.clone()
    keys[:, list(rotary.free), -1], values[..., -1] = 50.0, 50.0
    heavy = replace(layer, keys=keys, values=values)
    one, other = (factored(each, rotary, kept, rank, biased=True, moments=moments) for each in (layer, heavy))
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    lost = [
        (latent_attended(each, factors, kept, x, rotary) - attended(each, x, rotary)).norm()
        for each, factors in ((layer, one), (heavy, other))
    ]
    torch.testing.assert_close(lost[1], lost[0], rtol=1e-6, atol=0)


# Gauge.


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("select", ["high", "stride", "fold"])
def test_gauge(select, biased):
    layer, x, kept = layer_of(2, WHOLE), inputs(), channels(select, 2, 4)
    moments = moments_of(x, 16, WHOLE)
    factors = factored(layer, WHOLE, kept, 7, biased=biased, moments=moments)
    out = torch.cat([factors.key_out.flatten(0, 1), factors.value_out.flatten(0, 1)])  # [2K, r]
    torch.testing.assert_close(out.T @ out, torch.eye(7).double(), rtol=0, atol=1e-10)
    sizes = torch.einsum("ni,ij,nj->n", factors.rotary_in, moments.inputs, factors.rotary_in)
    of_keys = torch.einsum("gdi,ij,gdj->gd", layer.keys, moments.inputs, layer.keys)
    for j, folded in enumerate(kept):
        pairs = of_keys[:, list(folded)] + of_keys[:, [f + 4 for f in folded]]
        torch.testing.assert_close(sizes[j] + sizes[j + 2], pairs.mean(), rtol=1e-10, atol=0)
        read = factors.rotary_out[:, list(folded), j].sum(), factors.rotary_out[:, [f + 4 for f in folded], j].sum()
        assert read[0] > 0
        assert read[1].abs() < 1e-10


def test_channels_read_back_their_own_frequencies():
    factors = factored(layer_of(2, WHOLE), WHOLE, ((0,), (2, 3)), 5, biased=False)
    used = factors.rotary_out.abs().sum(0) > 0  # [d, 2F]
    assert used.nonzero()[:, 0].unique().tolist() == [0, 2, 3, 4, 6, 7]
    assert used[:, 0].nonzero()[:, 0].tolist() == used[:, 2].nonzero()[:, 0].tolist() == [0, 4]
    # A pair commutes with rotation: re and im are read back by one complex number.
    torch.testing.assert_close(factors.rotary_out[:, :4, :2], factors.rotary_out[:, 4:, 2:], rtol=0, atol=0)
    torch.testing.assert_close(factors.rotary_out[:, 4:, :2], -factors.rotary_out[:, :4, 2:], rtol=0, atol=0)


# Numbers.


@pytest.mark.parametrize("rotary", [WHOLE, PART, STILL], ids=["whole", "part", "still"])
@pytest.mark.parametrize("spoil", ["few", "dead", "zeros"])
def test_little_to_go_by(spoil, rotary):
    layer, x, size = layer_of(2, rotary), inputs(), 2 * rotary.head_dim
    moments = moments_of(x[:3] if spoil == "few" else x, size, rotary, tokens=3 if spoil == "few" else 500)
    if spoil == "dead":
        for name in ("inputs", "key", "still", "cross", "value"):
            moment = getattr(moments, name).clone()
            moment[2], moment[:, 2] = 0, 0
            moments = replace(moments, **{name: moment})
        layer.keys[:, 1], layer.values[:, 1] = 0, 0
    if spoil == "zeros":
        zero = torch.zeros(size, size).double()
        moments = Moments(moments.inputs, zero, zero, zero, zero)
    for biased in (False, True):
        factors = factored(layer, rotary, all_of(rotary)[:1], 5, biased=biased, moments=moments)
        assert all(torch.as_tensor(value).isfinite().all() for value in vars(factors).values())
        found = latent_attended(layer, factors, all_of(rotary)[:1], x, rotary)
        assert found.isfinite().all()
        assert found.abs().max() < 100 * attended(layer, x, rotary).abs().max()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["keys", "values", "inputs", "key", "still", "cross", "value"])
def test_what_is_not_finite_is_refused(where, bad):
    layer, moments = layer_of(2, WHOLE), moments_of(inputs(), 16, WHOLE)
    owner = layer if where in ("keys", "values") else moments
    spoilt = getattr(owner, where).clone()
    spoilt[0, 0] = bad
    if owner is layer:
        layer = replace(layer, **{where: spoilt})
    else:
        moments = replace(moments, **{where: spoilt})
    with pytest.raises(UserError, match="holds a NaN or an infinity"):
        factored(layer, WHOLE, all_of(WHOLE), 5, biased=True, moments=moments)
