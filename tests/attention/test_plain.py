"""The plain form as transformers classes: caches, masks, absorbing, training, files."""

import pickle
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

from kvfold.attention.plain import SOURCES, LatentAttention, plain_config
from kvfold.convert.families import FAMILIES

from ..convert.mla.plain_models import CASES, SIZES, exact, make_plain

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
FAMILY_CASES = ["llama", "llama3", "mistral", "qwen2", "smollm3", "phi3", "stablelm"]
IDS = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    extra = {"stablelm": {"qk_rope_head_dim": 2, "rope_frequencies": [[0], [0]]}}  # a quarter of 8 coordinates turns
    return {case: make_plain(tmp_path_factory.mktemp(case), case, **extra.get(case, {})) for case in FAMILY_CASES}


@pytest.fixture(scope="module")
def models(folder):
    """With norms in fp64: in fp32, as they are, they would hide small differences."""
    return {case: exact(load(folder[case])) for case in FAMILY_CASES}


def load(path, **options):
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True, **options)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]), info
    return model.eval()


@torch.no_grad()
def logits(model, ids=IDS, **options):
    return model(ids, **{"use_cache": False, **options}).logits


@pytest.fixture
def absorbing(monkeypatch):
    """Say whether attention absorbs."""

    def say(yes):
        monkeypatch.setattr(LatentAttention, "_absorbs", lambda self, new, seen: yes)

    return say


def in_pieces(model, cache, sizes, ids=IDS, **options):
    """Logits of the ids, fed through the cache in pieces."""
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    assert starts[-1] == ids.shape[1]
    parts = [ids[:, start:stop] for start, stop in pairwise(starts)]
    return torch.cat([logits(model, part, past_key_values=cache, use_cache=True, **options) for part in parts], dim=1)


def test_every_family_that_becomes_mla_has_a_class():
    assert {name for name, row in FAMILIES.items() if row.latent} == set(SOURCES)
    assert {CASES[case][0] for case in FAMILY_CASES} == set(SOURCES)


