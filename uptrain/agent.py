"""Run accelerate's launcher or torchrun, and end as the first of their processes that failed did.

`python -m kvfold.uptrain.agent accelerate|torchrun ARGUMENTS`. By themselves both end with status 1 and a page of
their own whatever happened, so that wrong input, a full disk and a fault of ours would all look the same.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from ..common.launcher import LAUNCHER, end_with_launcher

STOPPED = 128  # and the number of the signal, as a shell says it


def run_launcher(launcher: str, arguments: Sequence[str]) -> int:
    """Run a launcher in this process; see `LAUNCHERS`.

    Returns:
        0 if all processes ended well, else the status of the first that did not, or 128 + the number of the signal
        that ended it, or that ended the launcher.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What it logs of a failure is what the process itself has said, at length.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        LAUNCHERS[launcher](arguments)
    except ChildFailedError as error:
        first = error.get_first_failure()[1].exitcode
        # Those that were still running are ended by a signal; that is not why the run failed.
        said = [failure.exitcode for failure in error.failures.values() if failure.exitcode > 0]
        return first if first > 0 else said[0] if said else STOPPED - first
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode > 0 else STOPPED - error.returncode
    except SignalException as stopped:
        return STOPPED + int(stopped.sigval)
    return 0


def _accelerate(arguments: Sequence[str]) -> None:
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(arguments))


def _torchrun(arguments: Sequence[str]) -> None:
    from torch.distributed import run

    run.run(run.parse_args(arguments))


LAUNCHERS: dict[str, Callable[[Sequence[str]], None]] = {"accelerate": _accelerate, "torchrun": _torchrun}


if __name__ == "__main__":
    end_with_launcher()
    os.environ[LAUNCHER] = str(os.getpid())
    sys.exit(run_launcher(sys.argv[1], sys.argv[2:]))
