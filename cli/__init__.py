"""The command line: thin commands over the Python API, one contract for output and exit statuses.

Standard output carries the result and nothing else; progress, logs and errors go to standard error. Commands
import what they need when they run, so that `kvfold --help` needs neither torch nor transformers.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click

from .. import __version__
from ..common.errors import EnvironmentFailure, KvfoldError, UserError
from .calibrate import calibrate
from .check import check
from .convert import convert
from .demo import demo
from .eval import evaluate
from .inspect import inspect
from .verify import verify

# The system's errors that say that a path cannot be, rather than that the machine failed.
_WRONG_PATH = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}


class _Stopped(BaseException):
    """A signal asked us to end. Not an Exception, so that nobody on the way takes it for an error."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvfold")
def kvfold() -> None:
    """Fold the key/value cache of pretrained language models."""


for command in (inspect, calibrate, convert, check, verify, evaluate, demo):
    kvfold.add_command(command)


def main() -> NoReturn:
    """Run `kvfold` and exit: 0 done, 1 a check failed, 2 wrong input, 3 the machine failed, 70 our fault."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")
    status = _run()
    with suppress(BrokenPipeError):
        sys.stdout.flush()  # a report may stand before the error
    if "torch" in sys.modules:  # taking it down again costs a third of a second, and nobody is left to see it
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _run() -> int:
    try:
        # Not kvfold.main(), which has statuses and lines of its own for interrupts and closed pipes.
        with kvfold.make_context("kvfold", sys.argv[1:]) as context:
            kvfold.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.UsageError as error:
        help_of = error.ctx.command_path if error.ctx else "kvfold"
        return _fail(f"{error.format_message().rstrip('.')}. See {help_of} --help.", 2)
    except _Stopped as stopped:
        return _fail("stopped; nothing half-written is left", 128 + stopped.args[0])
    except KvfoldError as error:
        return _fail(str(error), error.exit_status)
    except BrokenPipeError:  # whoever read our output has seen enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in _WRONG_PATH:
            return _fail(f"this path cannot be used: {error}", UserError.exit_status)
        return _fail(f"the machine failed: {error}", EnvironmentFailure.exit_status)
    except Exception as error:
        # torch has several ways to say it
        if isinstance(error, MemoryError) or re.search(r"out of memory|can't allocate memory", str(error)):
            return _fail("the machine failed: out of memory", EnvironmentFailure.exit_status)
        traceback.print_exc()
        return _fail("this is a fault of kvfold; please report the lines above", KvfoldError.exit_status)


def _fail(message: str, status: int) -> int:
    print(f"kvfold: {' '.join(message.split())}", file=sys.stderr)
    return status


def _stop(number: int, frame: object) -> NoReturn:
    """Unwind the stack, so that temporary directories go; a second signal changes nothing."""
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, signal.SIG_IGN)
    raise _Stopped(number)
