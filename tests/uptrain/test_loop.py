"""The training loop: it learns, its order is fair and reproducible, and it hands the model back unwrapped."""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.common.errors import UserError
from kvfold.uptrain.loop import DECAYS, StepReport, TrainKnobs, batch_indices, lr_factor, train


def micro_model(**changes) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        **changes,
    )
    return LlamaForCausalLM(config)


def counting_windows(count: int = 12) -> torch.Tensor:
    """Windows that count upwards from different numbers: what comes next follows from what came."""
    return (torch.arange(16) + torch.arange(count)[:, None]) % 17  # (W, S)


def run(knobs: TrainKnobs, **changes) -> tuple[LlamaForCausalLM, list[StepReport]]:
    model, seen = micro_model(**changes), []
    train(model, counting_windows(), knobs, accelerator=Accelerator(cpu=True), log=seen.append)
    return model, seen


KNOBS = TrainKnobs(steps=30, batch_size=4, learning_rate=1e-2, warmup=5, log_every=10)


def test_it_learns_what_is_learnable():
    model, seen = run(KNOBS)
    assert [progress.step for progress in seen] == [10, 20, 30]
    assert seen[0].loss < math.log(17) + 0.2, "an untrained model knows nothing, and no less than nothing"
    assert seen[-1].loss < 0.5
    with torch.no_grad():
        ids = counting_windows()
        assert model(input_ids=ids, labels=ids).loss < 0.5, "the reported loss is the model's own"


def test_the_logged_loss_is_the_mean_since_the_last_call():
    _, each = run(dataclasses.replace(KNOBS, log_every=1))
    _, tens = run(KNOBS)
    means = [sum(p.loss for p in each[start : start + 10]) / 10 for start in (0, 10, 20)]
    assert [p.loss for p in tens] == pytest.approx(means, rel=1e-5)


def test_the_last_step_is_logged_even_off_the_beat():
    _, seen = run(dataclasses.replace(KNOBS, steps=7, log_every=5))
    assert [progress.step for progress in seen] == [5, 7]


def test_the_same_seed_gives_equal_bits_and_another_does_not():
    first, second = (run(KNOBS, attention_dropout=0.2)[0].state_dict() for _ in range(2))
    other = run(dataclasses.replace(KNOBS, seed=1), attention_dropout=0.2)[0].state_dict()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=0)
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_every_epoch_covers_every_window_once_in_its_own_order():
    knobs = TrainKnobs(steps=9, batch_size=4, seed=3)  # 36 draws: three epochs of 12, no batch straddles
    drawn = [index for batch in batch_indices(12, knobs) for index in batch]
    epochs = [drawn[start : start + 12] for start in (0, 12, 24)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert all(epoch != list(range(12)) for epoch in epochs)


@pytest.mark.parametrize(("windows", "batch_size"), [(10, 4), (3, 8), (1, 2)])
def test_no_window_is_lost_where_the_batch_does_not_divide_the_epoch(windows, batch_size):
    knobs = TrainKnobs(steps=windows * 3, batch_size=batch_size)
    drawn = Counter(index for batch in batch_indices(windows, knobs) for index in batch)
    assert drawn == dict.fromkeys(range(windows), 3 * batch_size)


def test_the_order_is_a_function_of_seed_and_step():
    knobs = TrainKnobs(steps=20, batch_size=3, seed=5)
    whole = list(batch_indices(11, knobs))
    assert whole == list(batch_indices(11, knobs))
    assert list(batch_indices(11, knobs, start=13)) == whole[13:], "a run can be taken up from any step"
    assert whole != list(batch_indices(11, dataclasses.replace(knobs, seed=6)))


def test_the_order_does_not_change_between_releases():
    """Recipes name a seed; the batches behind it are part of what they promise."""
    assert list(batch_indices(6, TrainKnobs(steps=2, batch_size=3))) == [[2, 3, 4], [1, 5, 0]]


@pytest.mark.parametrize("decay", DECAYS)
def test_the_rate_rises_to_its_peak_and_follows_the_decay(decay):
    knobs = TrainKnobs(steps=110, warmup=10, decay=decay)
    factors = [lr_factor(step, knobs) for step in range(110)]
    assert factors[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert factors[10] == 1
    assert all(later <= sooner for sooner, later in itertools.pairwise(factors[10:]))
    middle = {"constant": 1.0, "cosine": 0.5, "linear": 0.5}[decay]
    assert factors[60] == pytest.approx(middle)
    assert factors[-1] == pytest.approx(1.0 if decay == "constant" else 0.0, abs=0.011)


def test_a_run_may_be_all_warmup():
    assert lr_factor(4, TrainKnobs(steps=5, warmup=5)) == 1


def test_the_rates_are_the_ones_trained_with():
    """At rate zero nothing may move, whatever AdamW was built with; decay included."""
    before = micro_model().state_dict()
    after = run(dataclasses.replace(KNOBS, learning_rate=0.0, weight_decay=0.5))[0].state_dict()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=0)


def test_weight_decay_shrinks_matrices_and_spares_norms():
    plain = run(dataclasses.replace(KNOBS, weight_decay=0.0))[0]
    decayed = run(dataclasses.replace(KNOBS, weight_decay=3.0))[0]
    size = {name: p.norm() for name, p in plain.named_parameters()}
    for name, parameter in decayed.named_parameters():
        if parameter.ndim == 2:
            assert parameter.norm() < size[name], name
        else:
            assert parameter.norm() > 0.7 * size[name], name


def test_clipping_bounds_the_gradient_and_zero_never_clips(monkeypatch):
    norms = []
    clip = Accelerator.clip_grad_norm_

    def spy(self, parameters, max_norm):
        parameters = list(parameters)
        total = clip(self, parameters, max_norm)
        norms.append(torch.stack([p.grad.norm() for p in parameters]).norm().item())
        return total

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", spy)
    run(dataclasses.replace(KNOBS, steps=4, clip=0.01))
    assert len(norms) == 4
    assert max(norms) <= 0.01 * 1.001
    run(dataclasses.replace(KNOBS, steps=4, clip=0))
    assert len(norms) == 4


def test_frozen_parameters_stay_and_the_model_comes_back_as_it_was():
    model = micro_model()
    frozen = model.model.layers[0].mlp
    frozen.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    forward = type(model).forward
    train(model, counting_windows(), dataclasses.replace(KNOBS, steps=3), accelerator=Accelerator(cpu=True))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("model.layers.0.mlp"), name
    assert not model.training
    assert model.forward.__func__ is forward, "accelerate's wrapper is gone"
    assert model.lm_head.weight is model.model.embed_tokens.weight, "still tied"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"log_every": 0}, "log_every is 0"),
        ({"decay": "cosin"}, "did you mean cosine"),
    ],
)
def test_knobs_out_of_range_are_named(change, words):
    with pytest.raises(UserError, match=words):
        dataclasses.replace(KNOBS, **change)


@pytest.mark.parametrize(
    "windows",
    [
        torch.arange(16),
        torch.zeros(0, 16, dtype=torch.long),
        torch.zeros(3, 1, dtype=torch.long),
        torch.zeros(3, 16),
    ],
)
def test_windows_of_the_wrong_kind_are_refused(windows):
    with pytest.raises(UserError, match="windows are"):
        train(micro_model(), windows, KNOBS, accelerator=Accelerator(cpu=True))


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step():
    model = micro_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="nan at step 10"):
        train(model, counting_windows(), KNOBS, accelerator=Accelerator(cpu=True))
