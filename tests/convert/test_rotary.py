"""What commutes with RoPE, on stock models: the pairs that `rotary_of` names, and no others."""

from __future__ import annotations

import pytest
import torch

from kvfold.convert.families import FAMILIES, Sizes
from kvfold.convert.merge.mixing import key_maps
from kvfold.convert.projections import projections
from kvfold.convert.rotary import Rotary, rotary_of

from .tiny import CASES, make_config, make_gpt2, make_model

TOKENS = torch.arange(201).remainder(95).add(2).flip(0)[None]  # [1, 201]: positions 0..200
KV_HEADS = 2
# Case -> what is turned beside the pairs of the family's row, if anything.
MODELS = {
    "llama-bias": {},
    "llama-head-dim": {},
    "cohere": {},
    "phi": {},
    "stablelm": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "smollm3": {},
}


@pytest.fixture(autouse=True)
def fp64(monkeypatch):
    """Some stock models turn heads in fp32 whatever their dtype is."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def model_of(case):
    if case == "gpt2":
        return make_model(make_gpt2())
    config = make_config(case, KV_HEADS)
    for name, value in MODELS[case].items():
        config.rope_parameters[name] = value
    return make_model(config)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def rows(model, layer, place, name):
    """A view of the heads [n * d, ...] in a projection's weight or bias, None where there is no bias."""
    module = model.get_submodule(f"{FAMILIES[model.config.model_type].layers}{layer}.{place.module}")
    tensor = getattr(module, name)
    if tensor is None:
        return None
    dim = place.dim if name == "weight" else 0
    return tensor.detach().movedim(dim, 0)[place.start : place.stop]


def turn_keys(model, rotary_in, seed=0):
    """Mix the coordinates of each KV head in every layer by random maps, and the queries by what undoes them."""
    sizes = Sizes(model.config)
    heads, d = sizes["G"], sizes["d"]
    places = projections(FAMILIES[model.config.model_type], sizes)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(model.config.num_hidden_layers):
        rotary = rotary_in(layer)
        n = len(rotary.free)
        factors = torch.randn(len(rotary.re), heads, dtype=torch.complex128, generator=generator)
        free = torch.randn(heads, n, n, dtype=torch.float64, generator=generator) + 2 * torch.eye(n)
        maps = key_maps(factors, free, rotary)  # [G, d, d]
        undo = torch.linalg.inv(maps).mT.repeat_interleave(sizes["H"] // heads, dim=0)  # [H, d, d]
        for place, by in ((places["K"], maps), (places["Q"], undo)):
            for name in ("weight", "bias"):
                if (view := rows(model, layer, place, name)) is not None:
                    each = view.reshape(len(by), d, -1)  # [n, d, D] or [n, d, 1]
                    view.copy_((by @ each).reshape(view.shape))


def families_rotary(model):
    family = FAMILIES[model.config.model_type]
    return lambda layer: rotary_of(family, model.config, layer)


@pytest.mark.parametrize("case", [*MODELS, "gpt2"])
def test_channels_take_any_complex_factor_and_free_coordinates_any_map(case):
    model = model_of(case)
    before = logits(model)
    turn_keys(model, families_rotary(model))
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", MODELS)
def test_other_pairs_do_not(case):
    """So the test above can fail: one wrong pair, or one coordinate that turns and is called free, is seen."""
    model = model_of(case)
    before = logits(model)
    right = families_rotary(model)

    def mispaired(layer):
        rotary = right(layer)
        if not rotary.re:
            return rotary
        return Rotary(rotary.re, (rotary.im[1], rotary.im[0], *rotary.im[2:]), rotary.free)

    def half_free(layer):
        rotary = right(layer)
        return Rotary(rotary.re[1:], rotary.im[1:], (*rotary.free, *rotary.re[:1], *rotary.im[:1]))

    for wrong in (mispaired, half_free):
        other = model_of(case)
        turn_keys(other, wrong)
        assert (logits(other) - before).abs().max() > 1e-3


@pytest.mark.parametrize("case", [*CASES, "gpt2"])
def test_every_coordinate_has_one_place(case):
    config = make_gpt2() if case == "gpt2" else make_config(case, KV_HEADS)
    for layer in range(config.num_hidden_layers):
        rotary = rotary_of(FAMILIES[config.model_type], config, layer)
        assert sorted(rotary.re + rotary.im + rotary.free) == list(range(rotary.head_dim))
        assert len(rotary.re) == len(rotary.im)
        assert rotary.head_dim == Sizes(config)["d"]


@pytest.mark.parametrize(
    ("case", "turning"), [("phi", 8), ("stablelm", 4), ("phi3", 16), ("llama", 16), ("cohere", 16)]
)
def test_the_share_that_turns_is_the_configs(case, turning):
    config = make_config(case)  # d = 16
    rotary = rotary_of(FAMILIES[config.model_type], config, 0)
    assert (len(rotary.re) * 2, len(rotary.free)) == (turning, 16 - turning)


def test_layers_without_rope_are_free():
    config = make_config("smollm3")
    lengths = [len(rotary_of(FAMILIES["smollm3"], config, layer).free) for layer in range(2)]
    assert lengths == [0, 16]
