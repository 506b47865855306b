from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel

from kvfold.common import scoring
from kvfold.common.errors import CheckFailed, UserError
from kvfold.common.windows import split_windows

from .tiny import COMMON, FAMILIES, VOCABULARY, make_model


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ids():
    return torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))


def plain_nll(model, ids):
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(3, 19)


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_equals_the_plain_loss(model_type, chunk, ids):
    model = make_model(model_type)
    with torch.no_grad():
        nll = scoring.sequence_nll(model, ids, chunk=chunk)
    torch.testing.assert_close(nll, plain_nll(model, ids), rtol=1e-5, atol=1e-5)


def test_the_class_says_what_its_head_does(ids):
    """The test above could fail: a bare `lm_head` is not the head of these classes."""
    for model_type in ("gemma2", "cohere", "granite"):
        model = make_model(model_type)
        with torch.no_grad():
            hidden = scoring.hidden_states(model, ids)
            bare, whole = model.lm_head(hidden), scoring.head_logits(model, hidden)
        assert (bare - whole).abs().max() > 0.1


def test_chunks_cover_every_position_once_and_in_order(ids):
    model = make_model("llama")
    with torch.no_grad():
        hidden = scoring.hidden_states(model, ids)
        chunks = list(scoring.logit_chunks(model, hidden, chunk=6))
    assert [part for part, _ in chunks] == [slice(0, 6), slice(6, 12), slice(12, 18), slice(18, 20)]
    with torch.no_grad():
        whole = model(input_ids=ids).logits
    torch.testing.assert_close(torch.cat([logits for _, logits in chunks], 1), whole)


def test_the_head_never_sees_more_than_a_chunk(ids, monkeypatch):
    model = make_model("llama")
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", 3 * VOCABULARY * 4)
    with torch.no_grad():
        scoring.sequence_nll(model, ids)
    assert seen == [(3, 4, VOCABULARY)] * 4 + [(3, 3, VOCABULARY)]


def test_only_asked_tokens_are_scored(ids):
    model = make_model("llama")
    with torch.no_grad():
        nll = scoring.sequence_nll(model, ids, first=15)
    torch.testing.assert_close(nll, plain_nll(model, ids)[:, 14:], rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_plain_loss(ids):
    model = make_model("gemma2")
    scoring.sequence_nll(model, ids, chunk=5).sum().backward()
    chunked = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(input_ids=ids).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(chunked[name], parameter.grad, rtol=1e-3, atol=1e-4)


def test_the_model_is_left_untouched(ids):
    model = make_model("gpt2")
    base, modules = model.base_model, dict(model.named_modules())
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for _ in scoring.logit_chunks(model, scoring.hidden_states(model, ids), chunk=9):
            assert model.base_model is base
            assert torch.equal(model(input_ids=ids).logits, before)
    assert dict(model.named_modules()) == modules


def test_a_replaced_forward_does_not_run_the_whole_model(ids):
    """accelerate puts its hooks there, bound to the model and not to its shell."""
    model = make_model("llama")
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        hidden = scoring.hidden_states(model, ids)
        model.forward = model.forward
        torch.testing.assert_close(scoring.head_logits(model, hidden), expected)


def test_precision():
    logits = torch.randn(2, 3, 50, dtype=torch.float64) * 20
    targets = torch.randint(50, (2, 3))
    exact = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(scoring.token_nll(logits, targets), exact, rtol=1e-12, atol=1e-12)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        nll = scoring.token_nll(logits.to(dtype), targets)
        assert nll.dtype == torch.float32
        torch.testing.assert_close(nll, scoring.token_nll(logits.to(dtype).double(), targets).float())


def test_a_model_without_a_head_is_refused(ids):
    headless = AutoModel.from_config(AutoConfig.for_model("llama", **COMMON))
    with pytest.raises(UserError, match="LlamaModel has no head"):
        scoring.hidden_states(headless, ids)


def test_evaluating_turns_dropout_off_and_puts_the_mode_back(ids):
    model = make_model("gpt2").train()
    with scoring.evaluating(model):
        assert not model.training
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        assert not model(input_ids=ids).logits.requires_grad
    assert model.training
    with pytest.raises(ZeroDivisionError), scoring.evaluating(model):
        raise ZeroDivisionError
    assert model.training


@pytest.mark.parametrize("bos_id", [None, 1])
def test_window_sums(bos_id, ids):
    model, text = make_model("llama"), ids.flatten().tolist()
    windows = split_windows(len(text), 9, stride=4, bos=bos_id is not None)
    sums = scoring.window_nll(model, text, windows, lead_id=bos_id, batch_size=3)
    assert len(sums) == len(windows)
    for window, total in zip(windows, sums, strict=True):
        row = ([] if bos_id is None else [bos_id]) + text[window.start : window.stop]
        with torch.no_grad():
            nll = scoring.sequence_nll(model, torch.tensor([row]), first=len(row) - window.scored)
        assert total == pytest.approx(nll.double().sum().item(), rel=1e-6)


def test_window_refusals(ids):
    model, text = make_model("llama"), ids.flatten().tolist()
    windows = split_windows(len(text), 20)
    with pytest.raises(UserError, match=f"token id {VOCABULARY} lies beyond"):
        scoring.window_nll(model, [*text[:-1], VOCABULARY], windows)
    with pytest.raises(UserError, match="token id 500 lies beyond"):
        scoring.window_nll(model, text, windows, lead_id=500)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.inf)
    with pytest.raises(CheckFailed, match="loss of tokens 1:20 is nan"):
        scoring.window_nll(model, text, windows)


