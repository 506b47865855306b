"""The processes that one command runs in: one, or as many as `accelerate launch` or `torchrun` started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .errors import EnvironmentFailure

if TYPE_CHECKING:
    from torch import Tensor


def is_main_process() -> bool:
    """Whether this is the process that writes and reports: the only one, or the launcher's first."""
    return os.environ.get("RANK", "0") == "0"


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
        if (promised := int(os.environ.get("WORLD_SIZE", "1"))) == 1:
            return
        import torch
        from accelerate import PartialState

        state = PartialState(cpu=torch.device(device).type == "cpu")
        if state.num_processes != promised:
            raise EnvironmentFailure(
                f"{promised} processes were launched and {state.num_processes} found each other; on CPUs launch with "
                "torchrun --nproc_per_node N"
            )
        self.rank, self.size, self.device = state.process_index, state.num_processes, str(state.device)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        if self.size == 1:
            return tensor
        from accelerate.utils import reduce

        return reduce(tensor, "sum")

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
