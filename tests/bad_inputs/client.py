"""Run a case in a process of `server`."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import server
from .case import Case


@dataclass(frozen=True)
class Done:
    """What became of a command.

    Attributes:
        status: of its exit; negative if it hung.
        packages: what it had imported in the end.
        read: what read weights.
        megabytes: its memory at most, the interpreter's included.
        ratio: its time to the bare import's, which is part of it.
    """

    status: int
    stdout: str
    stderr: str
    packages: frozenset[str]
    read: list[str]
    megabytes: float
    ratio: float


class Server:
    """A process that has imported the command line and some more.

    Attributes:
        bare: seconds and megabytes of importing the command line alone.
    """

    def __init__(self, *preloaded: str):
        self.process = subprocess.Popen(
            [sys.executable, server.__file__, *preloaded], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.bare = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, case: Case, folder: Path) -> Done:
        """Run a command in a folder; what it prints goes to files beside that."""
        streams = {name: folder.parent / name for name in ("stdout", "stderr")}
        env = {"HF_HOME": str(folder.parent / "hub"), "HOME": str(folder.parent), "OMP_NUM_THREADS": "1"}
        request = {"args": case.args, "cwd": str(folder), "env": env, **{k: str(v) for k, v in streams.items()}}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self._answer()
        said = {name: path.read_text(encoding="utf-8") for name, path in streams.items()}
        bare = self.bare["seconds"]
        return Done(
            status=answer["status"],
            packages=frozenset(answer.get("packages", ())),
            read=answer.get("read", []),
            megabytes=answer["megabytes"],
            ratio=(bare + answer.get("seconds", 0)) / bare,
            **said,
        )

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
