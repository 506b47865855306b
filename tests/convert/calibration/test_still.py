"""Gradients at keys that do not turn, against an attention of our own that has one beside each key."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

from kvfold.convert.calibration import still as module
from kvfold.convert.calibration.calibrate import Runner
from kvfold.convert.calibration.collect import collect
from kvfold.convert.calibration.knobs import Calibration
from kvfold.convert.calibration.text import CalibText
from kvfold.convert.projections import projections
from kvfold.convert.rotary import rotary_of
from kvfold.convert.source import open_source

from ..mla.sources import SOURCES, make_source
from ..tiny import make_config, make_gpt2, make_model
from .test_collect import UNEQUAL, statistics, weighted

KV_HEADS = 2
OURS = "kvfold_test_explicit"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Saved sources, each made once: case and what its config says beside -> folder."""
    made = {}

    def find(case, **extra):
        key = (case, *extra.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp(case)
            make_source(case, KV_HEADS, **extra).save_pretrained(made[key])
        return made[key]

    return find


# By hand.


def explicit(layer, query, key, value, mask, *, scaling, **_):
    """Attention [B, H, T, d] whose scores have a second term, of the queries as projected with keys of zeros."""
    batch, heads, new, d = query.shape
    group = heads // key.shape[1]
    layer.zero = torch.zeros_like(key).requires_grad_()  # [B, G, S, d]
    unturned = F.linear(layer.read, *layer.query).view(batch, new, heads, d).transpose(1, 2)
    scores = query @ key.repeat_interleave(group, 1).mT + unturned @ layer.zero.repeat_interleave(group, 1).mT
    hidden = torch.ones(new, new, dtype=torch.bool).triu(1)
    weights = (scores * scaling).masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None


AttentionInterface.register(OURS, explicit)
AttentionMaskInterface.register(OURS, sdpa_mask)


@contextmanager
def watched(model):
    """Layers that note what they read and what their keys are; gives their lists of keys, gradients g and s."""
    config, notes, handles = model.config, [], []
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, size = config.num_attention_heads * d, KV_HEADS * d
    for layer in model.model.layers:
        attention, note = layer.self_attn, ([], [], [])
        fused = getattr(attention, "qkv_proj", None)
        one, other = fused or attention.q_proj, fused or attention.k_proj
        attention.query = one.weight[:queries], None if one.bias is None else one.bias[:queries]
        part = slice(queries, queries + size) if fused else slice(None)

        def read(attention, args, kwargs):
            attention.read = kwargs.get("hidden_states", *args).detach()

        def keys(linear, args, output, attention=attention, note=note, part=part):
            attention.turned = torch.zeros_like(output).requires_grad_()
            note[0].append(output[0, :, part].detach())
            return output + attention.turned

        def keep(attention=attention, note=note, part=part):
            note[1].append(attention.turned.grad[0, :, part])
            note[2].append(attention.zero.grad[0].transpose(0, 1).flatten(1))  # [G, T, d] -> [T, G * d]

        handles.append(attention.register_forward_pre_hook(read, with_kwargs=True))
        handles.append(other.register_forward_hook(keys))
        notes.append((note, keep))
    yield notes
    for handle in handles:
        handle.remove()


def by_hand(path, windows):
    """E[s s^T] and E[g s^T] of every layer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation=OURS).eval()
    model.requires_grad_(False)
    with watched(model) as notes:
        for ids in windows:
            loss = F.cross_entropy(model(ids, use_cache=False).logits[0, :-1], ids[0, 1:], reduction="sum")
            loss.backward()
            for _, keep in notes:
                keep()
    found = []
    for note, _ in notes:
        key, turned, still = map(torch.cat, note)
        both = weighted(torch.cat([turned, still], dim=1), key)  # [2K, 2K]
        size = len(both) // 2
        found.append((both[size:, size:], both[:size, size:]))
    return found


def assert_close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("segment", [None, 1], ids=["memory", "offload"])
@pytest.mark.parametrize("case", SOURCES)
def test_moments_are_those_of_plain_torch(case, segment, folder):
    found = statistics(folder(case), UNEQUAL, segment=segment)
    for layer, (still, cross) in zip(found, by_hand(folder(case), UNEQUAL), strict=True):
        assert still.abs().max() > 0
        assert_close(layer.still_fisher, still)
        assert_close(layer.still_cross, cross)


@pytest.mark.parametrize("case", SOURCES)
def test_probing_changes_nothing_else(case, folder):
    found, expected = (statistics(folder(case), UNEQUAL, still=still) for still in (True, False))
    for one, other in zip(found, expected, strict=True):
        assert other.still_fisher is other.still_cross is None
        for name in ("inputs", "key_fisher", "value_fisher"):
            assert_close(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("case", ["llama", "phi3"])
def test_no_still_keys_without_gradients(case, folder):
    assert all(layer.still_fisher is None for layer in statistics(folder(case), UNEQUAL, fisher=False, still=True))


@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3"])
def test_keys_that_stand_still_anyway(case, folder, monkeypatch):
    """With all tokens at position 0, g = s."""
    kind = make_source(case, KV_HEADS).model.rotary_emb

    def at_zero(self, x, position_ids):
        tables = x.new_ones(*position_ids.shape, 2 * len(self.inv_freq)), x.new_zeros(1)
        return tables[0], tables[1].expand_as(tables[0])

    monkeypatch.setattr(type(kind), "forward", at_zero)
    for layer in statistics(folder(case), UNEQUAL):
        assert_close(layer.still_fisher, layer.key_fisher, 1e-13)
        assert_close(layer.still_cross, layer.key_fisher, 1e-13)


@pytest.mark.parametrize("case", ["smollm3", "phi3-part", "stablelm"])
def test_coordinates_without_position_feel_the_same(case, folder):
    config = make_source(case, KV_HEADS).config
    with open_source(str(folder(case))) as source:
        rotaries = [rotary_of(source.family, config, layer) for layer in range(2)]
    assert any(rotary.free for rotary in rotaries)
    for rotary, layer in zip(rotaries, statistics(folder(case), UNEQUAL), strict=True):
        d = rotary.head_dim
        free = [head * d + place for head in range(KV_HEADS) for place in rotary.free]
        turning = [head * d + place for head in range(KV_HEADS) for place in (*rotary.re, *rotary.im)]
        if free:
            assert_close(layer.still_cross[free], layer.still_fisher[free], 1e-13)
            assert_close(layer.still_cross[free][:, free], layer.key_fisher[free][:, free], 1e-13)
        if turning:
            difference = layer.still_cross - layer.still_fisher
            assert difference[turning].abs().max() > 1e-3 * layer.still_fisher.abs().max()


@pytest.mark.parametrize("segment", [None, 1])
def test_layers_are_left_as_they_were(segment, folder):
    with open_source(str(folder("llama"))) as source:
        runner = Runner(source, Calibration(CalibText(), dtype="float64"))
        model = runner.model()
        places = projections(source.family, runner.sizes)
        collect(model, UNEQUAL, places, emit=lambda *_: None, segment=segment)
        assert not [owner for layer in model.layers for owner in layer.modules() if module.NAME in owner.__dict__]
        assert not any(owner._forward_hooks for layer in model.layers for owner in layer.modules())


@pytest.mark.parametrize(
    ("case", "taken"),
    [*((case, True) for case in SOURCES)]
    + [(case, False) for case in ("mistral-sliding", "mixtral", "qwen3", "gemma2", "gemma3_text", "olmo2", "gpt2")],
)
def test_taken_of_families_that_become_mla(case, taken, folder, tmp_path):
    if case in SOURCES:
        path = folder(case)
    else:
        config = make_gpt2() if case == "gpt2" else make_config(case.removesuffix("-sliding"), KV_HEADS)
        make_model(config).save_pretrained(path := tmp_path)
    with open_source(str(path)) as source:
        assert Runner(source, Calibration(CalibText())).still is taken
        assert not Runner(source, Calibration(CalibText(), fisher=False)).still
