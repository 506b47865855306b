"""The shipped demo model is small, stock and worth breaking; the script that made it works."""

import itertools
import json
import math
import subprocess
import sys
from collections import Counter

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from kvfold.common.errors import UserError
from kvfold.common.text import builtin_documents, join_documents
from kvfold.recipes.tiny import MODEL_DIR

HEADS, HEAD_DIM, CONTEXT = 8, 32, 512
GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture
def model() -> LlamaForCausalLM:
    """The shipped model in fp32: a fresh copy, free to be broken."""
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


@pytest.fixture(scope="module")
def training_texts() -> list[str]:
    return builtin_documents(held_out=False)


@pytest.fixture(scope="module")
def windows(tokenizer) -> torch.Tensor:
    """Eight windows spread over the held-out text, int64 (8, S)."""
    ids = torch.tensor(tokenizer(join_documents(builtin_documents(held_out=True)), verbose=False).input_ids)
    whole = len(ids) // CONTEXT * CONTEXT
    every = ids[:whole].view(-1, CONTEXT)  # (S*n,) -> (n, S)
    return every[:: len(every) // 8][:8]


@torch.no_grad()
def loss_of(model: LlamaForCausalLM, windows: torch.Tensor) -> float:
    return model(input_ids=windows, labels=windows).loss.item()


@torch.no_grad()
def pool_heads(model: LlamaForCausalLM, names: tuple[str, ...], groups: int) -> None:
    """Replace each head's rows by the mean over its group of neighbours, in every layer."""
    for layer in model.model.layers:
        for name in names:
            weight = getattr(layer.self_attn, name).weight
            heads = weight.view(groups, HEADS // groups, HEAD_DIM, -1)  # (H*d, D) -> (G, H/G, d, D)
            heads.copy_(heads.mean(1, keepdim=True).expand_as(heads))


def test_it_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 6_000_000
    names = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in MODEL_DIR.iterdir()} == names


def test_it_is_a_stock_multi_head_llama(model):
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in config
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 8, 32)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["max_position_embeddings"] == CONTEXT
    assert type(model) is LlamaForCausalLM
    assert model.num_parameters() <= 2_800_000


def test_the_weights_are_bf16_and_tied(model):
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors
    assert set(tensors) == {name for name, _ in model.named_parameters()}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_the_heads_of_every_layer_differ(model):
    for layer, name in itertools.product(model.model.layers, ("k_proj", "v_proj")):
        heads = getattr(layer.self_attn, name).weight.view(HEADS, -1)  # (H*d, D) -> (H, d*D)
        cosines = torch.nn.functional.cosine_similarity(heads[:, None], heads[None], dim=-1)  # (H, H)
        assert cosines.fill_diagonal_(0).abs().max() < 0.5
        assert heads.norm(dim=1).min() > 0.2 * heads.norm(dim=1).max(), "no head is dead"


@pytest.mark.parametrize("names", [("k_proj",), ("v_proj",), ("k_proj", "v_proj")])
def test_pooling_the_heads_hurts(model, windows, names):
    whole = loss_of(model, windows)
    pool_heads(model, names, groups=HEADS)
    assert loss_of(model, windows) == whole, "groups of one change nothing"
    pool_heads(model, names, groups=2)
    assert loss_of(model, windows) > whole + 0.2


def test_every_layer_is_used(model, windows):
    whole = loss_of(model, windows)
    for layer in model.model.layers:
        kept = layer.self_attn.o_proj.weight.data.clone()
        layer.self_attn.o_proj.weight.data.zero_()
        assert loss_of(model, windows) > whole + 0.01
        layer.self_attn.o_proj.weight.data.copy_(kept)


def test_it_beats_a_unigram_model_by_two_nats(model, tokenizer, windows, training_texts):
    encoded = (tokenizer(text, verbose=False).input_ids for text in training_texts)
    counts = Counter(itertools.chain.from_iterable(encoded))
    total = counts.total() + len(tokenizer)
    scored = windows[:, 1:].flatten().tolist()
    unigram = -sum(math.log((counts[token] + 1) / total) for token in scored) / len(scored)
    assert unigram < math.log(len(tokenizer)), "the unigram model is a fair one"
    assert loss_of(model, windows) <= unigram - 2


def test_bf16_as_shipped_is_as_good_as_fp32(model, windows):
    shipped = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    assert shipped.dtype == torch.bfloat16
    assert loss_of(shipped, windows) == pytest.approx(loss_of(model, windows), abs=0.02)


