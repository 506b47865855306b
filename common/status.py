"""From what a program does to its exit status, with one line on standard error where it fails.

0 done, 1 a check failed, 2 wrong input, 3 the machine failed, 70 our fault, 128 + N stopped by signal N.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from .errors import CheckFailed, EnvironmentFailure, KvfoldError, UserError
from .parallel import is_alone, is_first_here
from .shown import say, without_secrets

# The system's errors that say that a path cannot be, rather than that the machine failed.
_WRONG_PATH = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
# What torch says in the processes that are left when one of a group ends.
_LEFT_ALONE = r"gloo[/\\]transport|closed by peer|reset by peer|broken pipe|NCCL|remote process exited|store->get"
# What they say when the disk, or what one may write, is full.
_NO_ROOM = r"no space left|file too large|disk quota|inline_container.*(unexpected pos|failed writing)"
# Seconds that the first process gets to say what is wrong: a launcher stops all as soon as one has ended.
_TURN = 3.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal asked us to end. Not an Exception, so that nobody on the way takes it for an error.

    Args:
        number: of the signal.
        left: what the user finds afterwards.
    """

    def __init__(self, number: int, left: str = "nothing half-written is left"):
        super().__init__(number, left)
        self.number, self.left = number, left


def status_of(work: Callable[[], int]) -> int:
    """The exit status of work: what it returns, or what its failure stands for."""
    try:
        status = work()
        sys.stdout.flush()
        return status
    except Stopped as stopped:
        return fail(f"stopped; {stopped.left}", 128 + stopped.number)
    except KvfoldError as error:
        return fail(str(error), error.exit_status)
    except BrokenPipeError:  # whoever read our output has seen enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in _WRONG_PATH:
            return fail(f"this path cannot be used: {error}; name another", UserError.exit_status)
        return fail(f"the machine failed: {error}", EnvironmentFailure.exit_status)
    except Exception as error:
        if not is_alone() and re.search(_LEFT_ALONE, str(error), re.IGNORECASE):
            return fail("another process of this run ended; what it said tells why", EnvironmentFailure.exit_status)
        # torch has several ways to say it
        if isinstance(error, MemoryError) or re.search(r"out of memory|can't allocate memory", str(error)):
            return fail("the machine failed: out of memory", EnvironmentFailure.exit_status)
        if re.search(_NO_ROOM, str(error), re.IGNORECASE):  # torch and safetensors do not raise OSError
            return fail(f"the machine failed: no room to write ({error})", EnvironmentFailure.exit_status)
        print(without_secrets(traceback.format_exc()), end="", file=sys.stderr)
        return fail("this is a fault of kvfold; please report the lines above", KvfoldError.exit_status)


def fail(message: str, status: int) -> int:
    """Say in one line why it failed.

    Of several processes on one machine the first speaks for all about what they were given or told; about what befell
    one of them, it speaks itself. One that is told something wrong gives the first time to say so, and says it itself
    if nobody has ended the run by then.
    """
    wrong = status in (CheckFailed.exit_status, UserError.exit_status)
    if not is_first_here() and (wrong or status > 128):
        if not wrong:
            return status
        try:
            time.sleep(_TURN)
        except Stopped:  # by the launcher, as the first has spoken and ended
            return status
    say(" ".join(message.split()))
    return status


def prepare_process() -> None:
    """Before the work: signals unwind the stack, and standard streams that were closed lead nowhere."""
    for number in SIGNALS:
        signal.signal(number, stop)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")


def leave(status: int) -> NoReturn:
    """After the work: end the process."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()  # a report may stand before the error
    if "torch" in sys.modules:  # taking it down again costs a third of a second, and nobody is left to see it
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def stop(number: int, frame: object) -> NoReturn:
    """Unwind the stack, so that temporary directories go; a second signal changes nothing."""
    for again in SIGNALS:
        signal.signal(again, signal.SIG_IGN)
    raise Stopped(number)
