"""The held-out loss is the plain model's, whatever pieces it is computed in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

from kvfold.uptrain.data.store import Batch
from kvfold.uptrain.judge import held_out_losses
from kvfold.uptrain.objective import Trainee

from ..common.tiny import VOCABULARY, make_model


class Windows:
    """Windows of which each has another number of targets."""

    def __init__(self, name: str, windows: int, window: int = 12):
        self.name, self.windows, self.window = name, windows, window
        chance = torch.Generator().manual_seed(windows)
        self.ids = torch.randint(VOCABULARY, (windows, window), generator=chance)
        self.labels = self.ids.clone()
        for number in range(windows):
            self.labels[number, : 1 + 3 * number % (window - 1)] = -100

    def batch(self, indices) -> Batch:
        return Batch(self.ids[list(indices)], self.labels[list(indices)])

    def scored(self, indices) -> int:
        return int((self.labels[list(indices), 1:] != -100).sum())


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    return Trainee(make_model("llama", attention_dropout=0.3).double(), chunk=5)


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


PARTS = [Windows("prose", 7), Windows("code", 4)]


def plain_loss(trainee: Trainee, part: Windows, windows: int) -> float:
    """By the model's own logits, in one piece."""
    with torch.no_grad():
        logits = trainee.model.eval()(input_ids=part.ids[:windows]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), part.labels[:windows, 1:].flatten()).item()


@pytest.mark.parametrize("windows", [1, 3, 7, 100])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 5, 100])
def test_it_is_the_plain_models_loss(trainee, accelerator, windows, micro_batch_size):
    losses = held_out_losses(trainee, PARTS, accelerator, windows=windows, micro_batch_size=micro_batch_size)
    assert losses == pytest.approx({part.name: plain_loss(trainee, part, windows) for part in PARTS}, rel=1e-9)


class Rank:
    """One process's view of several, whose sums are added up by hand."""

    device = torch.device("cpu")

    def __init__(self, accelerator: Accelerator, process_index: int, num_processes: int):
        self.autocast = accelerator.autocast
        self.process_index, self.num_processes = process_index, num_processes

    def reduce(self, total: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return total


@pytest.mark.parametrize("processes", [2, 3, 5])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_shares_add_up_and_all_processes_go_forward_as_often(trainee, accelerator, processes, micro_batch_size):
    calls, shares = [], []
    hook = trainee.register_forward_hook(lambda *_: calls.append(1))
    for rank in range(processes):
        seen = Rank(accelerator, rank, processes)
        shares.append(held_out_losses(trainee, PARTS, seen, windows=100, micro_batch_size=micro_batch_size))
        calls.append(0)
    hook.remove()
    for part in PARTS:
        loss = plain_loss(trainee, part, part.windows)
        assert sum(share[part.name] for share in shares) == pytest.approx(loss, rel=1e-9)
    each = "".join(map(str, calls)).split("0")[:-1]
    assert len(set(each)) == 1, "or a sharded model would wait for ever"


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_is_put_back(trainee, accelerator, training):
    trainee.train(training)
    first, second = (
        held_out_losses(trainee, PARTS, accelerator, windows=4, micro_batch_size=2)["prose"] for _ in range(2)
    )
    assert first == second
    assert trainee.training == trainee.model.training == training
    assert all(parameter.grad is None for parameter in trainee.parameters())
