"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import re
from typing import Any

import click

from ..common.loading import DTYPES

MOST = 2**53  # more of anything than a machine holds, and exact as a float
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class Count(click.ParamType):
    """A whole number that a machine can count to; what it may be beyond that, the command says best."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value[:20]!r} is not a whole number", param, ctx)
        if abs(number) > MOST:
            self.fail(f"{value[:20]}... is more than there is of anything", param, ctx)
        return number


class Size(click.ParamType):
    """A number of bytes, such as 500000, 200MB or 2GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", value.strip().lower())
        if not match:
            self.fail(f"{value!r} is not a size; write 500000, 200MB or 2GiB", param, ctx)
        if (size := float(match[1]) * _UNITS[match[2] or ""]) > MOST:
            self.fail(f"{value[:20]}... is more bytes than there are", param, ctx)
        return int(size)


count = Count()

as_json = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object.")
revision = click.option("--revision", help="Branch, tag or commit of a Hub id.")
device = click.option("--device", default="auto", show_default=True, help="Where to run: cpu, cuda, cuda:1, mps.")


_CALIBRATION = (
    click.option(
        "--calib",
        multiple=True,
        metavar="TEXT",
        help="Calibrate on a file, builtin[:KIND], hub:NAME, or none; may be repeated.  [builtin]",
    ),
    click.option("--calib-windows", type=count, default=64, show_default=True, help="Windows of text to calibrate on."),
    click.option("--calib-window", type=count, help="Tokens a window.  [512, or the model's context if smaller]"),
    click.option(
        "--no-calib-builtin",
        "calib_builtin",
        flag_value=False,
        default=True,
        help="Do not mix the built-in text into the text of --calib.",
    ),
    click.option("--chat", is_flag=True, help="Calibrate on the text as the tokenizer's chat template renders it."),
    click.option(
        "--no-fisher", "fisher", flag_value=False, default=True, help="Forward passes only: less time, worse merges."
    ),
    click.option("--offload", is_flag=True, help="Hold one layer in memory at a time, for models that do not fit."),
)


def calibration(command: Any) -> Any:
    """The options of every command that calibrates a model."""
    for option in reversed(_CALIBRATION):
        command = option(command)
    return command


def run_dtype(auto: str) -> Any:
    """The option --dtype of a command that runs a model; `auto` says what that value means to it."""
    choices = click.Choice(DTYPES)
    return click.option("--dtype", type=choices, default="auto", show_default=True, help=f"Run in it; auto is {auto}.")
