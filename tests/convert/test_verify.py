"""How far a result is from its source: the figures, the layer where it begins, and the gate."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvfold.common.errors import UserError
from kvfold.common.windows import split_windows
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.mla.convert import convert_mla
from kvfold.convert.verify import decoder_layers, distance, verify
from kvfold.eval.ppl import perplexity

from .tiny import CASES, HEADS, make_config, make_gpt2, make_model

VOCABULARY = 97
WINDOW = 24
LAYERS = 3


def make_llama(**settings):
    config = make_config("llama", kv_heads=2)
    for name, value in {"num_hidden_layers": LAYERS, **settings}.items():
        setattr(config, name, value)
    return make_model(config)


def make_tokenizer(shift: int = 0) -> PreTrainedTokenizerFast:
    """One token a word: w0 to w96, numbered from `shift` on, around the end."""
    words = {f"w{i}": (i + shift) % VOCABULARY for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write_text(path, model) -> str:
    """Text that the model finds likely: windows drawn from it, and a short one."""
    ids = torch.arange(6)[:, None] + 5
    torch.manual_seed(0)
    with torch.no_grad():
        while ids.shape[1] < WINDOW:
            ids = torch.cat([ids, model(ids).logits[:, -1].softmax(-1).multinomial(1)], 1)
    path.write_text(" ".join(f"w{i}" for i in ids.flatten().tolist()[:-7]))
    return str(path)


@pytest.fixture(scope="module")
def source():
    return make_llama()


@pytest.fixture(scope="module")
def shared(tmp_path_factory, source):
    """The source's checkpoint and a text, as `(src, text)`."""
    folder = tmp_path_factory.mktemp("source")
    source.save_pretrained(folder / "src")
    make_tokenizer().save_pretrained(folder / "src")
    return folder / "src", write_text(folder / "text.txt", source)


@pytest.fixture
def check(shared, tmp_path):
    """Save a result and verify it in fp64."""
    src, text = shared

    def run(result, **options):
        result.save_pretrained(tmp_path / "out")
        return verify(src, tmp_path / "out", text=[text], **{"window": WINDOW, "dtype": "float64", **options})

    return run


def nudged(source):
    """A result that is a little off in every parameter."""
    result = copy.deepcopy(source)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return result


def shouting(source):
    """A result whose head is confidently wrong."""
    result = copy.deepcopy(source)
    with torch.no_grad():
        result.lm_head.weight.mul_(-3)
    return result


def test_a_source_equals_itself(shared):
    src, text = shared
    report = verify(src, src, text=[text], window=WINDOW, dtype="float64")
    assert (report.kl, report.top1_agreement, report.perplexity_ratio) == (pytest.approx(0, abs=1e-12), 1, 1)
    assert report.layer_errors == [0] * LAYERS
    assert (report.first_bad_layer, report.passed, report.reason) == (None, True, "")
    assert report.max_loss == math.log(VOCABULARY)
    assert report.loss == report.source_loss < report.max_loss


def test_figures_equal_a_plain_loop(source, check, shared):
    result = nudged(source)
    ids = torch.tensor(make_tokenizer()(Path(shared[1]).read_text())["input_ids"])
    kl, agreed, losses, source_losses = [], [], [], []
    errors = [[] for _ in range(LAYERS)]
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        with torch.no_grad():
            before, after = (model(window[None], output_hidden_states=True) for model in (source, result))
        p, q = before.logits[0].softmax(-1), after.logits[0].softmax(-1)
        for t in range(len(window) - 1):
            kl.append((p[t] * (p[t] / q[t]).log()).sum().item())
            agreed.append(p[t].argmax().item() == q[t].argmax().item())
            losses.append(-q[t, window[t + 1]].log().item())
            source_losses.append(-p[t, window[t + 1]].log().item())
        for layer in range(LAYERS - 1):  # the last of these is taken after the final norm
            h, g = (output.hidden_states[layer + 1][0] for output in (before, after))
            errors[layer] += [((g[t] - h[t]).norm() / h[t].norm()).item() for t in range(len(window))]
    report = check(result)
    mean = {name: math.fsum(v) / len(v) for name, v in
            {"kl": kl, "top1_agreement": agreed, "loss": losses, "source_loss": source_losses}.items()}  # fmt: skip
    assert {name: getattr(report, name) for name in mean} == pytest.approx(mean, rel=1e-9)
    assert 0 < report.top1_agreement < 1
    assert report.perplexity_ratio == pytest.approx(math.exp(mean["loss"] - mean["source_loss"]))
    for layer in range(LAYERS - 1):
        assert report.layer_errors[layer] == pytest.approx(math.fsum(errors[layer]) / len(ids), rel=1e-9)
    assert report.layer_errors[1] < report.layer_errors[2] < report.threshold
    assert (report.tokens, report.windows, len(losses)) == (len(losses), 6, len(ids) - 6)


