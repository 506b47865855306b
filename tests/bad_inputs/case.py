"""What a case is, and the commands that the catalogue is made of."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from .world import Spoil


@dataclass(frozen=True)
class Case:
    """A bad input.

    Attributes:
        name: what is wrong.
        spoil: how it gets so.
        command: what is typed after `kvfold`.
        culprit, way_out: what the line names.
        status: 2, or 3 where the machine is at fault.
        section: where in the catalogue it stands.
    """

    name: str
    spoil: Spoil
    command: str | tuple[str, ...]
    culprit: str
    way_out: str
    status: int = 2
    section: str = ""

    @property
    def args(self) -> list[str]:
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)

    def __str__(self) -> str:
        told = " ".join(self.args).encode("ascii", "backslashreplace").decode()
        told = "".join(sign if sign.isprintable() else "?" for sign in told)
        return f"{self.section}: {self.name} [{told if len(told) < 90 else f'{told[:87]}...'}]"


INSPECT = "inspect src"
GQA = "convert gqa src out --kv-heads 1"
MLA = "convert mla src out --kv-elements 8"
PLAIN = "convert plain src out"
CALIBRATE = "calibrate src -o stats"
PPL = "eval ppl src --text text.txt"
CHECK = "check src --engine vllm"
# Every command that takes a checkpoint, with one at `src`.
COMMANDS = {
    "inspect": INSPECT,
    "gqa": GQA,
    "mla": MLA,
    "plain": PLAIN,
    "calibrate": CALIBRATE,
    "verify": "verify src other --text text.txt",
    "verify's OUT": "verify other src --text text.txt",
    "check": CHECK,
    "uptrain": "uptrain model=src out=out steps=1",
    "uptrain's teacher": "uptrain model=other teacher=src out=out steps=1",
    "ppl": PPL,
    "cache": "eval cache src",
    "compare": "eval compare src other --text text.txt",
    "compare's OUT": "eval compare other src --text text.txt",
    "long": "eval long src --text text.txt",
    "speed": "eval speed other src",
    "flops": "eval flops src --context 8",
    "memory": "eval memory src --context 8",
    "tasks": "eval tasks src --task task.yaml",
    "report": "report src other -o out",
    "report's OUT": "report other src -o out",
    "plan": "plan src",
    "run": "run recipe.yaml -o out",
    "publish": "publish src me/it --dry-run --folder out --license mit",
}
NO_WEIGHTS = ("flops", "memory", "plan")  # these read the config alone

COPY = "copy it again from its source"
FETCH = "fetch it again"
