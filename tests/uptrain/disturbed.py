"""One process of runs that something happens to: `python -m tests.uptrain.disturbed PLAN key=value ... [-- ...]`.

PLAN is a JSON list of [what, step], of which each time that torchrun starts the processes takes the next; what is a
name in `DISTURBANCES`, and step counts those that are done by then. After the plan's end nothing happens any more.
Several recipes, parted by `--`, run one after the other.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
from collections.abc import Callable
from itertools import groupby

from accelerate import Accelerator

from kvfold.common.status import leave, prepare_process, status_of
from kvfold.uptrain.__main__ import main
from kvfold.uptrain.loop import Training
from kvfold.uptrain.objective import Trainee


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_backward(act: Callable[[int, bool], None]) -> None:
    """Call something before each micro-batch, with the steps that are done and whether it is the step's last."""
    backward = Training._backward

    def disturbed(self, indices, stage, weight, last):
        act(self.step, last)
        return backward(self, indices, stage, weight, last)

    Training._backward = disturbed


def kill_in_a_step(step: int) -> None:
    before_backward(lambda done, last: die() if done == step and last else None)


def kill_in_a_save(step: int) -> None:
    """When the weights lie there, and not yet the marker."""
    save_state = Accelerator.save_state

    def disturbed(self, folder):
        save_state(self, folder)
        if f"{step:08d}" in folder:
            die()

    Accelerator.save_state = disturbed


def send_a_signal(step: int) -> None:
    """To the launcher; the step goes on when it was handed on."""
    arrived, sent = os.pipe()
    os.set_blocking(sent, False)
    signal.set_wakeup_fd(sent)

    def act(done: int, last: bool) -> None:
        if done == step and last:
            if os.environ["RANK"] == "1":
                os.kill(os.getppid(), signal.SIGTERM)
            select.select([arrived], [], [], 60)

    before_backward(act)


def break_the_loss(step: int) -> None:
    """Of the second process alone."""
    now, forward = [0], Trainee.forward

    def disturbed(self, *arguments, **named):
        sums = forward(self, *arguments, **named)
        return sums * math.nan if self.training and now[0] == step and os.environ["RANK"] == "1" else sums

    before_backward(lambda done, last: now.__setitem__(0, done))
    Trainee.forward = disturbed


DISTURBANCES = {
    "kill in a step": kill_in_a_step,
    "kill in a save": kill_in_a_save,
    "signal": send_a_signal,
    "nan": break_the_loss,
}


def run_all() -> int:
    plan, start = json.loads(sys.argv[1]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if start < len(plan):
        what, step = plan[start]
        DISTURBANCES[what](step)
    recipes = [list(pairs) for parting, pairs in groupby(sys.argv[2:], "--".__eq__) if not parting]
    return max(main(pairs) for pairs in recipes)


if __name__ == "__main__":
    prepare_process()
    leave(status_of(run_all))
