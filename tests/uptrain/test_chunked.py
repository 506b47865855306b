"""The chunked sum against the plain one: values, gradients, precisions, and what it holds in memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.common.scoring import head_logits, hidden_states, token_nll
from kvfold.uptrain.chunked import chunked_sum, head_parameters

from ..common.tiny import FAMILIES, VOCABULARY, make_model

IDS = torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
EXACT = {"rtol": 1e-11, "atol": 1e-12}

CASES = [(kind, tied) for kind in FAMILIES for tied in (False, True) if kind != "opt" or not tied]


def losses(logits, positions):
    """Three sums over a chunk; weights by position tell whether it is told which."""
    nll = token_nll(logits, TARGETS[:, positions])
    weights = torch.arange(1, 21, dtype=nll.dtype)[positions]
    return torch.stack([(nll * weights).sum(), nll.sum(), logits.double().square().sum().to(nll)])


def plain(model, hidden, loss_of=losses):
    return loss_of(head_logits(model, hidden), slice(0, hidden.shape[1]))


def gradients(model, hidden, sums, scale=0.37):
    """Gradients of the first of the sums, scaled, by name."""
    model.zero_grad()
    hidden.grad = None
    (scale * sums[0]).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"hidden": hidden.grad.clone()}


def double_model(kind="llama", **extra):
    return make_model(kind, **extra).double()


def leaf(model, ids=IDS):
    with torch.no_grad():
        return hidden_states(model, ids).clone().requires_grad_()


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize(("kind", "tied"), CASES)
def test_equals_the_plain_sum(kind, tied, chunk):
    model = make_model(kind, tie_word_embeddings=tied)
    hidden = leaf(model).detach().double().requires_grad_()  # experts run in fp32 only
    model.double()
    expected = plain(model, hidden)
    sums = chunked_sum(model, hidden, losses, chunk)
    torch.testing.assert_close(sums, expected, **EXACT)
    expected, found = gradients(model, hidden, expected), gradients(model, hidden, sums)
    assert len(expected) >= 2
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, **EXACT)


@pytest.mark.parametrize(("kind", "names"), [
    ("llama", ["lm_head.weight"]),
    ("phi", ["lm_head.weight", "lm_head.bias"]),
    ("opt", ["lm_head.weight"]),
])  # fmt: skip
def test_the_heads_parameters(kind, names):
    model = make_model(kind, tie_word_embeddings=False)
    assert [p is q for p, q in zip(head_parameters(model), map(model.get_parameter, names), strict=True)]
    tied = make_model(kind, tie_word_embeddings=True)
    assert head_parameters(tied)[0] is tied.get_input_embeddings().weight
    assert head_parameters(tied.requires_grad_(False)) == []


def test_a_tied_embedding_gets_one_gradient_of_both_uses():
    model = double_model(tie_word_embeddings=True)
    weight, calls = model.lm_head.weight, []
    plain(model, hidden_states(model, IDS))[0].backward()
    expected, weight.grad = weight.grad, None
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    chunked_sum(model, hidden_states(model, IDS), losses, 6)[0].backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-6, atol=1e-9)  # the model's norms compute in fp32
    assert len(calls) == 1


def test_only_the_first_sum_is_differentiable():
    model = double_model()
    hidden = leaf(model)
    sums = chunked_sum(model, hidden, losses, 6)
    sums[1:].sum().backward()
    assert not hidden.grad.any()


def test_a_frozen_head_costs_no_weight_gradient(monkeypatch):
    model, wanted = double_model(), []
    model.lm_head.requires_grad_(False)
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda y, x, **k: wanted.append(len(x)) or grad(y, x, **k))
    hidden = leaf(model)
    found = gradients(model, hidden, chunked_sum(model, hidden, losses, 10))
    assert wanted == [1, 1]
    assert found.keys() == {"hidden"}
    torch.testing.assert_close(found, gradients(model, hidden, plain(model, hidden)), **EXACT)


def test_a_frozen_base_still_trains_the_head():
    model = double_model()
    hidden = leaf(model).detach()
    chunked_sum(model, hidden, losses, 10)[0].backward()
    found, model.lm_head.weight.grad = model.lm_head.weight.grad, None
    plain(model, hidden)[0].backward()
    torch.testing.assert_close(found, model.lm_head.weight.grad, **EXACT)


@pytest.mark.parametrize("frozen", [True, False])
def test_no_gradients_are_computed_where_none_are_wanted(frozen, monkeypatch):
    model, modes = double_model().requires_grad_(not frozen), []
    monkeypatch.setattr(torch.autograd, "grad", None)
    with torch.set_grad_enabled(frozen):
        sums = chunked_sum(
            model,
            leaf(model).detach() if frozen else leaf(model),
            lambda logits, part: modes.append(torch.is_grad_enabled()) or losses(logits, part),
            10,
        )
    assert modes == [False, False]
    assert not sums.requires_grad
    torch.testing.assert_close(sums, plain(model, leaf(model)).detach(), **EXACT)


def test_calls_do_not_mix():
    model = double_model()
    hidden, other = leaf(model), leaf(model, TARGETS)
    one, two = chunked_sum(model, hidden, losses, 6), chunked_sum(model, other, losses, 9)
    (2 * one[0] + 3 * two[0]).backward()
    found, model.lm_head.weight.grad = model.lm_head.weight.grad, None
    (2 * plain(model, hidden)[0] + 3 * plain(model, other)[0]).backward()
    torch.testing.assert_close(found, model.lm_head.weight.grad, **EXACT)


def test_a_second_backward_is_refused():
    """The first has overwritten what it went by."""
    model = double_model()
    hidden = leaf(model)
    sums = chunked_sum(model, hidden, losses, 6)
    sums[0].backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sums[0].backward()


class Turned(torch.nn.Module):
    """A head whose weight is used in more ways than `F.linear` with all outputs."""

    def __init__(self, head):
        super().__init__()
        self.weight, self.bias = head.weight, torch.nn.Parameter(torch.ones(len(head.weight), dtype=torch.float64))

    def forward(self, hidden):
        return F.linear(hidden, self.weight, self.bias) + hidden @ self.weight.cos().T + F.linear(hidden, self.weight)


def test_a_weight_of_several_uses_and_a_bias():
    model = double_model()
    model.lm_head = Turned(model.lm_head)
    hidden = leaf(model)
    expected = gradients(model, hidden, plain(model, hidden))
    torch.testing.assert_close(gradients(model, hidden, chunked_sum(model, hidden, losses, 4)), expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi"])
def test_autocast(kind, dtype):
    """As near to fp32 as the plain sum under autocast; whatever its cache holds, where torch does not see to that."""
    model = make_model(kind)
    hidden = leaf(model)
    exact = gradients(model, hidden, plain(model, hidden))
    with torch.autocast("cpu", dtype=dtype):
        expected = plain(model, hidden)
    cast = gradients(model, hidden, expected)
    with torch.autocast("cpu", dtype=dtype):
        with torch.no_grad():
            head_logits(model, hidden)  # leaves a cast weight without a gradient in the cache
        sums = chunked_sum(model, hidden, losses, 7)
        assert torch.is_autocast_cache_enabled()
    torch.testing.assert_close(sums, expected, rtol=1e-3, atol=1e-3)
    found = gradients(model, hidden, sums)
    assert found.keys() == exact.keys()
    for name, grad in exact.items():
        far = (cast[name] - grad).norm()
        assert 0 < (found[name] - grad).norm() <= 1.5 * far < 0.05 * grad.norm()


def test_fp16_gradients_do_not_vanish():
    """The mean over a million tokens would push them below fp16's smallest number if it came before the product."""
    model = make_model("llama")
    hidden = leaf(model)
    exact = gradients(model, hidden, plain(model, hidden), 1e-6)
    with torch.autocast("cpu", dtype=torch.float16):
        sums = chunked_sum(model, hidden, losses, 7)
    found = gradients(model, hidden, sums, 1e-6)
    for name, grad in exact.items():
        assert (found[name] - grad).norm() < 0.01 * grad.norm()