def test_perplexity_is_that_of_eval(source, check, shared):
    report = check(nudged(source))
    judged = perplexity(shared[0], text=[shared[1]], window=WINDOW, dtype="float64")
    assert report.source_perplexity == pytest.approx(judged.perplexity, rel=1e-12)
    assert report.protocol == judged.protocol
    assert (report.tokens, report.windows) == (judged.tokens, judged.windows)


@pytest.mark.parametrize(("dtype", "rel"), [("float64", 1e-9), ("float32", 1e-4)])
def test_batch_size_changes_nothing(source, check, dtype, rel):
    one, *others = (asdict(check(nudged(source), batch_size=size, dtype=dtype)) for size in (1, 2, 7))
    for other in others:
        for name, figure in one.items():
            same = pytest.approx(figure, rel=rel) if isinstance(figure, float | list) else figure
            assert other[name] == same, name


def test_the_layer_that_was_broken_is_named(source, check):
    result = copy.deepcopy(source)
    with torch.no_grad():
        weight = result.model.layers[1].self_attn.o_proj.weight
        weight.copy_(weight.flip(0))
    report = check(result)
    assert report.layer_errors[0] == 0
    assert report.first_bad_layer == 1
    assert check(result, threshold=1e3).first_bad_layer is None


def test_a_result_worse_than_guessing_fails(source, check):
    report = check(shouting(source))
    assert not report.passed
    assert report.loss > report.max_loss
    assert report.first_bad_layer is None
    for number in (f"{report.loss:.4g}", f"ln(vocabulary) = {report.max_loss:.4g}", "the largest is 0, layer 0"):
        assert number in report.reason


@pytest.mark.parametrize("margin", [0.99, 1.01])
def test_a_ratio_above_the_allowed_fails(source, check, margin):
    result = nudged(source)
    ratio = check(result).perplexity_ratio
    report = check(result, max_ratio=ratio * margin)
    assert report.passed == (margin > 1)
    assert (f"{ratio:.4g} times the source's, above the {ratio * margin:g} allowed" in report.reason) == (margin < 1)


@pytest.mark.parametrize(("module", "bad"), [("model.layers.1.mlp.up_proj", 1), ("lm_head", None)])
def test_what_is_not_finite_fails_and_stays_json(source, check, module, bad):
    result = copy.deepcopy(source)
    with torch.no_grad():
        result.get_submodule(module).weight[3] = math.nan
    report = check(result)
    assert not report.passed
    assert report.reason.startswith("the loss is nan; look for non-finite weights")
    assert (report.loss, report.kl, report.perplexity, report.perplexity_ratio) == (None,) * 4
    assert report.source_loss < report.max_loss
    assert report.first_bad_layer == bad
    assert report.layer_errors == ([0, None, None] if bad else [0, 0, 0])
    json.dumps(asdict(report), allow_nan=False)


def test_a_loss_beyond_all_perplexities_stays_json(source, check):
    result = shouting(source)
    with torch.no_grad():
        result.lm_head.weight.mul_(1e4)
    report = check(result, max_ratio=2)
    assert (report.perplexity, report.perplexity_ratio, report.passed) == (None, None, False)
    assert report.loss > 710
    json.dumps(asdict(report), allow_nan=False)


