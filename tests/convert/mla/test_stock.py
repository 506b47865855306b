"""The stock form computes what the plain form does, in transformers' own class, and no step of it can be left out."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvfold.common.errors import UserError
from kvfold.convert import latent_form as form
from kvfold.convert.directory import lay_out, write_directory
from kvfold.convert.latent_form import HeadSizes
from kvfold.convert.mla import folds, stock, stock_rope, stock_tensors
from kvfold.convert.mla.stock import export
from kvfold.convert.source import open_source
from kvfold.convert.stream import compute

from .plain_models import CASES, LLAMA3, build, difference, load, logits, make_plain, multiply, opened

SMALL = [1e-12, 1e-12]  # latent sizes that leave the factor where it is largest
SHAPE = HeadSizes(16, 8, 8, 10)  # the tiny models' own engine
STRICT = ("vllm", "sglang", "llama.cpp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of plain models, each made once: case and what its config says beside -> folder."""
    made = {}

    def find(case="llama", **extra):
        key = (case, json.dumps({k: str(v) for k, v in extra.items()}))
        if key not in made:
            made[key] = make_plain(tmp_path_factory.mktemp(case), case, **extra)
        return made[key]

    return find


@pytest.fixture
def tiny_engine(monkeypatch):
    monkeypatch.setattr(form, "ENGINE_SHAPES", (SHAPE,))


class Ideal(nn.Module):
    """The latent's norm where it is wholly neutral."""

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x):
        return x * self.weight / self.eps**0.5


def with_norms(model, make):
    """Replace every latent norm by `make(norm)`."""
    for layer in model.model.layers:
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if (theirs := getattr(layer.self_attn, name)) is not None:
                setattr(layer.self_attn, name, make(theirs))
    return model


def ideal(stock_form, plain):
    eps = stock_form.config["rms_norm_eps"]
    return with_norms(build(stock_form, plain.checkpoint), lambda theirs: Ideal(theirs.weight, eps))


def by_the_config(stock_form, plain):
    """The model under the rule of vLLM, SGLang and llama.cpp, which have the config's eps in every norm."""

    def follow(theirs):
        theirs.eps = stock_form.config["rms_norm_eps"]
        return theirs

    return with_norms(build(stock_form, plain.checkpoint), follow)


PAIRS = [(case, ["transformers"]) for case in CASES if case != "stablelm"] + [
    (case, ["transformers", "llama.cpp"])  # which reads neither biases nor scaled frequencies
    for case in ("llama", "llama-tied", "llama-high", "mistral", "smollm3", "phi3")
]


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(("case", "readers"), PAIRS)
def test_every_step_but_the_norm_is_exact(folder, tiny_engine, case, readers, padded):
    plain = opened(folder(case))
    made = export(plain, readers=readers, pad=padded, latent_sizes=SMALL)
    assert difference(logits(ideal(made, plain)), logits(load(folder(case)))) < 1e-12


@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_large_eps_form_is_exact_but_for_the_norm(folder, case):
    plain = opened(folder(case))
    readers = ["sglang", "llama.cpp"] if case == "llama" else []
    made = export(plain, readers=readers, large_eps=True, latent_sizes=SMALL)
    assert difference(logits(ideal(made, plain)), logits(load(folder(case)))) < 1e-12


def measured(plain_folder):
    """The latents of the plain model on the text of `logits`: mean c^2 of every token, by layer."""
    model, seen = load(plain_folder), []
    rank = model.config.kv_lora_rank
    for layer in model.model.layers:
        rows = layer.self_attn.kv_a_proj_with_mqa
        rows.register_forward_hook(lambda _, args, out: seen.append(out[0, :, :rank].square().mean(-1)))
    logits(model)
    return seen


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_neutral_norm_changes_latents_by_no_more_than_its_formula(folder, tiny_engine, padded):
    plain, sizes = opened(folder()), measured(folder())
    made = export(plain, pad=padded, latent_sizes=[float(size.mean()) for size in sizes])
    model, seen = build(made, plain.checkpoint), []
    for layer in model.model.layers:
        norm = layer.self_attn.kv_a_layernorm
        norm.register_forward_hook(lambda norm, args, out: seen.append((Ideal(norm.weight, norm.eps)(args[0]), out)))
    result = logits(model)
    assert difference(result, logits(load(folder()))) < 3e-6
    for (wanted, out), size, scale in zip(seen, sizes, made.config["kvfold"]["latent_scales"], strict=True):
        formula = scale**2 * size / (2 * 1e-6)
        assert formula.mean() < 1e-7
        error = ((out - wanted).norm(dim=-1) / wanted.norm(dim=-1))[0]
        assert (error <= formula * (1 + 1e-4)).all() and error.max() > 0


