from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from kvfold.common.errors import CheckFailed, UserError
from kvfold.common.text import text_hash
from kvfold.eval.ppl import perplexity, score_tokens

from .conftest import BOS_ID, CONTEXT, VOCABULARY, make_model, make_tokenizer


def nll(model, ids: list[int], scored: int) -> float:
    """Summed loss of the last `scored` tokens, by the class's own forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    probabilities = logits.log_softmax(-1)
    return -sum(probabilities[t - 1, ids[t]].item() for t in range(len(ids) - scored, len(ids)))


def token_ids(path: str) -> list[int]:
    with_bos = make_tokenizer()(Path(path).read_text(encoding="utf-8"))["input_ids"]
    assert with_bos[0] == BOS_ID
    return with_bos[1:]


def test_equals_a_plain_loop_over_windows(llama, save, text_file):
    ids = token_ids(text_file)
    total = tokens = windows = 0
    for start in range(0, len(ids), 32):
        window = ids[start : start + 32]
        total += nll(llama, window, len(window) - 1)
        tokens += len(window) - 1
        windows += 1
    assert len(ids) % 32 > 1  # the last window is short, and scored
    report = perplexity(save(llama), text=[text_file], window=32)
    assert report.loss == pytest.approx(total / tokens, rel=1e-6)
    assert report.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert (report.tokens, report.windows) == (tokens, windows)


def test_a_stride_scores_each_token_after_the_context_it_promises(llama, save, text_file):
    window, stride = 12, 5
    ids = token_ids(text_file)
    total = 0.0
    for token in range(1, len(ids)):
        # The first window that reaches the token: it starts at the smallest multiple of the stride to do so.
        start = max(0, math.ceil((token - window + 1) / stride)) * stride
        total += nll(llama, ids[start : token + 1], 1)
    report = perplexity(save(llama), text=[text_file], window=window, stride=stride)
    assert report.tokens == len(ids) - 1
    assert report.loss == pytest.approx(total / (len(ids) - 1), rel=1e-6)


def test_bos_leads_every_window_and_counts_in_it(llama, save, text_file):
    ids = token_ids(text_file)
    total = sum(nll(llama, [BOS_ID, *ids[i : i + 31]], len(ids[i : i + 31])) for i in range(0, len(ids), 31))
    report = perplexity(save(llama), text=[text_file], window=32, bos=True)
    assert report.tokens == len(ids)
    assert (report.protocol.window, report.protocol.stride) == (32, 31)
    assert report.loss == pytest.approx(total / len(ids), rel=1e-6)


def test_bos_changes_the_protocol_only_where_it_says(llama, save, text_file):
    path = save(llama)
    without, with_bos = (
        asdict(perplexity(path, text=[text_file], window=32, stride=20, bos=bos).protocol) for bos in (False, True)
    )
    assert {key for key in without if without[key] != with_bos[key]} == {"bos", "scored"}
    assert without["bos"] == "none"
    assert without["scored"] == "every token but the first of the text, once"
    assert with_bos["scored"] == "every token, once"
    assert f"<s> (id {BOS_ID})" in with_bos["bos"]


@pytest.mark.parametrize("options", [{}, {"stride": 9}, {"bos": True}, {"max_windows": 5}])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_batch_size_changes_nothing(model_type, options, save, text_file):
    path = save(make_model(model_type))
    reports = [perplexity(path, text=[text_file], window=16, batch_size=b, **options) for b in (1, 2, 7)]
    assert reports[0].windows > 1
    for report in reports[1:]:
        assert report.loss == pytest.approx(reports[0].loss, rel=1e-6)
        assert (report.tokens, report.protocol) == (reports[0].tokens, reports[0].protocol)


@pytest.mark.parametrize(
    "options", [{"window": 2}, {"window": 7}, {"window": 64}, {"window": 9, "stride": 2}, {"bos": True}]
)
def test_a_uniform_model_loses_ln_of_the_vocabulary(options, llama, save, text_file):
    torch.nn.init.zeros_(llama.lm_head.weight)
    report = perplexity(save(llama), text=[text_file], batch_size=16, **options)
    assert report.loss == pytest.approx(math.log(VOCABULARY), rel=1e-6)
    assert report.perplexity == pytest.approx(VOCABULARY, rel=1e-6)


def test_the_report_names_what_was_measured(llama, save, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Another document.", encoding="utf-8")
    path = save(llama)
    report = perplexity(path, text=[text_file, str(other)], max_windows=2, dtype="float64")
    protocol = report.protocol
    joined = Path(text_file).read_text(encoding="utf-8") + "\n\nAnother document."
    assert report.model == path
    assert protocol.text_hash == text_hash(joined)
    assert protocol.texts == (text_file, str(other))
    assert protocol.tokens_in_text == len(joined.encode())
    assert (protocol.window, protocol.stride, protocol.max_windows) == (CONTEXT, CONTEXT, 2)
    assert (protocol.dtype, protocol.device) == ("float64", "cpu")
    assert protocol.scored == "every token but the first of each window, once"
    assert (report.windows, report.tokens) == (2, 2 * (CONTEXT - 1))
    assert json.loads(json.dumps(asdict(report)))["protocol"]["window"] == CONTEXT


def test_the_stored_dtype_is_not_what_a_cpu_computes_in(llama, save, text_file):
    path = save(llama.bfloat16())
    assert perplexity(path, text=[text_file]).protocol.dtype == "float32"
    assert perplexity(path, text=[text_file], dtype="bfloat16").protocol.dtype == "bfloat16"


def test_progress_ends_at_the_total(llama, save, text_file):
    seen = []
    perplexity(save(llama), text=[text_file], window=32, batch_size=2, progress=lambda *at: seen.append(at))
    assert seen == [(2, 7), (4, 7), (6, 7), (7, 7)]


def test_score_tokens_leaves_the_model_as_it_was(llama):
    ids = list(range(100))
    llama.train()
    score = score_tokens(llama, ids, window=32)
    assert llama.training
    assert all(p.requires_grad for p in llama.parameters())
    assert score == score_tokens(llama.eval(), ids, window=32)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_window_beyond_the_context_is_refused(model_type, save, text_file):
    path = save(make_model(model_type))
    with pytest.raises(UserError, match="window 65 is longer than the model's context 64"):
        perplexity(path, text=[text_file], window=65)


def test_bos_needs_a_token(llama, save, text_file):
    with pytest.raises(UserError, match="no BOS token"):
        perplexity(save(llama, bos=False), text=[text_file], bos=True)


def test_a_tokenizer_is_needed(llama, save, text_file):
    with pytest.raises(UserError, match="no tokenizer"):
        perplexity(save(llama, tokenizer=False), text=[text_file])


def test_a_foreign_tokenizer_is_refused(save, text_file):
    small = make_model("llama", vocab_size=100, bos_token_id=1, eos_token_id=2)
    with pytest.raises(UserError, match="beyond the model's vocabulary of 100"):
        perplexity(save(small), text=[text_file])


def test_a_text_of_one_token_is_refused(llama, save, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="1 token;"):
        perplexity(save(llama), text=[str(path)])


def test_a_loss_that_is_not_a_number_is_an_error(llama, text_file):
    with torch.no_grad():
        llama.lm_head.weight[7, 3] = math.nan
    with pytest.raises(CheckFailed, match=r"loss of tokens 1:32 is nan"):
        score_tokens(llama, token_ids(text_file), window=32)


def test_a_loss_without_a_finite_perplexity_is_an_error(llama, text_file):
    with torch.no_grad():
        llama.lm_head.weight.mul_(1e4)
    with pytest.raises(CheckFailed, match=r"nats per token has no finite perplexity"):
        score_tokens(llama, token_ids(text_file), window=32)


def test_importing_needs_no_torch():
    code = (
        "import sys, kvfold.eval.ppl, kvfold.eval.cache, kvfold.common.kvcache\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