def make_pair(model_type: str):
    """Two fp64 models of one family that differ a little everywhere."""
    source = make_model(model_type).double()
    result = copy.deepcopy(source)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return source, result


def plain_comparison(source, result, ids):
    """The fields of a comparison from the logits of the whole batch, by their definitions."""
    before, after = (model(input_ids=ids).logits[:, :-1] for model in (source, result))
    p, q = before.softmax(-1), after.softmax(-1)
    targets = ids[:, 1:, None]
    kl = (p * (p / q).log()).sum(-1)
    agrees = before.max(-1).indices == after.max(-1).indices
    return kl, agrees, -q.gather(-1, targets)[..., 0].log(), -p.gather(-1, targets)[..., 0].log()


def compare(source, result, ids, chunk=None):
    hidden = [scoring.hidden_states(model, ids)[:, :-1] for model in (source, result)]
    return scoring.compare_hidden(source, hidden[0], result, hidden[1], ids[:, 1:], chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "gpt2"])
def test_comparison_equals_that_of_full_logits(model_type, chunk, ids):
    source, result = make_pair(model_type)
    with torch.no_grad():
        expected, compared = plain_comparison(source, result, ids), compare(source, result, ids, chunk)
    assert 0 < expected[1].double().mean() < 1
    for field, value in zip(compared, expected, strict=True):
        torch.testing.assert_close(field, value, rtol=1e-9, atol=1e-12)


def test_divergence_by_hand():
    """Forward: the source's probabilities weigh, so a token that the result forgot is what costs."""
    source, result = (torch.tensor(p, dtype=torch.float64).log()[None] for p in ([0.5, 0.5], [0.9, 0.1]))
    compared = scoring.compare_logits(source, result, torch.tensor([1]))
    assert compared.kl.item() == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert compared.nll.item() == pytest.approx(-math.log(0.1))
    assert compared.source_nll.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_comparison_precision(dtype):
    source, result = torch.randn(2, 2, 3, 50).mul(10).to(dtype)
    targets = torch.randint(50, (2, 3))
    compared = scoring.compare_logits(source, result, targets)
    exact = scoring.compare_logits(source.double(), result.double(), targets)
    assert compared.kl.dtype == compared.nll.dtype == torch.float32
    for field, value in zip(compared, exact, strict=True):
        torch.testing.assert_close(field, value.to(field.dtype), rtol=1e-5, atol=1e-5)


def test_both_heads_together_keep_to_the_chunk(ids, monkeypatch):
    source, result = make_pair("llama")
    seen = []
    for model in (source, result):
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", 2 * 3 * VOCABULARY * 10)
    with torch.no_grad():
        compare(source, result, ids)
    assert seen == [(3, 10, VOCABULARY)] * 2 + [(3, 9, VOCABULARY)] * 2


def test_distillation_can_go_backward_chunk_by_chunk(ids):
    source, result = make_pair("gemma2")
    source.requires_grad_(False)
    plain_comparison(source, result, ids)[0].sum().backward()
    expected = {name: p.grad.clone() for name, p in result.named_parameters()}
    result.zero_grad()
    hidden = scoring.hidden_states(result, ids)[:, :-1]
    leaf = hidden.detach().requires_grad_()
    source_hidden = scoring.hidden_states(source, ids)[:, :-1]
    for _, part in scoring.comparison_chunks(source, source_hidden, result, leaf, ids[:, 1:], chunk=5):
        part.kl.sum().backward()
    hidden.backward(leaf.grad)
    for name, parameter in result.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-6, atol=1e-10)


def test_vocabularies_that_differ_are_refused():
    with pytest.raises(UserError, match="source has logits for 97 tokens, the result for 128"):
        scoring.compare_logits(torch.zeros(2, 97), torch.zeros(2, 128), torch.zeros(2, dtype=torch.long))
