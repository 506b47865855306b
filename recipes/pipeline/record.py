"""`run.json`: what each step of a run was asked for, what it took, and what it made, by content.

A file's hash is kept with its size, time and inode, and worked out again only when one of them has changed, or when it
is asked for anew: bits that turn over on a disk change none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ... import __version__
from ...common.atomic import output_file
from ...common.errors import UserError
from ...common.raw_config import read_json
from ...common.typed import MOST
from ...convert.sidefiles import hash_files

NAME = "run.json"
FORMAT_VERSION = 1
State = Literal["running", "done", "failed"]


@dataclass
class Step:
    """What is known of one step.

    Attributes:
        stage: of the pipeline.
        state: `running` also where it was killed.
        command: as a user would type it.
        asked: what its result is a function of: settings, and the content of its inputs.
        replaced: the content of what stood at its output when it began; empty if nothing did.
        made: the content of what it made.
        attempts: how often it was started.
        seconds: of all attempts.
        status: the exit status that it failed with.
        process: the number of the process that was started last.
    """

    stage: str
    state: State
    command: str
    asked: dict[str, Any]
    replaced: str = ""
    made: str = ""
    attempts: int = 0
    seconds: float = 0.0
    status: int = 0
    process: int = 0


@dataclass
class Record:
    """What is known of a run.

    Attributes:
        recipe: its name.
        commits: of the Hub ids that it began with, by id and revision: it goes on with them, wherever a branch leads.
        steps: by name, in order.
        files: hashes by path, with what they were worked out for.
        seen: the paths whose hashes this process has worked out; not kept.
    """

    folder: Path
    recipe: str
    commits: dict[str, str] = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)
    files: dict[str, list[Any]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, folder: Path, recipe: str) -> Record:
        """What is known of a run in a folder; of one that has not begun, nothing.

        Raises:
            UserError: `run.json` is broken, or of another version.
        """
        path = folder / NAME
        if not path.exists():
            return cls(folder, recipe)
        broken = UserError(f"{path} is broken; name another folder with -o, or move {folder} away")
        try:
            said = read_json(path, "record of a run")
        except UserError:  # whose way out is a copy, and there is no other
            raise broken from None
        try:
            if said["format_version"] != FORMAT_VERSION:
                raise UserError(f"{path} is of version {said['format_version']}; this kvfold reads {FORMAT_VERSION}")
            steps = {name: _step(values) for name, values in said["steps"].items()}
            commits = {str(key): str(value) for key, value in said["commits"].items()}
            files = {str(key): list(value) for key, value in said["files"].items()}
        except UserError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
            raise broken from None
        return cls(folder, recipe, commits, steps, files)

    def save(self) -> None:
        """Write it; whole or not at all."""
        said = {
            "format_version": FORMAT_VERSION,
            "kvfold_version": __version__,
            "recipe": self.recipe,
            "seconds": sum(step.seconds for step in self.steps.values()),
            "commits": self.commits,
            "steps": {name: asdict(step) for name, step in self.steps.items()},
            "files": self.files,
        }
        with output_file(self.folder / NAME, overwrite=True) as file:
            file.write((json.dumps(said, indent=2) + "\n").encode())

    def content(self, path: Path, *, anew: bool = False) -> str:
        """A hash of a file, or of the names and contents of all files in a folder; empty if nothing is there.

        Args:
            anew: believe no hash that another process has worked out.
        """
        if path.is_file():
            return self._hash(path, anew)
        if not path.is_dir():
            return ""
        return _digest(f"{file.relative_to(path)}:{self._hash(file, anew)}" for file in _files(path))

    def _hash(self, path: Path, anew: bool) -> str:
        found = path.stat()
        now = [found.st_size, found.st_mtime_ns, found.st_ino]
        name = str(path.resolve())
        if self.files.get(name, [])[:3] != now or (anew and name not in self.seen):
            self.seen.add(name)
            self.files[name] = [*now, hash_files(path.parent, [path.name], hashing=True)[path.name]]
        return str(self.files[name][3])


def _step(values: dict[str, Any]) -> Step:
    step = Step(**values)
    texts, counts = ("stage", "command", "made", "replaced"), ("seconds", "attempts", "status", "process")
    types = {**dict.fromkeys(texts, str), **dict.fromkeys(counts, int | float), "asked": dict}
    if any(not isinstance(getattr(step, name), of) for name, of in types.items()) or step.state not in get_args(State):
        raise ValueError
    if not all(0 <= getattr(step, name) <= MOST for name in counts):  # false of nan
        raise ValueError
    asdict(step)  # or it could not be saved again: it is nested too deep
    return step


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def _digest(lines: Iterable[str]) -> str:
    import xxhash

    return xxhash.xxh3_128("\n".join(lines).encode()).hexdigest()
