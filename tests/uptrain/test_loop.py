"""The training loop: it learns, its order and its draws are reproducible, and it hands the model back unwrapped."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.common.errors import CheckFailed, UserError
from kvfold.uptrain.data.store import Batch, Tensors
from kvfold.uptrain.loop import LoopKnobs, StepReport, Training, make_optimizer, step_seed
from kvfold.uptrain.objective import Trainee
from kvfold.uptrain.order import Order
from kvfold.uptrain.schedule import Course, Schedule, Stage, course
from kvfold.uptrain.selection import attention_modules
from kvfold.uptrain.teacher import Teacher

VOCABULARY, WINDOW, WINDOWS = 17, 16, 12


def micro_model(**changes) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
        **changes,
    )
    return LlamaForCausalLM(config)


# Windows that count upwards from different numbers: what comes next follows from what came. [W, S]
COUNTING = (torch.arange(WINDOW) + torch.arange(WINDOWS)[:, None]) % VOCABULARY


class Unequal(Tensors):
    """The same windows, of which each has another number of targets."""

    def batch(self, indices) -> Batch:
        batch = super().batch(indices)
        for row, index in enumerate(indices):
            batch.labels[row, : 1 + index] = -100
        return batch

    def scored(self, indices) -> int:
        return sum(self.window - 1 - index for index in indices)


def knobs(steps: int = 30, kind: str = "cosine", warmup: int = 5, rate: float = 1e-2, **changes) -> LoopKnobs:
    return LoopKnobs(course(steps, Schedule(kind, warmup), learning_rate=rate), **{"batch_size": 4, **changes})


def make_training(
    used: LoopKnobs, model: LlamaForCausalLM | None = None, data: Tensors | None = None, teacher: Teacher | None = None
) -> Training:
    model, data = model or micro_model(), data or Tensors(COUNTING)
    attention = attention_modules(model)
    trainee = Trainee(model, attention=attention)
    return Training(trainee, data, Order([data.windows], seed=used.seed), used, Accelerator(cpu=True), teacher)


def run(used: LoopKnobs, *rest, **named) -> tuple[LlamaForCausalLM, list[StepReport]]:
    training = make_training(used, *rest, **named)
    reports = list(training.steps())
    return training.finish().model, reports


def assert_same_bits(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=0, atol=0, msg=name)


def test_it_learns_what_is_learnable():
    model, reports = run(knobs())
    assert [report.step for report in reports] == list(range(1, 31))
    assert math.log(VOCABULARY) - 0.3 < reports[0].loss < math.log(VOCABULARY) + 0.3, "an untrained model knows nothing"
    assert reports[-1].loss < 0.5
    with torch.no_grad():
        assert model(input_ids=COUNTING, labels=COUNTING).loss < 0.5, "the reported loss is the model's own"
    assert {report.tokens for report in reports} == {4 * WINDOW}
    assert all(report.seconds > 0 and report.stage == "loss" for report in reports)
    assert all(report.cross_entropy == report.loss and math.isnan(report.divergence) for report in reports)


def test_the_loss_is_that_of_the_windows_whose_turn_it_is():
    model = micro_model().eval()
    used = knobs(steps=3, rate=1e-30)  # so that every step judges the same model
    drawn = Order([WINDOWS], seed=used.seed)
    for number, report in enumerate(run(used, copy.deepcopy(model))[1]):
        ids = COUNTING[drawn.draw(4 * number, 4)]
        with torch.no_grad():
            assert report.loss == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), abs=1e-6)


def test_the_same_seed_gives_equal_bits_and_another_does_not():
    used = knobs(steps=5)
    first, second = (run(used, micro_model(attention_dropout=0.2)) for _ in range(2))
    assert_same_bits(first[0], second[0])
    assert [report.loss for report in first[1]] == [report.loss for report in second[1]]
    training = make_training(dataclasses.replace(used, seed=1), micro_model(attention_dropout=0.2))
    training.order = Order([WINDOWS], seed=used.seed)  # the same windows, other dropout
    other = [report.loss for report in training.steps()]
    assert all(loss != report.loss for loss, report in zip(other, first[1], strict=True))


def test_what_was_drawn_before_a_step_makes_no_difference():
    training, other = (make_training(knobs(steps=3), micro_model(attention_dropout=0.2)) for _ in range(2))
    for _ in other.steps():
        torch.manual_seed(1234)
        torch.rand(5)
    list(training.steps())
    assert_same_bits(training.finish(), other.finish())


def test_every_step_and_process_draws_its_own():
    seeds = {step_seed(seed, step, rank) for seed in range(3) for step in range(50) for rank in range(4)}
    assert len(seeds) == 3 * 50 * 4
    assert step_seed(0, 1, 0) == 96497900854799, "recipes name a seed; what is drawn from it does not change"


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 5, 8])
def test_accumulation_is_one_large_batch_with_unequal_numbers_of_targets(micro_batch_size):
    used = knobs(steps=4, batch_size=8, micro_batch_size=8)
    data = Unequal(COUNTING)
    gradients = []
    for size in (8, micro_batch_size):
        training = make_training(dataclasses.replace(used, micro_batch_size=size), data=data)
        gradients.append(gradients_of_first_step(training))
    for whole, pieces in zip(*gradients, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-7)
    one, reports = run(used, data=data)
    other, others = run(dataclasses.replace(used, micro_batch_size=micro_batch_size), data=data)
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), parameter, rtol=1e-5, atol=2e-6, msg=name)
    assert [report.loss for report in others] == pytest.approx([report.loss for report in reports], abs=2e-6)
    assert [report.grad_norm for report in others] == pytest.approx([report.grad_norm for report in reports], rel=1e-5)


def gradients_of_first_step(training: Training) -> list[torch.Tensor]:
    """What the optimizer is given."""
    taken: list[torch.Tensor] = []
    step = training.optimizer.step

    def spy() -> None:
        taken.extend(p.grad.clone() for p in training.model.parameters())
        step()

    training.optimizer.step = spy
    next(training.steps())
    return taken


def test_the_gradient_is_that_of_the_mean_over_all_targets():
    training = make_training(knobs(steps=1, batch_size=8, micro_batch_size=2, clip=0.0), data=Unequal(COUNTING))
    model = micro_model()
    batch = training.data.batch(training.order.draw(0, 8))
    model(input_ids=batch.ids, labels=batch.labels).loss.backward()  # transformers' own mean over targets
    for ours, parameter in zip(gradients_of_first_step(training), model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=1e-7)


def test_a_step_without_targets_changes_nothing():
    class Nothing(Tensors):
        def batch(self, indices) -> Batch:
            ids = super().batch(indices).ids
            return Batch(ids, torch.full_like(ids, -100))

        def scored(self, indices) -> int:
            return 0

    model, (report,) = run(knobs(steps=1, weight_decay=0.0), data=Nothing(COUNTING))
    assert report.loss == 0
    assert_same_bits(model, micro_model())


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_the_rates_are_those_of_the_course(kind):
    """Both the reported one and, as AdamW's first step is as long as the rate, the one that is trained with."""
    used = knobs(steps=8, kind=kind, warmup=3, weight_decay=0.0)
    training, applied = make_training(used), []
    step = training.optimizer.step

    def spy() -> None:
        applied.extend({group["lr"] for group in training.optimizer.param_groups})
        step()

    training.optimizer.step = spy
    reports = list(training.steps())
    rates = [used.course.at(step)[1] for step in range(8)]
    assert applied == rates == [report.learning_rate for report in reports]
    before = micro_model()
    after, _ = run(knobs(steps=1, warmup=0, rate=1e-3, weight_decay=0.0))
    for name, parameter in after.named_parameters():
        moved = (parameter - before.get_parameter(name)).abs().max().item()
        assert moved == pytest.approx(1e-3, rel=0.02), name


