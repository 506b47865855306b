"""The command line: thin commands over the Python API, one contract for output and exit statuses.

Standard output carries the result and nothing else; progress, logs and errors go to standard error. Commands
import what they need when they run, so that `kvfold --help` needs neither torch nor transformers.
"""

from __future__ import annotations

import signal
import sys
import traceback
from typing import NoReturn

import click

from .. import __version__
from ..common.errors import EnvironmentFailure, KvfoldError
from .convert import convert
from .demo import demo
from .eval import evaluate
from .inspect import inspect

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvfold")
def kvfold() -> None:
    """Fold the key/value cache of pretrained language models."""


for command in (inspect, convert, evaluate, demo):
    kvfold.add_command(command)


def main() -> NoReturn:
    """Run `kvfold` and exit: 0 done, 1 a check failed, 2 wrong input, 3 the machine failed, 70 our fault."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(_run())


def _run() -> int:
    try:
        kvfold.main(standalone_mode=False)
        return 0
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.UsageError as error:
        help_of = error.ctx.command_path if error.ctx else "kvfold"
        return _fail(f"{error.format_message()} See {help_of} --help.", 2)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted; nothing half-written is left", INTERRUPTED)
    except KvfoldError as error:
        return _fail(str(error), error.exit_status)
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stderr.close()
        return 0
    except (OSError, MemoryError) as error:
        return _fail(f"the machine failed: {error or 'out of memory'}", EnvironmentFailure.exit_status)
    except Exception as error:
        if "out of memory" in str(error).lower() or "can't allocate memory" in str(error):  # torch's
            return _fail("the machine failed: out of memory; try a narrower --dtype", EnvironmentFailure.exit_status)
        traceback.print_exc()
        return _fail("this is a fault of kvfold; please report the lines above", KvfoldError.exit_status)


def _fail(message: str, status: int) -> int:
    print(f"kvfold: {' '.join(message.split())}", file=sys.stderr)
    return status


def _terminate(number: int, frame: object) -> NoReturn:
    raise SystemExit(TERMINATED)  # unwinds the stack, so that temporary directories go
