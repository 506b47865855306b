"""The benchmarks of uptraining run, and their two sides do the same work; the figures are for machines at rest."""

import dataclasses
import math

import pytest
import torch

from kvfold.common.errors import CheckFailed
from kvfold.recipes.bench import gpu_uptrain, sides, uptrain
from kvfold.uptrain.selection import select

LLAMA = {**gpu_uptrain.LLAMA, **gpu_uptrain.TINY, "max_position_embeddings": 32}
JOB = sides.Job(
    side="kvfold",
    model=gpu_uptrain.grouped(LLAMA),
    train="all",
    precision="fp32",
    device="cpu",
    batch=2,
    window=16,
    block=2,
    blocks=2,
)


def table(said: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines() if line[:1] == "|"]


def take(job: sides.Job) -> tuple[float, list, torch.nn.Module]:
    """The mean loss of one side in this process, what it said on the way, and its model."""
    said = []
    model = sides.make_model(job.model, job.device)
    select(model, job.train)
    loss = sides.SIDES[job.side](job, model, sides.Pace(job, said.append, lambda: said.append("waits")))
    return loss, said, model


def test_both_sides_do_the_same_work():
    loss, said, ours = take(JOB)
    other, heard, theirs = take(dataclasses.replace(JOB, side="Trainer"))
    assert loss == pytest.approx(other, rel=1e-6)
    start = sides.make_model(JOB.model, "cpu").state_dict()
    for name, parameter in ours.named_parameters():
        # Four steps, as what was learnt counts, not what was there before.
        torch.testing.assert_close(parameter - start[name], theirs.get_parameter(name) - start[name], rtol=0, atol=1e-6)
        assert not parameter.equal(start[name])
    for answers in (said, heard):
        assert [answer for answer in answers if isinstance(answer, str)] == ["ready", "waits", "waits", "waits"]
        assert all(answer > 0 for answer in answers if isinstance(answer, float))
        assert len(answers) == 6


def test_a_side_that_fails_says_why():
    with pytest.raises(CheckFailed, match="the side nobody ended early: KeyError: 'nobody'"):
        sides.Side(dataclasses.replace(JOB, side="nobody"))


@pytest.mark.parametrize(("form", "widths"), [("GQA", 16 + 16), ("MLA", (16 + 8) + 16)])
@pytest.mark.parametrize("train", ["all", "attention"])
def test_operations_of_a_token_are_counted(form, widths, train):
    model = sides.make_model(gpu_uptrain.FORMS[form](LLAMA), "cpu")
    select(model, train)
    attention = sum(p.numel() for name, p in model.named_parameters() if ".self_attn." in name)
    others = 2 * 3 * 64 * 128 + 64 * 512  # the MLPs, and the head that is tied to the embedding
    expected = 6 * attention + (6 if train == "all" else 4) * others + 6 * 2 * 4 * widths // 2 * 100
    assert sides.token_flops(model, 100) == expected


def test_the_latent_form_caches_half_of_the_grouped_one():
    grouped, latent = gpu_uptrain.grouped(gpu_uptrain.LLAMA), gpu_uptrain.latent(gpu_uptrain.LLAMA)
    elements = 2 * grouped["num_key_value_heads"] * grouped["head_dim"]
    assert (grouped["num_key_value_heads"], elements) == (8, 1024)
    assert latent["kv_lora_rank"] + latent["qk_rope_head_dim"] == elements // 2


@pytest.mark.parametrize(
    ("name", "peak"),
    {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989e12,
        "NVIDIA GH200 480GB": 989e12,
        "NVIDIA H20": 148e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A10": 125e12,
        "NVIDIA A10G": 70e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA L4": 121e12,
        "Quadro": None,
    }.items(),
)
def test_the_peak_is_that_of_the_device(name, peak):
    assert gpu_uptrain.peak_flops(name) == peak


SMALL = "--vocabulary 300 --hidden 32 --intermediate 48 --layers 2 --heads 4 --kv-heads 2 --batch 2 --window 16"