def test_bf16_weights_collect_their_gradient_in_fp32():
    model = make_model("llama")
    hidden = leaf(model).detach().bfloat16().requires_grad_()
    model.bfloat16()
    found = gradients(model, hidden, chunked_sum(model, hidden, losses, 1), 0.3)
    expected = gradients(model, hidden, plain(model, hidden), 0.3)
    exact = hidden.detach().double().requires_grad_()
    exact = gradients(model.double(), exact, plain(model, exact), 0.3)
    for name, grad in exact.items():
        assert (found[name] - grad).norm() <= 1.2 * (expected[name] - grad).norm()


class Largest(TorchDispatchMode):
    """The most elements that a tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("frozen", [False, True])
def test_no_more_than_a_chunks_logits_at_a_time(frozen):
    vocabulary, tokens, chunk, width = 50_000, 64, 16, 8
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = LlamaForCausalLM(config)
    model.lm_head.requires_grad_(not frozen)
    ids = torch.randint(vocabulary, (1, tokens))
    before, alive = [], []

    def loss_of(logits, positions):
        gc.collect()
        alive.append(sum(ref() is not None for ref in before))
        before.append(weakref.ref(logits))
        return F.cross_entropy(logits[0].float(), ids[0, positions], reduction="sum")[None]

    hidden = hidden_states(model, ids)
    with Largest() as seen:
        chunked_sum(model, hidden, loss_of, chunk)[0].backward()
    assert seen.elements == chunk * vocabulary >= width * vocabulary
    assert alive == [0] * (tokens // chunk)
    with Largest() as seen:  # it can see whole logits
        plain(model, hidden_states(model, ids), loss_of)
    assert seen.elements == tokens * vocabulary


def test_by_default_chunks_keep_to_the_limit(monkeypatch):
    from kvfold.common import scoring

    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", 3 * VOCABULARY * 8)
    model, seen = double_model(), []
    chunked_sum(model, leaf(model), lambda logits, part: seen.append((part, logits.shape)) or losses(logits, part))
    assert seen == [(slice(start, stop), (3, stop - start, VOCABULARY)) for start, stop in ((0, 8), (8, 16), (16, 20))]
