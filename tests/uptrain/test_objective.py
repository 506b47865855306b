"""The objective against its formulas on whole logits, and in every way that a run may compute it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from kvfold.attention.plain import LatentAttention
from kvfold.common.errors import UserError
from kvfold.common.scoring import evaluating, head_logits, hidden_states
from kvfold.convert.latent_families import KNOWN
from kvfold.uptrain.objective import Objective, Trainee, bucketed, check_packing, layer_error, token_sums
from kvfold.uptrain.selection import attention_modules, select
from kvfold.uptrain.teacher import Teacher

from ..common.tiny import make_model
from ..convert.mla.plain_models import make_plain
from ..convert.tiny import CASES, EAGER_EXPERTS, make_config
from .sharded import WAYS, make_batch, make_pair

EXACT = {"rtol": 1e-10, "atol": 1e-12}
CLOSE = {"rtol": 1e-5, "atol": 1e-8}  # through a whole fp64 model, whose norms compute in fp32


def random_logits(seed):
    return 3 * torch.randn(2, 9, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LOGITS, TEACHER = random_logits(0), random_logits(1)
TARGETS = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(0))
TARGETS[0, :3] = TARGETS[1, 5] = -100


def by_hand(logits, teacher, targets, temperature=1.0, ce_share=0.0, top_k=0):
    """The three sums, token by token, from probabilities."""
    objective = entropy = apart = 0.0
    for b, t in (targets != -100).nonzero().tolist():
        nll = -logits[b, t].softmax(-1)[targets[b, t]].log()
        entropy = entropy + nll
        if teacher is None:
            objective = objective + nll
            continue
        p, q = (x[b, t].div(temperature).softmax(-1) for x in (teacher, logits))
        if top_k:
            kept = p.argsort(descending=True)[:top_k]
            p, q = (torch.cat([x[kept], 1 - x[kept].sum()[None]]) for x in (p, q))
        kl = (p * (p / q).log()).sum()
        apart = apart + kl
        objective = objective + (1 - ce_share) * temperature**2 * kl + ce_share * nll
    return torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in (objective, entropy, apart)])


KNOBS = [
    {},
    {"temperature": 2.0},
    {"ce_share": 0.3},
    {"ce_share": 1.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 22},
    {"temperature": 0.5, "ce_share": 0.25, "top_k": 4},
]


@pytest.mark.parametrize("knobs", KNOBS)
def test_the_formula(knobs):
    logits = LOGITS.clone().requires_grad_()
    sums = token_sums(logits, TEACHER, TARGETS, Objective(**knobs))
    expected = by_hand(logits, TEACHER, TARGETS, **knobs)
    torch.testing.assert_close(sums, expected, **EXACT)
    grads = [torch.autograd.grad(x[0], logits)[0] for x in (sums, expected)]
    torch.testing.assert_close(*grads, **EXACT)
    assert not grads[0][TARGETS == -100].any()


def test_without_a_teacher_it_is_cross_entropy():
    sums = token_sums(LOGITS, None, TARGETS, Objective(temperature=3.0, ce_share=0.5))
    expected = F.cross_entropy(LOGITS.flatten(0, 1), TARGETS.flatten(), reduction="sum")
    torch.testing.assert_close(sums, torch.stack([expected, expected, torch.zeros_like(expected)]), **EXACT)


def test_more_tokens_than_there_are_is_all():
    whole = token_sums(LOGITS, TEACHER, TARGETS, Objective())
    assert torch.equal(token_sums(LOGITS, TEACHER, TARGETS, Objective(top_k=500)), whole)


def test_the_bucket_of_a_certain_teacher():
    """A teacher whose k tokens hold all the mass that fp32 can see: 1 minus their sum would be noise, or below 0."""
    teacher, student = 40 * F.one_hot(torch.arange(9), 23).float().expand(2, 9, 23), LOGITS.float()
    kept = teacher.topk(1).indices
    exact = bucketed(teacher.double(), kept).log_softmax(-1)
    torch.testing.assert_close(bucketed(teacher, kept).log_softmax(-1).double(), exact, rtol=1e-5, atol=1e-7)
    assert exact[..., 1].max() < -36
    student.requires_grad_()
    sums = token_sums(student, teacher, TARGETS, Objective(top_k=1))
    sums[0].backward()
    assert sums.isfinite().all()
    assert student.grad.isfinite().all()
    same = token_sums(teacher, teacher, TARGETS, Objective(top_k=1))
    assert same[2] == 0


def test_a_divergence_is_never_negative():
    for k in range(1, 23):
        assert token_sums(LOGITS.float(), TEACHER.float(), TARGETS, Objective(top_k=k))[2] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_summed_in_fp32(dtype):
    sums = token_sums(LOGITS.to(dtype), TEACHER.to(dtype), TARGETS, Objective(temperature=2.0, top_k=3))
    assert sums.dtype == torch.float32
    exact = token_sums(LOGITS.to(dtype).double(), TEACHER.to(dtype).double(), TARGETS, Objective(2.0, top_k=3))
    torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-5)


def test_layer_error():
    outputs, targets = torch.randn(2, 3, 2, 5, 7, dtype=torch.float64)
    targets[0, 0, 0] = 0
    scored = torch.rand(2, 5) < 0.6
    scored[0, 0] = True
    expected = 0.0
    for y, t in zip(outputs, targets, strict=True):
        for b, s in scored.nonzero().tolist():
            expected += ((y[b, s] - t[b, s]) ** 2).sum() / max((t[b, s] ** 2).sum().item(), 1e-8) / 3
    torch.testing.assert_close(layer_error(list(outputs), list(targets), scored), expected, **EXACT)
    assert layer_error(list(targets), list(targets), scored) == 0


@pytest.mark.parametrize(("knobs", "said"), [
    ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"ce_share": 1.5}, "ce_share is 1.5; it is a share"),
    ({"top_k": -1}, "top_k is -1; it must be at least 1, or 0"),
])  # fmt: skip
def test_knobs_out_of_range(knobs, said):
    with pytest.raises(UserError, match=said):
        Objective(**knobs)


def test_vocabularies_that_differ():
    with pytest.raises(UserError, match="source has logits for 22 tokens, the result for 23"):
        token_sums(LOGITS, TEACHER[..., 1:], TARGETS, Objective())


def gradients(module):
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def whole(model, teacher, batch, knobs):
    """The three sums from the logits of the whole batch."""
    ids, labels = batch
    logits = model(input_ids=ids).logits[:, :-1]
    with torch.no_grad():
        source = teacher(input_ids=ids).logits[:, :-1]
    return token_sums(logits, source, labels[:, 1:], knobs)


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere", "granite", "phi", "gpt2"])
def test_a_trainee_does_what_the_whole_batch_does(kind, chunk):
    student, teacher = make_pair(kind)
    batch, knobs = make_batch(), Objective(temperature=1.5, ce_share=0.2)
    trainee = Trainee(student, knobs, chunk=chunk)
    view = Teacher(teacher).view(batch[0])
    sums, expected = trainee(*batch, view=view), whole(student, teacher, batch, knobs)
    torch.testing.assert_close(sums, expected, **CLOSE)
    expected[0].backward()
    expected = gradients(trainee)
    (sums[0]).backward()
    found = gradients(trainee)
    assert found.keys() == expected.keys() == dict(trainee.named_parameters()).keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6)


def test_only_targets_count():
    """Two halves, each with the other's labels left out, add up; where nothing is a target, nothing is learnt."""
    student, _ = make_pair("llama")
    trainee, (ids, labels) = Trainee(student), make_batch()
    late = torch.arange(ids.shape[1]) > 11
    parts = [trainee(ids, labels.masked_fill(mask, -100)) for mask in (late, ~late)]
    torch.testing.assert_close(sum(parts), trainee(ids, labels), **CLOSE)
    none = trainee(ids, torch.full_like(labels, -100))
    assert none.tolist() == [0, 0, 0]
    none[0].backward()
    assert not any(grad.any() for grad in gradients(trainee).values())


