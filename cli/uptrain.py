"""`kvfold uptrain`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ..common.errors import UserError
from ..common.output import print_report
from . import options


@click.command(cls=options.Command)
@click.argument("words", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...")
@click.option("--accelerate", metavar="NAME|FILE", help="How to spread it: ddp, fsdp2, ..., or a file.")
@click.option("--num-processes", type=options.count, help="Over all machines.  [one a GPU, or one on a CPU]")
@click.option("--dry-run", is_flag=True, help="Say what it will take: parameters, memory, steps, time.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at out, once the new one is whole.")
@click.option("--keys", is_flag=True, help="List the keys of a recipe as YAML, with defaults and meanings.")
@options.as_json
@click.pass_context
def uptrain(
    context: click.Context,
    words: tuple[str, ...],
    accelerate: str | None,
    num_processes: int | None,
    dry_run: bool,
    overwrite: bool,
    keys: bool,
    as_json: bool,
) -> None:
    """Heal a converted model by training, on one or many devices.

    CONFIG is a recipe in YAML; KEY=VALUE sets one of its keys. It may be left out where model=..., out=... and a
    budget such as tokens=... are given. A run that was stopped is taken up again by the same command.
    """
    if keys:
        _print_keys(as_json)
        return
    from ..uptrain.launch import launch_command, launch_run

    config, overrides = _split(words)
    overrides += ["overwrite=true"] * overwrite
    command = launch_command(
        config, overrides, accelerate=accelerate, num_processes=num_processes, dry_run=dry_run, as_json=as_json
    )
    context.exit(launch_run(command))


def _print_keys(as_json: bool) -> None:
    from ..uptrain.keys import recipe_keys

    known = recipe_keys()
    if as_json:
        print_report({"keys": [asdict(key) for key in known]}, as_json=True)
        return
    for key in known:
        one_of = f" One of {', '.join(key.choices)}." if key.choices else ""
        click.echo(f"{f'{key.name}: {key.default}'.rstrip()}  # {key.meaning}{one_of}")


def _split(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """The recipe's file, if there is one, and the pairs."""
    config, pairs = None, list(words)
    if words and ("=" not in words[0] or Path(words[0]).is_file()):
        config, *pairs = words
    if wrong := [word for word in pairs if "=" not in word]:
        raise UserError(f"{wrong[0]!r} is neither the recipe, which comes first, nor a pair; write key=value")
    return config, pairs