def test_an_exact_conversion_is_no_distance(tmp_path, shared):
    """gpt2 whose KV heads are all alike, as multi-query gpt_bigcode: other class, other names, same function."""
    model = make_model(make_gpt2(n_layer=LAYERS))
    with torch.no_grad():
        for layer in model.transformer.h:
            for parameter in layer.attn.c_attn.parameters():  # [..., q | k | v]
                for part in parameter.chunk(3, -1)[1:]:
                    heads = part.unflatten(-1, (HEADS, -1))
                    heads.copy_(heads[..., :1, :].clone().expand_as(heads))
    src, out = tmp_path / "src", tmp_path / "out"
    model.save_pretrained(src)
    make_tokenizer().save_pretrained(src)
    text = write_text(tmp_path / "text.txt", model)
    convert_gqa(src, out, kv_heads=1, method="mean")
    report = verify(src, out, text=[text], window=WINDOW, dtype="float64")
    assert report.kl == pytest.approx(0, abs=1e-12)
    assert report.top1_agreement == 1
    assert report.layer_errors == pytest.approx([0] * LAYERS, abs=1e-12)
    assert report.passed


@pytest.fixture
def latent(tmp_path):
    """A source with a single KV head, which MLA of full rank holds exactly; a text; and how to convert it."""
    model = make_llama(num_key_value_heads=1, rms_norm_eps=1e-5)
    src = tmp_path / "src"
    model.save_pretrained(src)
    make_tokenizer().save_pretrained(src)
    sizes = {"kv_rank": 16, "rope_dim": 16, "rope_select": "high", "calib": ["none"]}

    def convert(form, **options):
        convert_mla(src, tmp_path / form, form=form, **sizes, **options)
        return tmp_path / form

    return src, write_text(tmp_path / "text.txt", model), convert


# The stock form's norms are computed in fp32.
@pytest.mark.parametrize(("form", "off"), [("plain", 1e-9), ("deepseek_v3", 1e-5)])
def test_latent_attention_is_compared_layer_by_layer(form, off, latent):
    src, text, convert = latent
    report = verify(src, out := convert(form), text=[text], window=WINDOW, dtype="float64")
    assert max(report.layer_errors) < off
    assert report.kl == pytest.approx(0, abs=off**2)
    assert (report.top1_agreement, report.passed, report.first_bad_layer) == (1, True, None)
    weights = load_file(out / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file({**weights, name: weights[name].flip(0).contiguous()}, out / "model.safetensors", {"format": "pt"})
    report = verify(src, out, text=[text], window=WINDOW, dtype="float64")
    assert (report.first_bad_layer, report.layer_errors[0] < off) == (1, True)


def test_the_residual_scale_of_an_export_is_taken_out_on_either_side(latent):
    src, text, convert = latent
    stock, plain = convert("deepseek_v3"), convert("plain")
    scale = json.loads((stock / "config.json").read_text())["kvfold"]["residual_scale"]
    assert scale == pytest.approx(0.1**0.5)
    report = verify(stock, plain, text=[text], window=WINDOW, dtype="float64")
    assert max(report.layer_errors) < 1e-5
    with torch.no_grad():
        models = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (stock, src))
        ours, theirs = (model(torch.arange(20)[None], output_hidden_states=True).hidden_states[1] for model in models)
    torch.testing.assert_close(ours, scale * theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0, -1, "1", None, math.inf])
def test_a_residual_scale_that_cannot_be_is_refused(scale, latent):
    src, text, convert = latent
    path = convert("deepseek_v3") / "config.json"
    config = json.loads(path.read_text())
    config["kvfold"]["residual_scale"] = scale
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"residual(_scale is| stream was)"):
        verify(src, path.parent, text=[text], window=WINDOW)


def test_an_export_that_transformers_does_not_read_is_refused(latent):
    src, text, convert = latent
    out = convert("deepseek_v3", readers=["llama.cpp"])
    with pytest.raises(UserError, match=r"transformers would not read .*; judge an export for transformers, or"):
        verify(src, out, text=[text], window=WINDOW)
    with pytest.raises(UserError, match="judge an export for transformers"):
        perplexity(out, text=[text], window=WINDOW)