def test_evaluation():
    student, teacher = make_pair("gpt2")  # has dropout
    batch, knobs = make_batch(), Objective(temperature=2.0)
    trainee, view = Trainee(student, knobs).train(), Teacher(teacher).view(batch[0])
    sums = trainee(*batch, view=view, stage="eval")
    assert trainee.training
    assert student.training
    assert not sums.requires_grad
    with evaluating(student):
        torch.testing.assert_close(sums, whole(student, teacher, batch, knobs), **CLOSE)
    assert not torch.allclose(trainee(*batch, view=view), sums, rtol=1e-6)


@pytest.mark.parametrize("train", ["attention", "all"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_layers(kind, train):
    student, teacher = make_pair(kind)
    chosen, batch = select(student, train), make_batch()
    trainee = Trainee(student, attention=chosen.attention)
    heads = []
    student.lm_head.register_forward_hook(lambda *_: heads.append(1))
    view = Teacher(teacher, attention_modules(teacher)).view(batch[0], layers=True)
    sums = trainee(*batch, view=view, stage="layers")
    assert not heads
    scored = F.pad(batch[1][:, 1:], (0, 1), value=-100) != -100
    outputs = Teacher(copy.deepcopy(student), chosen.attention).view(batch[0], layers=True).attention
    expected = layer_error(outputs, view.attention, scored)
    torch.testing.assert_close(sums, torch.stack([expected, torch.zeros_like(expected), expected]), **CLOSE)
    assert sums[0] > 0
    sums[0].backward()
    found = gradients(student)
    assert found.keys() == set(chosen.parameters), "DDP waits for every one"
    assert all(grad.any() for name, grad in found.items() if "attn." in name and not name.endswith("k_proj.bias"))
    assert not any(grad.any() for name, grad in found.items() if "lm_head" in name)


def test_layer_gradients_by_differences():
    student, teacher = make_pair("llama")
    chosen, batch = select(student), make_batch()
    trainee = Trainee(student, attention=chosen.attention)
    view = Teacher(teacher, chosen.attention).view(batch[0], layers=True)
    trainee(*batch, view=view, stage="layers")[0].backward()
    for name in ("q_proj", "o_proj"):
        weight = student.get_submodule(chosen.attention[0]).get_submodule(name).weight
        direction, size = torch.randn_like(weight), 1e-4
        with torch.no_grad():
            sides = []
            for sign in (1, -1):
                weight.add_(direction, alpha=sign * size)
                sides.append(trainee(*batch, view=view, stage="layers")[0])
                weight.sub_(direction, alpha=sign * size)
        slope = (sides[0] - sides[1]) / (2 * size)
        torch.testing.assert_close((weight.grad * direction).sum(), slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", ["loss", "layers"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_checkpointing_changes_nothing(kind, stage):
    student, teacher = make_pair(kind)
    chosen, batch = select(student, "attention+norms"), make_batch()
    trainee = Trainee(student, attention=chosen.attention).train()
    for module in trainee.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    view = Teacher(teacher, chosen.attention).view(batch[0], layers=True)
    results = []
    for checkpointing in (False, True):
        runs = []
        hook = student.get_submodule(chosen.attention[0]).register_forward_hook(lambda *_, runs=runs: runs.append(1))
        if checkpointing:
            student.gradient_checkpointing_enable()
        sums = trainee(*batch, view=view, stage=stage)
        sums[0].backward()
        hook.remove()
        assert len(runs) == 1 + checkpointing
        results.append((sums.detach(), gradients(student)))
    (sums, grads), (again, grads_again) = results
    assert torch.equal(sums, again)
    torch.testing.assert_close(grads, grads_again, rtol=0, atol=0)


@pytest.mark.parametrize("stage", ["loss", "layers"])
def test_autocast(stage):
    student, teacher = (model.float() for model in make_pair("llama"))
    chosen, batch = select(student, "all"), make_batch()
    trainee = Trainee(student, Objective(ce_share=0.5), chosen.attention, chunk=5)
    view = Teacher(teacher, chosen.attention).view(batch[0], layers=True)
    exact = trainee(*batch, view=view, stage=stage)
    exact[0].backward()
    grads = gradients(student)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = trainee(*batch, view=view, stage=stage)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, exact, rtol=0.02, atol=0.02)
    sums[0].backward()
    found = gradients(student)
    for name, grad in grads.items():
        assert (found[name] - grad).norm() <= 0.1 * grad.norm() + 1e-3


PLAIN_CASES = [case for case in KNOWN if case.startswith("mla_")]


@pytest.fixture
def make(tmp_path):
    def make_case(case, attention):
        torch.manual_seed(0)
        if case in ("gpt2", "gpt_bigcode", "deepseek_v3"):
            model = make_model(case)
        elif case in PLAIN_CASES:
            extra = {"qk_rope_head_dim": 2, "rope_frequencies": [[0], [0]]} if case == "mla_stablelm" else {}
            folder = make_plain(tmp_path, case.removeprefix("mla_"), **extra)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        else:
            model = AutoModelForCausalLM.from_config(make_config(case), **EAGER_EXPERTS)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
        model.set_attn_implementation(attention)
        return model.double().eval()

    return make_case


ATTENTIONS = [
    (case, attention)
    for case in [*CASES, "gpt2", "gpt_bigcode", "deepseek_v3", *PLAIN_CASES]
    for attention in ("sdpa", "eager")
    if (case, attention) != ("gemma2", "sdpa")  # transformers has none
]


@pytest.mark.parametrize(("case", "attention"), ATTENTIONS)
def test_documents_of_a_window_are_apart(case, attention, make):
    """Logits of a packed window are those of its documents alone."""
    model = make(case, attention)
    lengths = [5, 1, 9, 5]
    ids = torch.randint(3, 97, (2, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    with torch.no_grad():
        packed = head_logits(model, hidden_states(model, ids, positions))
        alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
        mixed = model(ids, use_cache=False).logits
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert (mixed - alone).abs().max() > 1e-2
    check_packing(model)


def test_a_model_that_mixes_documents_is_refused(make, monkeypatch):
    model = make("mla_llama", "sdpa")
    forward = LatentAttention.forward

    def unmasked(self, *args, attention_mask=None, **kwargs):
        return forward(self, *args, attention_mask=None, **kwargs)

    monkeypatch.setattr(LatentAttention, "forward", unmasked)
    with pytest.raises(UserError, match="MlaLlamaForCausalLM lets documents of one window see each other"):
        check_packing(model)


def test_positions_reach_the_trainee(make):
    model = make("llama", "sdpa")
    trainee, (ids, labels) = Trainee(model), make_batch()
    positions = torch.arange(ids.shape[1]).remainder(8).expand_as(ids)
    whole = trainee(ids, labels, positions)
    labels = labels.clone()
    labels[:, 8::8] = -100
    apart = sum(trainee(*pair) for pair in zip(ids.split(8, 1), labels.split(8, 1), strict=True))
    assert not torch.allclose(whole, apart)  # a document's first token is predicted by the one before
    torch.testing.assert_close(trainee(ids, labels, positions), apart, **CLOSE)


def test_what_accelerate_asks_of_it():
    student, _ = make_pair("llama", tie_word_embeddings=True)
    trainee = Trainee(student)
    assert trainee.config is student.config
    assert "LlamaDecoderLayer" in trainee._no_split_modules
    student.lm_head.weight = torch.nn.Parameter(student.lm_head.weight.detach().clone())
    trainee.tie_weights()
    assert student.lm_head.weight is student.model.embed_tokens.weight


def launch(how, tmp_path):
    """Run `sharded.py` in two processes; what it saved, for one process and for two."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "tests.uptrain.sharded", how, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return (torch.load(tmp_path / name) for name in ("one", "two"))


def compare_runs(one, two):
    assert one.keys() == two.keys()
    assert len(one) == 8  # kinds of model, trained parts and stages
    for case, (sums, grads) in one.items():
        sums_of_two, grads_of_two = two[case]
        torch.testing.assert_close(sums_of_two, sums, rtol=1e-6, atol=1e-9)
        assert grads.keys() == grads_of_two.keys()
        assert any(grad.any() for grad in grads.values())
        for name, grad in grads.items():
            torch.testing.assert_close(
                grads_of_two[name], grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("how", WAYS)
def test_two_processes(how, tmp_path):
    compare_runs(*launch(how, tmp_path))