def test_it_prints_both_loops_and_what_a_teacher_costs(capsys, monkeypatch):
    monkeypatch.setattr("kvfold.common.scoring.CPU_CHUNK_ELEMENTS", 1600)
    uptrain.main(["--train", "all", "--teacher", "--runs", "2", *SMALL.split()])
    trainer, kvfold, cost = (row for row in table(capsys.readouterr().out) if "all" in row[0])
    assert [trainer[1], kvfold[1]] == ["Trainer", "kvfold"]
    for row in (trainer, kvfold):
        slowest, median, fastest = (float(row[i]) for i in (3, 2, 4))
        assert 0 < slowest <= median <= fastest
        assert 100 < float(row[6]) < 4000  # a process with torch
    assert trainer[5] == "1.00"
    assert float(kvfold[5]) > 0
    assert float(kvfold[7]) == pytest.approx(float(trainer[6]) - float(kvfold[6]), abs=1.01)
    assert trainer[9] == kvfold[9], "the same loss, to five places"
    assert abs(float(kvfold[9]) - math.log(300)) < 0.5
    assert all(float(cell) >= 0 for cell in cost[1:])
    assert len(cost) == 5


def test_a_ratio_is_the_median_of_those_of_every_turn(monkeypatch, capsys):
    seconds = {
        "Trainer": [1.0, 4.0, 30.0],
        "kvfold": [2.0, 2.0, 10.0],
        "kvfold with a teacher": [3.0, 9.0, 22.0],
        "forward": [1.0, 4.0, 10.0],
    }
    end = sides.Ending("cpu", 1.0, 10**9, 10**9, 4 * 10**6, 10**6, 3 * 10**6)
    monkeypatch.setattr(uptrain, "measure", lambda jobs: (seconds, dict.fromkeys(jobs, end)))
    uptrain.main(["--train", "all", "--teacher", *SMALL.split()])
    trainer, kvfold, cost = (row for row in table(capsys.readouterr().out) if "all" in row[0])
    assert (trainer[5], kvfold[5]) == ("1.00", "2.00")  # of 1/2, 4/2 and 30/10
    assert cost == ["all", "2.00", "4.00", "9.00", "1.10"]  # of 3/3, 9/6 and 22/20


def test_logits_that_are_not_held_are_those_beyond_one_chunk(monkeypatch):
    monkeypatch.setattr("kvfold.common.scoring.CPU_CHUNK_ELEMENTS", 1000)
    assert uptrain.saved_bytes(JOB) == 4 * (2 * 16 * 512 - 1000)
    monkeypatch.setattr("kvfold.common.scoring.CPU_CHUNK_ELEMENTS", 2 * 16 * 512)
    assert uptrain.saved_bytes(JOB) == 0


def test_the_gpu_script_runs_on_a_cpu(capsys):
    options = "--tiny --device cpu --forms MLA --steps 10 --batch 2 --window 16 --peak-tflops 0.001"
    gpu_uptrain.main(options.split())
    trainer, kvfold = table(capsys.readouterr().out)[2:]
    for row, name in ((trainer, "Trainer"), (kvfold, "kvfold")):
        assert (row[0], row[2], row[-1]) == ("MLA", name, "cpu")
        assert float(row[3].replace(",", "")) > 0
        assert float(row[5].rstrip("%")) > 0
    assert trainer[4] == "1.00"
    assert float(trainer[7]) == pytest.approx(float(kvfold[7]), abs=2e-3)  # bf16


def test_the_gpu_script_goes_on_after_a_side_that_failed(capsys, monkeypatch):
    def measure(job):
        if job.side == "Trainer":
            raise CheckFailed("the side Trainer ended early: out of memory")
        return 2.0, sides.Ending("cpu", 1.0, 10**9, 10**9, 4 * 10**6, 10**6, 3 * 10**6)

    monkeypatch.setattr(gpu_uptrain, "measure", measure)
    options = "--tiny --device cpu --forms GQA --steps 100 --batch 2 --window 50 --peak-tflops 0.003"
    gpu_uptrain.main(options.split())
    failed, done = table(capsys.readouterr().out)[2:]
    assert failed[3] == "the side Trainer ended early: out of memory"
    # 10 steps of 100 tokens in 2 seconds; 500 tokens/s x 3 Mop are half of 3 Gop/s.
    assert done == ["GQA", "4.0 M, 1.0 M trained", "kvfold", "500", "", "50.0%", "1.00", "1.00000", "cpu"]