def test_the_tokenizer_is_exactly_gpt2s_byte_level(tokenizer):
    saved = json.loads((MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["pre_tokenizer"] == GPT2_SPLIT
    assert saved["normalizer"] is None
    assert saved["model"]["type"] == "BPE"
    assert json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] == GPT2_SPLIT, "also once loaded"
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("It's 42  times, don't\n\n ask!")
    words = ["It", "'s", "Ġ42", "Ġ", "Ġtimes", ",", "Ġdon", "'t", "ĊĊ", "Ġask", "!"]
    assert [piece for piece, _ in pieces] == words


@pytest.mark.parametrize(
    "text",
    [
        "Return the sum of a 'start' value plus an iterable of numbers.",
        "  leading, trailing  \n\n\t and\r\nmixed white space \u00a0\u3000 ",
        "naïve façade, Ελληνικά, русский, 日本語, العربية, हिन्दी",
        "👩🏽‍🚀 zero\u200dwidth, e\u0301 decomposed, \ufffd, \x00 and \x7f",
        "".join(map(chr, range(0x250))),
        "\U0010ffff",
    ],
)
def test_the_tokenizer_gives_any_text_back(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < 2048
    assert 0 not in ids, "no bos or eos is added, before or after"


def test_the_tokenizer_knows_its_one_special_token(tokenizer, model):
    assert len(tokenizer) == model.config.vocab_size == 2048
    assert tokenizer.all_special_tokens == ["<|endoftext|>"]
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer("<|endoftext|>").input_ids == [0]
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    assert tokenizer.model_max_length == CONTEXT


def test_it_writes_english(model, tokenizer, training_texts):
    """Greedy continuation with the cache: words that the training text knows, not one word for ever."""
    ids = tokenizer("The function returns", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=24, do_sample=False)[0])
    known = set(join_documents(training_texts).split())
    words = text.split()
    assert sum(word in known for word in words) >= 0.7 * len(words)
    assert len(set(words)) > 5


def test_naming_the_model_imports_no_torch():
    code = "import sys, kvfold.recipes.tiny as t; print(t.MODEL_DIR.name, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["model", "False"]


# The script.


@pytest.fixture
def train_script():
    from kvfold.recipes.tiny import train

    return train


def test_each_pass_packs_all_documents_anew(train_script):
    documents = [[number] * number for number in range(100, 140)]  # document n is n times the token n
    tokens = sum(map(len, documents)) + len(documents)
    windows = train_script.training_windows(documents, passes=3, seed=0)
    assert windows.shape == (3 * (tokens // CONTEXT), CONTEXT)
    passes = windows.view(3, -1)
    assert not torch.equal(passes[0], passes[1])
    for stream in passes:
        runs = [(token, len(list(group))) for token, group in itertools.groupby(stream.tolist())]
        whole = runs[:-1]  # the last may be cut by the end of the pass
        assert all(length == (token or 1) for token, length in whole), "documents whole, one separator each"
        assert len({token for token, _ in whole}) == len(whole[::2]) + 1, "each document once"
    assert torch.equal(windows, train_script.training_windows(documents, passes=3, seed=0))
    assert not torch.equal(windows, train_script.training_windows(documents, passes=3, seed=1))


def test_dropout_is_on_in_training_only_and_leaves_no_trace_in_the_weights(train_script):
    model = train_script.build_model(0)
    ids = torch.arange(64)[None]
    plain, names = loss_of(model.eval(), ids), list(model.state_dict())
    train_script.add_dropout(model, 0.5)
    assert loss_of(model, ids) == plain
    assert loss_of(model.train(), ids) != plain
    assert list(model.state_dict()) == names


def test_the_unigram_loss_is_that_of_smoothed_counts(train_script):
    got = train_script.unigram_loss([[5, 5], [5, 6]], [1, 5, 7])
    assert got == pytest.approx(-(math.log(4 / 2052) + math.log(1 / 2052)) / 2)


def test_the_script_makes_a_model_and_says_how_good_it_is(train_script, tmp_path, monkeypatch):
    """The whole script on a sliver of text, two steps.

    In full precision: accelerate allows one precision a process, and other tests here take the default.
    """

    def sliver(*, held_out):
        return builtin_documents(held_out=held_out, kinds=["topics"])[: 2 if held_out else 12]

    monkeypatch.setattr(train_script, "builtin_documents", sliver)
    out = tmp_path / "model"
    arguments = ["--out", str(out), "--steps", "2", "--batch-size", "2", "--precision", "no"]
    done = CliRunner().invoke(train_script.main, arguments, catch_exceptions=False)
    said = dict(line.split("  ", 1) for line in done.output.splitlines() if "  " in line)
    assert {"parameters", "train loss", "held-out loss", "held-out, unigram", "gap", "seconds"} <= set(said)
    assert {path.name for path in out.iterdir()} == {path.name for path in MODEL_DIR.iterdir()}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(out)("a b").input_ids


def test_the_script_never_overwrites(train_script, tmp_path):
    with pytest.raises(UserError, match="exists; name a new directory"):
        train_script.main(["--out", str(tmp_path)], standalone_mode=False)
