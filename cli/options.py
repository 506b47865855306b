"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..common.embedded import named_model
from ..common.loading import DTYPES, FLOATS
from ..common.typed import MOST

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


class Names(click.ParamType):
    """Names with commas between them, such as vllm,sglang; what they may be, the command says best."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in value.split(","))
        if not all(names):
            self.fail(f"{value!r} leaves a name empty; put one comma between names", param, ctx)
        return names


class Command(click.Command):
    """A command that looks at what its parameters name before it imports what it works with.

    A type may have a method `check`, which takes the value and those of all parameters, and raises a UserError. So what
    a path, a config or a header says wrong is told in the time that `kvfold --help` takes.
    """

    def invoke(self, ctx: click.Context) -> Any:
        for param in self.params:
            value = ctx.params.get(param.name or "")
            if (check := getattr(param.type, "check", None)) and value is not None:
                for number, one in enumerate(value if isinstance(value, tuple) else (value,)):
                    check(one, ctx.params, first=number == 0)
        return super().invoke(ctx)


@dataclass(frozen=True)
class Model(click.ParamType):
    """A directory, a GGUF file, a Hub id, or `embedded`.

    Attributes:
        weights: whether they are needed, beside the config.
        revised: whether --revision is of it, or of the first of several.
    """

    name: str = "model"
    weights: bool = True
    revised: bool = True

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return named_model(str(value))

    def check(self, value: str, params: Mapping[str, Any], *, first: bool) -> None:
        from ..common.sources import check_cached
        from ..convert.source import check_source

        revision = params.get("revision") if self.revised and first else None
        if check_source(value, revision, weights=self.weights) == "hub":
            check_cached(value, revision)


@dataclass(frozen=True)
class Text(click.ParamType):
    """A file, `builtin[:KIND]`, or `hub:NAME`.

    Attributes:
        or_none: whether `none` is a choice too.
    """

    name: str = "text"
    or_none: bool = False

    def check(self, value: str, params: Mapping[str, Any], *, first: bool) -> None:
        from ..common.text import NO_TEXT, check_text

        if not (self.or_none and value == NO_TEXT):
            check_text(value)


class Statistics(click.Path):
    """A file of `kvfold calibrate`."""

    def check(self, value: Path, params: Mapping[str, Any], *, first: bool) -> None:
        from ..convert.calibration.recognise import check_statistics

        check_statistics(value)


class NewStatistics(click.Path):
    """A file that `kvfold calibrate` is to write."""

    def check(self, value: Path, params: Mapping[str, Any], *, first: bool) -> None:
        from ..convert.calibration.recognise import check_new_statistics

        check_new_statistics(value, overwrite=params["overwrite"])


class NewFolder(click.Path):
    """A directory to create, which must not be there."""

    def check(self, value: Path, params: Mapping[str, Any], *, first: bool) -> None:
        from ..common.atomic import check_output

        check_output(value, overwrite=None)


count = Count()
model = Model()
result = Model(revised=False)
described = Model(weights=False)

as_json = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object.")
revision = click.option("--revision", help="Branch, tag or commit of a Hub id.")
source_revision = click.option("--revision", help="Branch, tag or commit of SRC, if it is a Hub id.")
text = click.option(
    "--text", type=Text(), multiple=True, required=True, help="A file, builtin[:KIND], or hub:NAME; may be repeated."
)
max_windows = click.option("--max-windows", type=count, help="Use only the first so many windows.")
batch_size = click.option("--batch-size", type=count, default=1, show_default=True, help="Does not change the result.")
device = click.option("--device", default="auto", show_default=True, help="Where to run: cpu, cuda, cuda:1, mps.")


_CALIBRATION = (
    click.option(
        "--calib",
        type=Text(or_none=True),
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
        "--no-fisher", "fisher", flag_value=False, default=True, help="Forward passes only: less time, worse results."
    ),
    click.option("--offload", is_flag=True, help="Hold one layer in memory at a time, for models that do not fit."),
)


_LEARNING = (
    *_CALIBRATION,
    click.option("--calib-batch-size", type=count, default=1, show_default=True, help="Windows at a time."),
    click.option("--calib-dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Run SRC in it."),
    click.option("--stats", type=Statistics(path_type=Path), help="A file of kvfold calibrate.  [made, and cached]"),
    click.option(
        "--refine",
        type=count,
        default=0,
        metavar="WINDOWS",
        help="Repair layers on so many windows; try 64.  [off]",
    ),
    click.option("--refine-passes", type=count, help="Passes over those windows.  [3 for heads, 1 for a latent]"),
    device,
)
_WRITING = (
    click.option("--dtype", type=click.Choice(FLOATS), help="Of the result's weights.  [the source's own]"),
    click.option("--max-shard-size", type=Size(), help="Such as 5GB.  [sharded as the source]"),
    click.option("--overwrite", is_flag=True, help="Replace the checkpoint at OUT, once the new one is whole."),
    click.option("--dry-run", is_flag=True, help="Check and plan everything, write nothing."),
    click.option("--no-hash", "hash", flag_value=False, default=True, help="Record no hashes in kvfold.json."),
    revision,
    as_json,
)


def calibration(command: Any) -> Any:
    """The options of every command that calibrates a model."""
    return _with(command, _CALIBRATION)


def learning(command: Any) -> Any:
    """The options of every conversion that calibrates, and may refine."""
    return _with(command, _LEARNING)


def writing(command: Any) -> Any:
    """The options of every command that writes a checkpoint."""
    return _with(command, _WRITING)


def _with(command: Any, options: tuple[Any, ...]) -> Any:
    for option in reversed(options):
        command = option(command)
    return command


def run_dtype(auto: str) -> Any:
    """The option --dtype of a command that runs a model; `auto` says what that value means to it."""
    choices = click.Choice(DTYPES)
    return click.option("--dtype", type=choices, default="auto", show_default=True, help=f"Run in it; auto is {auto}.")