@pytest.mark.parametrize("large", ["", "input_layernorm.weight", "kv_a_proj_with_mqa.bias"])
def test_latents_of_unknown_size_are_taken_at_their_largest(tmp_path, large):
    make_plain(tmp_path, "qwen2", rms_norm_eps=1e-5)
    if large:
        multiply(tmp_path, large, 300.0)
    plain = opened(tmp_path)
    made, sizes = export(plain), measured(tmp_path)
    for scale, size in zip(made.config["kvfold"]["latent_scales"], sizes, strict=True):
        assert scale**2 * size.max() / 2e-6 < 1e-7
    if large != "input_layernorm.weight":  # there softmax is too sharp for small differences to stay small
        assert difference(logits(build(made, plain.checkpoint)), logits(load(tmp_path))) < 3e-6


def test_large_eps_form_is_right_for_readers_that_follow_the_config(folder):
    plain = opened(folder())
    sizes = [float(size.mean()) for size in measured(folder())]
    made = export(plain, readers=["llama.cpp"], latent_sizes=sizes)
    assert made.config["rms_norm_eps"] == 1.0 and made.readable_by == ("sglang", "llama.cpp")
    reference = logits(load(folder()))
    assert difference(logits(by_the_config(made, plain)), reference) < 3e-3
    assert difference(logits(build(made, plain.checkpoint)), reference) > 1e-2  # transformers' latent eps stays


def as_f16(x):
    return x.half().double()


def as_q8_0(x):
    """GGUF's Q8_0: blocks of 32 along a row, each with a scale in float16."""
    if x.ndim == 1:
        return x
    blocks = x.reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / scale.clamp(min=1e-300)).round() * as_f16(scale)).view_as(x)


def rounded(model, rounding):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(rounding(parameter))
    return model


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """A plain model with weights of a usual size and latents of falling ones, as narrow formats are about sizes."""
    folder = make_plain(
        tmp_path_factory.mktemp("usual"),
        hidden_size=256,
        intermediate_size=256,
        head_dim=32,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        qk_rope_head_dim=16,
        rope_frequencies=[[*range(0, 16, 2)]] * 2,
    )
    falling = torch.cat([torch.logspace(0.5, -1, 64), torch.ones(16)])[:, None].double()
    multiply(folder, "proj.weight", 0.13)
    multiply(folder, "kv_a_proj_with_mqa.weight", falling)
    return folder


@pytest.mark.parametrize("rounding", [as_f16, as_q8_0])
def test_large_eps_form_survives_narrow_weights_and_the_other_does_not(usual, rounding):
    plain, sizes = opened(usual), [float(size.mean()) for size in measured(usual)]
    reference = logits(load(usual))
    usually = difference(logits(rounded(load(usual), rounding)), reference)
    large, small = (
        difference(
            logits(rounded(by_the_config(export(plain, readers=readers, latent_sizes=sizes), plain), rounding)),
            reference,
        )
        for readers in (["llama.cpp"], ["llama.cpp", "transformers"])
    )
    assert large < 1.5 * usually
    assert small > 10 * usually


# Every step, and what it would be if somebody left it out.
INTERLEAVE = folds.interleave
STEPS = {
    "interleave": (folds, "interleave", lambda x: x),
    "interleave of queries": (folds, "interleave", lambda x: x if x.ndim == 3 else INTERLEAVE(x)),
    "interleave of the key": (folds, "interleave", lambda x: x if x.ndim == 2 else INTERLEAVE(x)),
    "theta of the kept series": (stock_rope, "series_theta", lambda theta, step, turning, rope_dim: theta),
    "theta after padding": (stock_rope, "padded_theta", lambda theta, rope_dim, padded: theta),
    "softmax scale": (form, "logit_factor", lambda scale, sizes: 1.0),
    "inverse of the norm": (folds, "after_norm", lambda scale, eps: 1.0),
    "gain of the norm": (folds, "neutral_gain", lambda scale, eps: 1.0),
    "residual scale": (form, "residual_factor", lambda source_eps, eps: 1.0),
}