def test_a_training_taken_up_at_any_step_goes_on_with_the_same_bits():
    used = knobs(steps=9)  # 36 draws of 12 windows: three epochs
    whole = make_training(used, micro_model(attention_dropout=0.2))
    halves = make_training(used, micro_model(attention_dropout=0.2))
    for _ in range(2):
        next(halves.steps())
    rest = make_training(used, copy.deepcopy(halves.finish().model))
    rest.optimizer.load_state_dict(halves.optimizer.state_dict())
    rest.step = 2
    losses = [report.loss for report in whole.steps()]
    assert [report.loss for report in rest.steps()] == losses[2:]
    assert_same_bits(whole.finish(), rest.finish())


def test_weight_decay_shrinks_matrices_and_spares_norms():
    plain, decayed = (run(knobs(weight_decay=decay))[0] for decay in (0.0, 3.0))
    size = {name: p.norm() for name, p in plain.named_parameters()}
    for name, parameter in decayed.named_parameters():
        if parameter.ndim == 2:
            assert parameter.norm() < size[name], name
        else:
            assert parameter.norm() > 0.7 * size[name], name


def test_the_optimizer_holds_what_is_trained():
    model = micro_model(attention_bias=True)
    model.model.layers[0].requires_grad_(False)
    optimizer = make_optimizer(model, knobs(weight_decay=0.3, betas=(0.8, 0.9)))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    wanted = {id(p): 0.3 if p.ndim == 2 else 0.0 for p in model.parameters() if p.requires_grad}
    assert decays == wanted
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(wanted), "a tied head counts once"
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 1)
    assert len(make_optimizer(model, knobs()).param_groups) == 1, "no empty group"


@pytest.mark.parametrize(("clip", "most"), [(0.01, 0.01), (0.0, math.inf)])
def test_clipping_bounds_the_gradient_and_zero_never_clips(clip, most):
    training = make_training(knobs(steps=1, clip=clip))
    norm = torch.stack([grad.norm() for grad in gradients_of_first_step(training)]).norm().item()
    (unclipped,) = run(knobs(steps=1, clip=0.0))[1]
    assert unclipped.grad_norm > 0.1
    assert norm == pytest.approx(min(most, unclipped.grad_norm), rel=1e-3)
    (report,) = run(knobs(steps=1, clip=clip))[1]
    assert report.grad_norm == pytest.approx(unclipped.grad_norm), "the norm that is told is that before clipping"


