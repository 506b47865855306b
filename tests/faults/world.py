"""What the commands read, made once: a small source in several shards that has no hashes, a text, and what is made of
them; and the folders of the trials."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from kvfold.common.embedded import MODEL_DIR

from .commands import RECIPE, TEXT
from .forks import end, start
from .neighbour import Neighbour

_SHARDS = 3
_CHARACTERS = 20_000


@dataclass(frozen=True)
class World:
    """Where everything lies.

    Attributes:
        folder: of all that is made here; `shared` in it holds what trials copy.
        hub: a Hub, with a process of its own.
    """

    folder: Path
    hub: Neighbour

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @classmethod
    def make(cls, folder: Path, hub: Neighbour) -> World:
        """Everything that commands read; `forks.prepare` comes before."""
        world = cls(folder, hub)
        shutil.rmtree(world.shared, ignore_errors=True)
        world.shared.mkdir(parents=True)
        _write_source(world.shared / "src")
        (world.shared / "text.txt").write_text("\n".join(topics.values())[:_CHARACTERS])
        (world.shared / "recipe.yaml").write_text(RECIPE)
        for words in (f"calibrate src -o stats {TEXT}", "convert gqa src narrow --kv-heads 4 --stats stats"):
            ended = end(start(words.split(), world.shared, folder / "made"), folder / "made", others=world.others)
            assert ended.status == 0, ended
        return world

    @property
    def others(self) -> tuple[int, ...]:
        return (self.hub.process.pid,)


def _write_source(folder: Path) -> None:
    """The embedded model as several shards with an index, and nothing that could tell a changed bit."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    for name in names:
        shutil.copy(MODEL_DIR / name, folder / name)
    tensors = load_file(MODEL_DIR / "model.safetensors")
    where = {}
    for number in range(_SHARDS):
        shard = f"model-{number + 1:05d}-of-{_SHARDS:05d}.safetensors"
        mine = sorted(tensors)[number::_SHARDS]
        save_file({name: tensors[name] for name in mine}, folder / shard, metadata={"format": "pt"})
        where |= dict.fromkeys(mine, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def digest(path: Path) -> str:
    """A hash of a file, or of the names and contents of all that lies in a folder; empty if there is nothing."""
    if not path.exists():
        return ""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    lines = [f"{one.relative_to(path.parent)} {_hash(one) if one.is_file() else ''}" for one in found]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
