"""One step in one process and in the two that torchrun starts: `python -m tests.uptrain.sharded HOW FOLDER`."""

from __future__ import annotations

import copy
import itertools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kvfold.common.status import leave, status_of
from kvfold.uptrain.objective import Objective, Trainee
from kvfold.uptrain.selection import attention_modules, select
from kvfold.uptrain.teacher import Teacher

from ..common.tiny import VOCABULARY, make_model

CASES = list(itertools.product((False, True), ("attention", "all"), ("loss", "layers")))  # tied, train, stage


def make_pair(kind: str, **extra):
    """An fp64 student and a teacher that differs from it a little everywhere."""
    student = make_model(kind, **extra).double()
    teacher = copy.deepcopy(student)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return student, teacher


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [4, 24]; the rows have unequal numbers of targets."""
    ids = torch.randint(VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row in range(4):
        labels[row, : 1 + 5 * row] = -100
    return ids, labels


def by_ddp(trainee: Trainee) -> torch.nn.Module:
    return DistributedDataParallel(trainee)


def by_fsdp2(trainee: Trainee) -> torch.nn.Module:
    for layer in trainee.model.model.layers:
        fully_shard(layer)
    return fully_shard(trainee)


def by_accelerate(trainee: Trainee) -> torch.nn.Module:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW([p for p in trainee.parameters() if p.requires_grad])
    return accelerator.prepare(trainee, optimizer)[0]


def by_accelerate_fsdp2(trainee: Trainee) -> torch.nn.Module:
    """What accelerate does on GPUs. On CPU it passes over FSDP without a word, so its state has to be told."""
    Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    module = by_accelerate(trainee)
    assert isinstance(module, FSDPModule)
    assert isinstance(module.model.model.layers[0], FSDPModule)
    return module


WAYS = {"ddp": by_ddp, "fsdp2": by_fsdp2, "accelerate": by_accelerate, "accelerate_fsdp2": by_accelerate_fsdp2}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def step(trainee: Trainee, teacher: Teacher, stage: str, how: str = ""):
    """Sums over all processes, and gradients of the mean over all targets, by the student's names."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if how else (0, 1)
    ids, labels = (x[rank::size] for x in make_batch())
    module = WAYS[how](trainee) if how else trainee
    view = teacher.view(ids, layers=True)
    targets = int((make_batch()[1][:, 1:] != -100).sum())
    for _ in range(2):  # a second backward pass finds the first one's buckets and hooks as it should
        module.zero_grad()
        sums = module(ids, labels, view=view, stage=stage)
        (sums[0] * size / targets).backward()
    names = {name.removeprefix("module."): p for name, p in module.named_parameters()}
    grads = {name: whole(p.grad) for name, p in names.items() if p.requires_grad}
    with torch.no_grad():
        evaluated = module(ids, labels, view=view, stage="eval")
    sums = torch.cat([sums.detach(), evaluated])
    if how:
        dist.all_reduce(sums)
    return sums, grads


def run(how: str) -> dict:
    results = {}
    for tied, train, stage in CASES:
        student, teacher = make_pair("llama", tie_word_embeddings=tied)
        select(student, train)
        attention = attention_modules(student)
        trainee = Trainee(student, Objective(temperature=1.5, ce_share=0.3), attention, chunk=5)
        results[tied, train, stage] = step(trainee, Teacher(teacher, attention), stage, how)
    return results


def main() -> int:
    how, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    two = run(how)
    if os.environ["RANK"] == "0":
        torch.save(two, folder / "two")
        torch.save(run(""), folder / "one")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    # As kvfold itself does: torch now and then aborts while Python takes FSDP2 apart.
    leave(status_of(main))