@pytest.mark.parametrize("step", STEPS)
def test_no_step_can_be_left_out(folder, tiny_engine, monkeypatch, step):
    module, name, nothing = STEPS[step]
    monkeypatch.setattr(module, name, nothing)
    monkeypatch.setattr(stock, "violations", lambda *args: [])  # which would notice, too
    plain = opened(folder("llama-high"))  # whose theta changes
    made = export(plain, pad=True, latent_sizes=SMALL)
    assert difference(logits(ideal(made, plain)), logits(load(folder("llama-high")))) > 1e-4


def test_no_latent_scale_leaves_the_norm_in_force(folder, monkeypatch):
    monkeypatch.setattr(stock, "neutral_scale", lambda size, norm: 1.0)
    plain = opened(folder())
    made = export(plain)
    assert difference(logits(build(made, plain.checkpoint)), logits(load(folder()))) > 1e-2


COMPUTED = sorted({fold.name for fold in stock_tensors.FOLDS if fold.make} - {"~self_attn.q_proj.weight"})


@pytest.mark.parametrize("name", COMPUTED)
def test_no_tensor_can_be_copied_instead(folder, monkeypatch, name):
    case = "phi3" if name.startswith("~mlp.") and "down" not in name else "qwen2"
    extra = {} if case == "phi3" else {"rms_norm_eps": 1e-5}

    def half(x):  # phi3's gate and up are halves of one tensor; the other half has the same shape
        return x.chunk(2)[0 if "up_proj" in name else 1]

    def wrong(fold):
        if fold.make is None or fold.name != name:
            return fold
        if case == "phi3":
            return stock_tensors.Fold(fold.name, fold.reads, lambda at, x: half(x))
        return stock_tensors.Fold(fold.name, fold.reads, lambda at, *x: 1.01 * fold.make(at, *x))

    plain = opened(folder(case, **extra))
    monkeypatch.setattr(stock_tensors, "FOLDS", tuple(map(wrong, stock_tensors.FOLDS)))
    made = export(plain, latent_sizes=SMALL)
    assert difference(logits(ideal(made, plain)), logits(load(folder(case, **extra)))) > 1e-6


def test_a_tied_head_is_written_and_not_scaled(folder):
    plain = opened(folder("llama-tied"))
    tensors = {out.name: compute(out, plain.checkpoint) for out in export(plain).outputs}
    assert "lm_head.weight" not in {out.name for out in plain.outputs}
    embedding = compute(next(out for out in plain.outputs if "embed" in out.name), plain.checkpoint)
    assert tensors["lm_head.weight"].equal(embedding)
    assert torch.allclose(tensors["model.embed_tokens.weight"], 0.1**0.5 * embedding, rtol=1e-14)


def test_a_head_that_reads_the_scaled_embedding_is_wrong(folder, monkeypatch):
    plain = opened(folder("llama-tied"))
    rows = [fold for fold in stock_tensors.FOLDS if fold.name != "lm_head.weight"]
    scaled = next(fold for fold in rows if "embed" in fold.name)
    rows.append(stock_tensors.Fold("lm_head.weight", scaled.reads, scaled.make))
    monkeypatch.setattr(stock_tensors, "FOLDS", tuple(rows))
    made = export(plain, latent_sizes=SMALL)
    assert difference(logits(ideal(made, plain)), logits(load(folder("llama-tied")))) > 0.1


def test_low_rank_queries_are_exact_at_their_full_rank(folder):
    plain = opened(folder())
    made = export(plain, q_rank=32, latent_sizes=SMALL)
    assert made.config["q_lora_rank"] == 32
    assert difference(logits(ideal(made, plain)), logits(load(folder()))) < 1e-10
    lossy = export(plain, q_rank=24, query_moment=lambda layer: torch.eye(32).double(), latent_sizes=SMALL)
    assert 1e-3 < difference(logits(ideal(lossy, plain)), logits(load(folder()))) < 2


