"""The processes that one command runs in: one, or as many as `accelerate launch` or `torchrun` started."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from .errors import EnvironmentFailure, KvfoldError
from .sources import first_line

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")

PATIENCE = timedelta(minutes=5)  # for the slowest process to come; torch itself would wait half an hour


def promised_size() -> int:
    """How many processes the launcher says that there are; 1 without one.

    Raises:
        EnvironmentFailure: it says no number.
    """
    said = os.environ.get("WORLD_SIZE") or "1"
    try:
        return int(said)
    except ValueError:
        raise EnvironmentFailure(f"WORLD_SIZE is {said!r}, which is not a number; unset it") from None


def is_main_process() -> bool:
    """Whether this is the process that writes and reports: the only one, or the launcher's first."""
    return _is_first("RANK")


def is_first_here() -> bool:
    """Whether this is the launcher's first process on this machine, or the only one."""
    return _is_first("LOCAL_RANK")


def is_alone() -> bool:
    """Whether no launcher promises other processes."""
    return os.environ.get("WORLD_SIZE", "") in ("", "0", "1")


def _is_first(name: str) -> bool:
    # A number that somebody left behind says nothing where there is one process.
    return is_alone() or os.environ.get(name, "0") in ("", "0")


class Workers:
    """All processes of a run, seen from one of them.

    Args:
        device: where the user wants to compute; with several processes, each takes the accelerator of its number.

    Attributes:
        rank, size: this process's number, and how many there are.
        device: where this process computes.

    Raises:
        EnvironmentFailure: the launcher promised more processes than found each other.
    """

    def __init__(self, device: str):
        self.rank, self.size, self.device = 0, 1, device
        if (promised := promised_size()) == 1:
            return
        import torch
        from accelerate import PartialState
        from torch.distributed import rendezvous

        on_cpu = torch.device(device).type == "cpu"
        found, why = 1, ""
        try:
            meeting = next(rendezvous("env://", timeout=PATIENCE))  # kept while accelerate meets at the same place
            state = PartialState(cpu=on_cpu)
            found = state.num_processes
            del meeting
        except (RuntimeError, ValueError) as error:  # those who do not come, and what the launcher did not say
            why = f" ({first_line(error)})"
        if found != promised:
            raise EnvironmentFailure(
                f"{promised} processes were promised and {found} found each other{why}; launch with torchrun "
                f"--nproc_per_node {promised}, or unset WORLD_SIZE"
            )
        # Threads of the group that outlive the interpreter can abort a process that has done all its work.
        atexit.register(state.destroy_process_group)
        self.rank, self.size = state.process_index, state.num_processes
        if not on_cpu:
            self.device = str(state.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size == 1:
            return tensor
        from accelerate.utils import reduce

        return reduce(tensor, "sum")

    def agree(self, answer: bool) -> bool:
        """What the main process answers."""
        if self.size == 1:
            return answer
        import torch

        return bool(self.sum(torch.tensor(int(answer and self.rank == 0), device=self.device)))

    def spread(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """What `work` makes of each item, in the order of the items, in every process; they take items by turns.

        Args:
            work: gives something that can be pickled.

        Raises:
            KvfoldError: `work` raised it, in whichever process.
        """
        if self.size == 1:
            return [work(item) for item in items]
        from accelerate.utils import gather_object

        made: list[R] = []
        failure = None
        try:
            made.extend(map(work, items[self.rank :: self.size]))
        except KvfoldError as error:  # said by all, or the others would wait for what does not come
            failure = error
        told = gather_object([(made, failure)])
        for _, failure in told:
            if failure:
                raise failure
        return [told[number % self.size][0][number // self.size] for number in range(len(items))]

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
