"""The command line: thin commands over the Python API, one contract for output and exit statuses.

Standard output carries the result and nothing else; progress, logs and errors go to standard error. Commands
import what they need when they run, so that `kvfold --help` needs neither torch nor transformers.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from .. import __version__
from ..common.launcher import end_with_launcher
from ..common.status import fail, leave, prepare_process, status_of
from .calibrate import calibrate
from .check import check
from .convert import convert
from .demo import demo
from .eval import evaluate
from .inspect import inspect
from .plan import plan
from .publish import publish
from .recipes import recipes
from .report import report
from .run import run
from .uptrain import uptrain
from .verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvfold")
def kvfold() -> None:
    """Fold the key/value cache of pretrained language models."""


_COMMANDS = (inspect, plan, calibrate, convert, check, uptrain, verify, evaluate, report, recipes, run, publish, demo)
for command in _COMMANDS:
    kvfold.add_command(command)


def main() -> NoReturn:
    """Run `kvfold` and exit, with a status of `common.status`."""
    prepare_process()
    end_with_launcher()
    leave(status_of(_run))


def _run() -> int:
    try:
        # Not kvfold.main(), which has statuses and lines of its own for interrupts and closed pipes.
        with kvfold.make_context("kvfold", sys.argv[1:]) as context:
            kvfold.invoke(context)
        return 0
    except click.exceptions.Exit as done:  # --help and --version
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.UsageError as error:
        help_of = error.ctx.command_path if error.ctx else "kvfold"
        return fail(f"{error.format_message().rstrip('.')}. See {help_of} --help.", 2)