@pytest.mark.parametrize("case", [*CASES, "gpt2"])
def test_layers_are_found_in_every_family(case):
    config = make_gpt2() if case == "gpt2" else make_config(case)
    if case == "stablelm-qk-norm":
        config.num_hidden_layers = HEADS  # a norm a head then makes lists that are as long as that of the layers
    layers = decoder_layers(make_model(config))
    assert len(layers) == config.num_hidden_layers
    assert any("attn" in name for name, _ in layers[0].named_children())


def test_window_is_the_smaller_context_by_default(source, check):
    result = copy.deepcopy(source)
    result.config.max_position_embeddings = 20
    report = check(result, window=None, max_windows=3)
    assert (report.protocol.window, report.windows, report.tokens) == (20, 3, 3 * 19)
    with pytest.raises(UserError, match="window 21 is longer than the model's context 20"):
        check(result, window=21)
    assert check(source, window=None).protocol.window == 512


def test_the_models_are_left_as_they_were():
    source = make_model(make_gpt2()).train()  # it has dropout
    result = nudged(source).eval()
    hooks = [len(module._forward_hooks) for model in (source, result) for module in model.modules()]
    first, again = (distance(source, result, range(90), split_windows(90, 30)) for _ in range(2))
    assert first == again
    assert (source.training, result.training) == (True, False)
    assert [len(module._forward_hooks) for model in (source, result) for module in model.modules()] == hooks


def test_progress_ends_at_the_total(source, check):
    seen = []
    check(source, batch_size=2, progress=lambda *at: seen.append(at))
    assert seen == [(2, 6), (4, 6), (5, 6), (6, 6)]


def test_only_the_tokens_of_a_tokenizer_matter(source, check, tmp_path):
    make_tokenizer().save_pretrained(tmp_path / "out")
    assert check(source).kl == 0
    make_tokenizer(shift=1).save_pretrained(tmp_path / "out")
    with pytest.raises(UserError, match=r"out reads another token 0 in the text than that of .*src; copy"):
        check(source)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 2}, "number of decoder layers of 2, .*src of 3"),
        ({"hidden_size": 32}, "hidden size of 32, .*src of 64"),
        ({"vocab_size": 128}, "vocabulary of 128, .*src of 97"),
    ],
)
def test_models_that_are_not_alike_are_refused(settings, message, check):
    with pytest.raises(UserError, match=message):
        check(make_llama(**settings))


@pytest.mark.parametrize(
    "options", [{"threshold": -1}, {"threshold": math.nan}, {"max_ratio": 0}, {"max_ratio": math.inf}, {"window": 1}]
)
def test_numbers_that_bound_nothing_are_refused(options, check, source):
    with pytest.raises(UserError, match=r"bounds nothing|scores nothing"):
        check(source, **options)


def kvfold(*args):
    """Run the console script; returns status, standard output, and standard error without progress."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as a user's
    command = [sys.executable, "-m", "kvfold.cli", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=buffered)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("comparing: ")]  # of a slow machine
    return done.returncode, done.stdout, lines


def test_command_fails_with_the_report_and_one_line(source, shared, tmp_path):
    src, text = shared
    shouting(source).save_pretrained(tmp_path)
    status, output, (error,) = kvfold("verify", src, tmp_path, "--text", text, "--window", WINDOW, "--json")
    assert (status, output.count("\n")) == (1, 1)
    report = json.loads(output)
    assert error == f"kvfold: {report['reason']}"
    assert (report["passed"], report["windows"], report["protocol"]["dtype"]) == (False, 6, "float32")


def test_command_shows_people_the_layers(source, shared, tmp_path):
    src, text = shared
    nudged(source).save_pretrained(tmp_path)
    status, output, errors = kvfold("verify", src, tmp_path, "--text", text, "--window", WINDOW)
    assert (status, errors) == (0, [])
    assert "top1_agreement" in output
    *_, title, head, row = output.splitlines()
    assert title == "relative error of the hidden states after each layer"
    assert (head.split(), len(row.split())) == (["layer", "+0", "+1", "+2"], 1 + LAYERS)


def test_command_refuses_in_one_line(shared):
    status, output, (error,) = kvfold("verify", shared[0], shared[0], "--text", shared[1], "--threshold", "-1")
    assert (status, output) == (2, "")
    assert error.startswith("kvfold: a threshold of -1")
