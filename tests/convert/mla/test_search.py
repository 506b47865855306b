"""The search for sizes: what loses least is measured, on windows that come after those calibrated on."""

import argparse
import inspect
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from kvfold.common.progress import silent
from kvfold.convert.calibration.calibrate import Runner
from kvfold.convert.calibration.knobs import Calibration
from kvfold.convert.calibration.text import CalibText
from kvfold.convert.mla.budget import Choice
from kvfold.convert.mla.convert import convert_mla
from kvfold.convert.mla.search import search
from kvfold.convert.source import open_source
from kvfold.convert.stream import Output

from .sources import WINDOW, make_source, save_source

WINDOWS = 4


@dataclass(frozen=True)
class Stub:
    outputs: list
    config: dict


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "argparse.txt"
    path.write_text(inspect.getsource(argparse)[:2000])
    return str(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A source, and a plain form of it in the same folder."""
    folder = tmp_path_factory.mktemp("search")
    src = save_source(make_source("llama", 2), folder / "src")
    convert_mla(src, folder / "plain", kv_rank=40, rope_dim=16, calib=["none"], form="plain")
    return src, folder / "plain"


@pytest.fixture
def runner(plain, text):
    with open_source(str(plain[0])) as source:
        yield Runner(source, Calibration(CalibText((text,), WINDOWS, WINDOW, builtin=False), dtype="float64"))


@pytest.fixture
def plan(plain):
    """A plan whose result gets worse, the further its rank is from 3."""
    with open_source(str(plain[1])) as source:
        checkpoint = source.checkpoint

        def noisy(choice):
            noise = abs(choice.kv_rank - 3)

            def spoilt(name):
                def make(_):
                    tensor = checkpoint.tensor(checkpoint.tensors[name]).clone()
                    if name.endswith("o_proj.weight"):
                        tensor *= 1 + noise
                    return tensor

                return make

            outputs = [
                # Nothing is read of the source: the plain form has its own tensors.
                Output(name, info.dtype, info.shape, (), spoilt(name))
                for name, info in checkpoint.tensors.items()
            ]
            return Stub(outputs, source.config.raw)

        yield noisy


def by_hand(path, windows, factor=1.0):
    """The mean cross entropy over all predicted tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    total = tokens = 0
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= factor
        for ids in windows:
            total += float(F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum"))
            tokens += len(ids) - 1
    return total / tokens


def test_the_best_is_first_and_all_are_measured(runner, plan, plain):
    candidates = [Choice("high", 8, rank) for rank in (5, 3, 9)]
    found, windows = search(runner, candidates, plan, 2, silent)
    assert windows == 2
    later = runner.windows(WINDOWS + 2).ids[WINDOWS:]
    assert len(later) == 2 and runner.source.config.full.max_position_embeddings >= 2 * WINDOW
    # One after the other in one long window, as far as the model's context goes.
    joined = torch.cat([later[0], later[1][1:]])  # without its BOS
    expected = {rank: by_hand(plain[1], [joined], 1 + abs(rank - 3)) for rank in (5, 3, 9)}
    assert [one.choice.kv_rank for one in found] == sorted(expected, key=expected.get)
    for one in found:
        assert one.loss == pytest.approx(expected[one.choice.kv_rank], rel=1e-6)
    assert len({round(one.loss, 3) for one in found}) == 3


def test_windows_not_calibrated_on(runner, plan, monkeypatch):
    read = []
    batches = type(runner.windows()).batches
    monkeypatch.setattr(type(runner.windows()), "batches", lambda self, size: read.append(self) or batches(self, size))
    search(runner, [Choice("high", 8, 3)], plan, 2, silent)
    (windows,) = read
    *calibrated, one, two = (ids.tolist() for ids in runner.windows(WINDOWS + 2).ids)
    assert calibrated == [ids.tolist() for ids in runner.windows().ids]
    assert [ids.tolist() for ids in windows.ids] == [one + two[1:]]


def test_short_text_is_read_again(runner, plan):
    """Where no windows are left, those calibrated on have to do."""
    runner.how = replace(runner.how, text=replace(runner.how.text, windows=1000))
    found, windows = search(runner, [Choice("high", 8, 3)], plan, 2, silent)
    assert found[0].loss > 0
    assert windows == 0


def test_progress_counts_layers_of_all_choices(runner, plan):
    seen = []

    @contextmanager
    def progress(label):
        yield lambda done, total: seen.append((label, done, total))

    search(runner, [Choice("high", 8, rank) for rank in (3, 4, 5)], plan, 1, progress)
    assert seen == [("searching", done, 6) for done in range(1, 7)]


def test_batches_do_not_matter(runner, plan):
    losses = []
    for size in (1, 3):
        runner.how = replace(runner.how, batch_size=size)
        losses.append(search(runner, [Choice("high", 8, 3)], plan, 3, silent)[0][0].loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
