"""`kvfold eval`: judge a model."""

from __future__ import annotations

import click

from .cache import cache
from .calculators import flops, memory
from .compare import compare
from .long import long
from .ppl import ppl
from .speed import speed
from .tasks import tasks


@click.group("eval")
def evaluate() -> None:
    """Judge a model: quality, cache, speed."""


for command in (ppl, cache, compare, long, speed, flops, memory, tasks):
    evaluate.add_command(command)