@pytest.fixture
def bf16() -> Iterator[Accelerator]:
    """Computes in bf16; accelerate knows one precision a process, and forgets it afterwards."""
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


def test_frozen_parameters_stay_and_the_model_comes_back_as_it_was(bf16):
    model = micro_model()
    model.model.layers[0].mlp.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    forward = Trainee.forward
    training = make_training(knobs(steps=3), model)
    list(training.steps())
    assert training.model.forward.__func__ is not forward
    trainee = training.finish()
    assert type(trainee) is Trainee
    assert trainee.model is model
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("model.layers.0.mlp"), name
    assert not model.training
    assert trainee.forward.__func__ is forward, "autocast is gone"
    assert model.lm_head.weight is model.model.embed_tokens.weight, "still tied"


def test_the_stages_of_a_teacher():
    """Attention first, without running the head; then what comes out."""
    teacher = micro_model()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    stages = (Stage("layers", 8, 1e-2), Stage("loss", 8, 1e-2))
    used = LoopKnobs(Course(stages, Schedule("constant", 0)), batch_size=4)
    before = copy.deepcopy(teacher.state_dict())
    _, reports = run(used, teacher=Teacher(teacher, attention_modules(teacher)))
    layers, loss = reports[:8], reports[8:]
    assert [report.stage for report in reports] == ["layers"] * 8 + ["loss"] * 8
    assert all(math.isnan(report.cross_entropy) and report.loss == report.divergence for report in layers)
    assert all(report.loss == report.divergence != report.cross_entropy for report in loss)
    assert layers[-1].divergence < 0.5 * layers[0].divergence
    assert loss[-1].divergence < loss[0].divergence
    for name, tensor in before.items():
        assert torch.equal(tensor, teacher.state_dict()[name]), "a teacher does not learn"


def test_timing_a_step_teaches_nothing():
    training, other = (make_training(knobs(steps=3, micro_batch_size=2)) for _ in range(2))
    assert training.time_step("loss") > 0
    assert training.step == 0
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert [report.loss for report in training.steps()] == [report.loss for report in other.steps()]
    assert_same_bits(training.finish(), other.finish())


def test_timing_counts_all_micro_batches(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("kvfold.uptrain.loop.time.monotonic", lambda: next(clock))
    assert make_training(knobs(batch_size=8, micro_batch_size=2)).time_step("loss") == 5, (
        "the optimizer's step takes one too"
    )


def test_fewer_windows_than_a_step_takes():
    used = knobs(batch_size=8, micro_batch_size=8, steps=2)
    training = make_training(used, data=Tensors(COUNTING[:3]))
    assert training.time_step("loss") > 0
    assert len(list(training.steps())) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"clip": -1.0}, r"clip is -1\.0"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
    ],
)
def test_knobs_out_of_range_are_named(change, words):
    with pytest.raises(UserError, match=words):
        knobs(**change)


def test_a_model_that_is_all_frozen_is_not_trained():
    with pytest.raises(UserError, match="no parameter of the model is to be trained"):
        make_training(knobs(), micro_model().requires_grad_(False))


def test_a_batch_that_does_not_divide_is_refused(monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", 3)
    with pytest.raises(UserError, match="batch_size 4 does not divide among 3 processes"):
        make_training(knobs())


def at_step(number: int, then: Callable[[Training], object]) -> Callable[[Training], list[StepReport]]:
    """Train, and do something to the training when so many steps are done."""

    def go(training: Training) -> list[StepReport]:
        reports = []
        for report in training.steps():
            reports.append(report)
            if report.step == number:
                then(training)
        return reports

    return go


def break_loss(training: Training) -> None:
    with torch.no_grad():
        training.finish().model.model.norm.weight.fill_(math.nan)


def break_gradient(training: Training) -> None:
    """A finite loss whose gradient is none, as where a square root meets zero."""
    parameter = training.finish().model.model.norm.weight
    parameter.register_hook(lambda gradient: gradient * math.inf)


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (break_loss, r"the loss is no finite number at step 5 on rank 0; .* lower the learning rate \(0\.008 now\)"),
        (break_gradient, r"the gradient is no finite number at step 5; it was not taken"),
    ],
)
def test_what_is_no_number_stops_the_run_before_it_reaches_the_weights(broken, said, clip):
    training = make_training(knobs(clip=clip, kind="constant", warmup=5, rate=8e-3))
    kept: dict[str, torch.Tensor] = {}

    def spoil(training: Training) -> None:
        broken(training)
        kept.update(copy.deepcopy(training.model.state_dict()))

    with pytest.raises(CheckFailed, match=said):
        at_step(4, spoil)(training)
    assert training.step == 4
    for name, tensor in training.model.state_dict().items():
        torch.testing.assert_close(tensor, kept[name], rtol=0, atol=0, equal_nan=True, msg=name)