def test_config_says_everything_and_readers_are_listed(folder):
    made = export(opened(folder()))
    config = made.config
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 4
    assert (config["first_k_dense_replace"], config["num_nextn_predict_layers"], config["n_routed_experts"]) == (
        2,
        0,
        2,
    )
    assert config["rms_norm_eps"] == 1e-6 and config["tie_word_embeddings"] is False and config["rope_interleave"]
    assert config["q_lora_rank"] is None and config["attention_bias"] is False
    assert made.readable_by == ("transformers", "sglang")
    assert config["kvfold"]["plain"]["model_type"] == "mla_llama"
    json.dumps(config)


def test_padded_to_the_engine_every_engine_reads_it(folder):
    mild = {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
    plain = opened(folder(**mild))
    made = export(plain, readers=["transformers", *STRICT], pad=True, latent_sizes=SMALL)
    assert made.readable_by == ("transformers", "vllm", "vllm-transformers", "sglang", "llama.cpp")
    assert made.config["q_lora_rank"] == 32  # llama.cpp's demand
    assert difference(logits(ideal(made, plain)), logits(load(folder(**mild)))) < 1e-12


def test_what_readers_warn_of_alike_is_said_once(folder):
    """Cached as vLLM holds it, but with heads that its kernels on a GPU do not."""
    sizes = {"head_dim": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_frequencies": [list(range(32))] * 2}
    made = export(opened(folder(**sizes)), readers=["transformers", "vllm", "vllm-transformers"], latent_sizes=SMALL)
    (warning,) = made.warnings
    assert warning.startswith("vllm, vllm-transformers: (qk_nope, qk_rope, v) is (6, 64, 7)")
    assert warning.endswith("for a GPU, export with --pad-to-engine")


def test_what_is_computed_on_the_way_is_not_rounded_in_between(folder):
    plain, fine = opened(folder()), 1 + 2.0**-30
    lazy = replace(
        plain, outputs=[replace(out, dtype="BF16", make=lambda stored: stored[0] * fine) for out in plain.outputs]
    )
    eager = {out.name: compute(out, plain.checkpoint) for out in export(plain, latent_sizes=SMALL).outputs}
    for out in export(lazy, dtype="float64", latent_sizes=SMALL).outputs:
        once = 1 if out.name.endswith("kv_a_layernorm.weight") else fine  # made of nothing
        torch.testing.assert_close(compute(out, plain.checkpoint), once * eager[out.name], rtol=1e-14, atol=0)


@pytest.mark.parametrize("reader", STRICT)
def test_biases_are_refused_for_strict_readers_by_name(folder, reader):
    mild = {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
    with pytest.raises(UserError, match=r"self_attn\.(q_a|kv_a|o)_proj.*bias.*readable by: transformers") as error:
        export(opened(folder("qwen2", **mild)), readers=[reader], pad=True, large_eps=False)
    assert "\n" not in str(error.value)


def test_zero_biases_count_as_none(tmp_path):
    make_plain(tmp_path, "qwen2")
    multiply(tmp_path, ".bias", 0.0)
    made = export(opened(tmp_path), readers=["sglang"])
    assert not [out.name for out in made.outputs if out.name.endswith(".bias")]


# What is in the way -> case, config beside it, arguments, and what the refusal says.
REFUSED = {
    "mlp bias": ("llama", {"mlp_bias": True}, {}, r"no place for .*mlp\.(gate|up|down)_proj\.bias.*and 3 more"),
    "layer norms": ("stablelm", {}, {}, "stablelm has layer norms"),
    "sliding window": ("mistral", {"sliding_window": 64}, {}, "sliding_window is 64"),
    "another series": ("llama", {"rope_frequencies": [[1, 2], [1, 2]]}, {}, "1, 2 are not every n-th from 0"),
    "other layers": ("llama", {"rope_frequencies": [[0, 2], [0, 1]]}, {}, "layer 1 keeps other rotary frequencies"),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {},
        "longer texts",
    ),
    "yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {},
        "rope type yarn scales logits",
    ),
    "yarn's frequencies": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.0}},
        {},
        "rope type yarn changes",
    ),
    "llama3": ("llama3", {}, {"readers": ["vllm"], "pad": True}, "llama3 becomes a YaRN class"),
    "activation": ("llama", {"hidden_act": "gelu"}, {"readers": ["sglang"]}, "hidden_act is gelu.*transformers"),
    "shape": ("llama", {}, {"readers": ["vllm"]}, "12 \\+ 4 = 16.*--pad-to-engine; readable by: transformers, sglang"),
    "float16": ("llama", {}, {"dtype": "float16"}, "float16"),
    "large eps": ("llama", {}, {"large_eps": True}, "transformers has the latent's eps in its code"),
    "reader": ("llama", {}, {"readers": ["vlm"]}, "did you mean vllm"),
    "query rank": ("llama", {}, {"q_rank": 33}, "1 to 32"),
    "sizes": ("llama", {}, {"latent_sizes": [1.0]}, "1 latent sizes for 2 layers"),
    "far padding": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"pad": True},
        "rope_theta 1e\\+96, too large",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_held_is_refused_by_name(folder, tiny_engine, monkeypatch, what):
    case, extra, arguments, said = REFUSED[what]
    if what == "far padding":
        monkeypatch.undo()
    with pytest.raises(UserError, match=said) as error:
        export(opened(folder(case, **extra)), **arguments)
    assert "\n" not in str(error.value)