@pytest.mark.parametrize("case", FAMILY_CASES)
@pytest.mark.parametrize("sizes", [[30, *[1] * 10], [20, 3, 1, 16], [1] * 40], ids=["tokens", "pieces", "all"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_decoding_is_the_full_forward(case, sizes, kind, models):
    model = models[case]
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=44)
    torch.testing.assert_close(in_pieces(model, cache, sizes), logits(model), **CLOSE)


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_the_cache_holds_latent_and_rotary_key(case, models):
    model, cache = models[case], DynamicCache(config=models[case].config)
    in_pieces(model, cache, [30, *[1] * 10])
    rank, rope = model.config.kv_lora_rank, model.config.qk_rope_head_dim
    assert len(cache.layers) == 2
    for layer in cache.layers:
        assert (layer.keys.shape, layer.values.shape) == ((2, 1, 40, rank), (2, 1, 40, rope))
        # And nothing more, such as a view of something larger.
        assert layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes() == 640 * (rank + rope)


@pytest.mark.parametrize("yes", [True, False], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_left_padding(case, yes, models, absorbing):
    """A row with seven tokens of padding gets the logits that it has alone, at once and token by token."""
    model, alone = models[case], logits(models[case], IDS[:1, 7:])
    absorbing(yes)
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0, :7], mask[0, :7] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found = logits(model, ids, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(found[:1, 7:], alone, **CLOSE)
    torch.testing.assert_close(found[1:], logits(model, IDS[1:]), **CLOSE)
    cache, steps = DynamicCache(config=model.config), []
    for start, stop in ((0, 36), (36, 37), (37, 40)):
        options = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        steps.append(logits(model, ids[:, start:stop], past_key_values=cache, use_cache=True, **options))
    torch.testing.assert_close(torch.cat(steps, dim=1)[:1, 7:], alone, **CLOSE)


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_absorbed_is_expanded(case, models, absorbing):
    found = []
    for yes in (True, False):
        absorbing(yes)
        cache = DynamicCache(config=models[case].config)
        found.append(in_pieces(models[case], cache, [33, 1, 6]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert not torch.equal(*found)  # two ways indeed


def test_when_it_absorbs(models):
    attention = models["llama"].model.layers[0].self_attn
    assert attention._absorbs(1, 30)
    assert not attention._absorbs(30, 30)  # a prompt
    assert not attention._absorbs(7, 30)  # more scores than keys and values
    eager = deepcopy(models["llama"])
    eager.set_attn_implementation("eager")
    assert not eager.model.layers[0].self_attn._absorbs(1, 30)  # which gives weights back


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_sdpa_and_eager_agree(case, folder, models):
    """transformers' eager softmax runs in fp32."""
    eager = exact(load(folder[case], attn_implementation="eager"))
    expected = logits(models[case])
    torch.testing.assert_close(logits(eager), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("case", FAMILY_CASES)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate(case, beams, cache, models):
    """With one row padded, and as without a cache."""
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    options |= {"attention_mask": mask, "disable_compile": True}
    found = models[case].generate(IDS, cache_implementation=cache, **options)
    assert found.shape == (2, 48)
    assert torch.equal(found, models[case].generate(IDS, use_cache=False, **options))


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_round_trip(case, folder, tmp_path):
    (one := load(folder[case])).save_pretrained(tmp_path)
    other = load(tmp_path)
    assert type(other) is type(one)
    assert other.config.to_dict() | {"_name_or_path": str(folder[case])} == one.config.to_dict()
    assert torch.equal(logits(other), logits(one))


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_pickle_and_copy(case, folder):
    model = load(folder[case])
    expected = logits(model)
    for again in (pickle.loads(pickle.dumps(model)), deepcopy(model)):
        assert torch.equal(logits(again), expected)
    assert pickle.loads(pickle.dumps(model.config)).to_dict() == model.config.to_dict()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_training_step(case, checkpointing, folder):
    model = load(folder[case]).train()
    with torch.no_grad():
        expected = F.cross_entropy(model(IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(2):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.item())
        for layer, kept in zip(model.model.layers, model.config.rope_frequencies, strict=True):
            for name, parameter in layer.self_attn.named_parameters():
                gradient = parameter.grad
                if name == "kv_a_proj_with_mqa.weight" and kept:
                    latent, key = gradient.split([model.config.kv_lora_rank, model.config.qk_rope_head_dim])
                    assert latent.any(dim=1).all()
                    assert key.any(dim=1).all()
                assert gradient.isfinite().all(), name
                assert gradient.any(), name
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
    assert losses[0] == pytest.approx(float(expected), rel=1e-5)


def test_dropout_is_of_training_only(models):
    model = deepcopy(models["llama"])
    for layer in model.model.layers:
        layer.self_attn.dropout = 0.5
    torch.testing.assert_close(logits(model), logits(models["llama"]), rtol=0, atol=0)
    torch.manual_seed(0)
    assert not torch.allclose(logits(model.train()), logits(models["llama"]))


def test_positions_count(models):
    """Two layers, so that the order of earlier tokens is seen; and a layer without positions sees none."""
    turned = logits(models["llama"], IDS[:, [1, 0, *range(2, 40)]])
    assert not torch.allclose(turned[:, -1], logits(models["llama"])[:, -1])
    attention = models["smollm3"].model.layers
    assert [bool(layer.self_attn.frequencies) for layer in attention] == [True, False]


def test_angles_are_the_source_s(models):
    """Pair j turns by the table's entry of its frequency, whatever scaling the source has."""
    model = models["llama3"]
    attention = model.model.layers[0].self_attn
    tables = model.model.rotary_emb(torch.zeros(1, 1, 1, dtype=torch.float64), torch.tensor([[5]]))
    x = torch.randn(1, 1, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = 5 * model.model.rotary_emb.inv_freq.double()[list(attention.frequencies)]
    expected = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    found = torch.complex(*attention._turn(x, tables).chunk(2, -1))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_config_says_as_many_key_heads_as_query_heads(case, models):
    config = models[case].config
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert config.model_type == f"mla_{CASES[case][0]}"
    assert config.architectures == [type(models[case]).__name__]
    assert all("self_attn" not in name for name in config.base_model_tp_plan or {})


def test_half_precision(folder):
    model = AutoModelForCausalLM.from_pretrained(folder["llama"], dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=model.config)
    whole, pieces = logits(model), in_pieces(model, cache, [30, *[1] * 10])
    assert cache.layers[0].keys.dtype == torch.bfloat16
    torch.testing.assert_close(pieces, whole, rtol=0, atol=0.1 * float(whole.abs().max()))


def test_plain_config_keeps_the_source_s_words():
    source = AutoConfig.for_model("llama", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    made = plain_config(source.to_dict(), **SIZES)
    assert {key for key, value in source.to_dict().items() if made[key] != value} == {
        "model_type", "architectures", "num_key_value_heads"
    }  # fmt: skip
    assert made["architectures"] == ["MlaLlamaForCausalLM"]