def test_llama3_scaling_that_leaves_the_kept_frequencies_alone_is_left_out(folder):
    mild = {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 4096}, "rope_frequencies": [[0, 1]] * 2}
    plain = opened(folder(**mild))
    made = export(plain, readers=["sglang"], latent_sizes=SMALL)
    assert made.config["rope_parameters"]["rope_type"] == "default"
    assert difference(logits(ideal(made, plain)), logits(load(folder(**mild)))) < 1e-6  # scaled in fp32 there


def test_rotary_rows_of_a_layer_without_positions_must_be_zero(tmp_path):
    make_plain(tmp_path, "smollm3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_a_proj_with_mqa.weight[-1, 0] = 1
    model.save_pretrained(tmp_path)
    plain = opened(tmp_path)
    with pytest.raises(UserError, match="layer 1 has no positions"):
        build(export(plain), plain.checkpoint)


def write(src, out, **arguments):
    """Export the plain directory `src` to the directory `out`."""
    with open_source(str(src)) as source:
        made = export(stock.plain_model(source), **arguments)
        write_directory(
            source,
            out,
            lay_out(source, made.outputs, None),
            config=made.config,
            recipe={},
            dropped=(),
            overwrite=False,
            hashing=False,
            progress=None,
        )
    return made


FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]), trust_remote_code=False)
ids = torch.randint(0, 97, (1, 201), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    out = model(ids, use_cache=True)
cached = sum(x.numel() for layer in out.past_key_values.layers for x in (layer.keys, layer.values)) / 201 / 2
text = model.generate(ids[:, :9], max_new_tokens=5, min_new_tokens=5, do_sample=False)
torch.save(out.logits, sys.argv[3])
loaded = [name for name in sys.modules if name.startswith("kvfold")]
print(json.dumps([type(model).__name__, cached, text.shape[1], loaded]))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["llama-tied", "qwen2"])
def test_stock_transformers_loads_it_without_kvfold(tmp_path, case, dtype):
    kind = getattr(torch, dtype)
    make_plain(tmp_path / "plain", case, dtype=kind)
    write(tmp_path / "plain", tmp_path / "out")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"} | {"PYTHONPATH": ""}
    arguments = [str(tmp_path / "out"), dtype, str(tmp_path / "logits.pt")]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["DeepseekV3ForCausalLM", 12 + 4, 14, []]
    ours = torch.load(tmp_path / "logits.pt")
    assert ours.dtype == kind
    exact = logits(load(tmp_path / "plain"))
    plain = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=kind).eval())
    if dtype == "float32":
        assert difference(ours, plain) < 1e-4
    else:  # as far from the exact logits as the plain form itself is
        assert difference(ours, exact) < 1.5 * difference(plain, exact)
