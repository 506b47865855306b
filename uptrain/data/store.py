"""The tokens of a run: made once, in files, and read from there by every process and every restart.

A batch is asked for by the numbers of its windows; nothing remembers where a run is. The folder is whole when its
marker, written last, is there. One process makes it while others wait for the marker's lock: no process talks to
another, so none waits too long for an answer.

Legend: B windows of a batch, S tokens of a window, W windows in all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.atomic import output_file
from ...common.errors import EnvironmentFailure, UserError
from ...common.parallel import is_main_process
from ...common.scoring import UNSCORED
from ...common.text import HUB, builtin_kinds
from ...common.typed import kinds_of
from ...convert.sidefiles import hash_files, is_there
from .documents import DataSpec, bound_of, marks_of, read_documents, spare_hash, split_sides
from .packing import FLAGS, IDS, SCORED, START, Encoder, PartWriter, pack

FORMAT_VERSION = 1
MARKER = "tokens.json"
_PREFIX = "tokens-"
_SPREAD = 16  # windows that are read for each that is judged on, so that these are not all of one document


@dataclass(frozen=True)
class Batch:
    """Windows to train or judge on.

    Attributes:
        ids: int64 [B, S].
        labels: int64 [B, S]; labels[b, t] is ids[b, t] where token t is a target, to be predicted at t - 1, and -100
            elsewhere, as it always is at t = 0.
        positions: int64 [B, S], starting from 0 with every document; None where a window simply counts from 0.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        positions = None if self.positions is None else self.positions.to(device)
        return Batch(self.ids.to(device), self.labels.to(device), positions)


@dataclass(frozen=True)
class Tensors:
    """Windows [W, S] int64 that are in memory, with all that a `Part` of a store offers."""

    ids: Tensor

    @property
    def windows(self) -> int:
        return self.ids.shape[0]

    @property
    def window(self) -> int:
        return self.ids.shape[1]

    def batch(self, indices: Sequence[int]) -> Batch:
        ids = self.ids[list(indices)]
        return Batch(ids, _unscored_first(ids.clone()))

    def scored(self, indices: Sequence[int]) -> int:
        return len(indices) * (self.window - 1)


@dataclass(frozen=True)
class Part:
    """One text's windows, in files.

    Attributes:
        name: as the user called the text.
        window: tokens of a window.
        windows: how many there are to ask for: spread evenly over those that are `stored`.
        last: tokens of the last stored window that are no filling.
        reset_positions: whether a batch has positions.
    """

    name: str
    base: Path
    window: int
    windows: int
    stored: int
    last: int
    dtype: str
    flagged: bool
    reset_positions: bool

    @cached_property
    def _ids(self) -> np.ndarray:
        return self._map(IDS, self.dtype)

    @cached_property
    def _flags(self) -> np.ndarray:
        return self._map(FLAGS, "uint8")

    def _map(self, suffix: str, dtype: str) -> np.ndarray:
        return np.memmap(self.base.with_suffix(suffix), dtype, "r", shape=(self.stored, self.window))

    def batch(self, indices: Sequence[int]) -> Batch:
        """The windows of these numbers, each from 0 to `windows`, in their order."""
        rows = self._rows(indices)
        ids = torch.from_numpy(self._ids[rows].astype(np.int64))
        labels = ids.masked_fill(torch.from_numpy(~self._targets(rows)), UNSCORED)
        return Batch(ids, labels, self._positions(rows) if self.reset_positions else None)

    def scored(self, indices: Sequence[int]) -> int:
        """How many targets these windows have together."""
        return int(self._targets(self._rows(indices)).sum())

    def _rows(self, indices: Sequence[int]) -> list[int]:
        assert all(0 <= index < self.windows for index in indices)
        return [index * self.stored // self.windows for index in indices]

    def _targets(self, rows: list[int]) -> np.ndarray:
        """Which tokens are targets, bool [B, S]."""
        if self.flagged:
            targets = (self._flags[rows] & SCORED).astype(bool)
        else:
            ends = np.where(np.array(rows, dtype=np.int64) == self.stored - 1, self.last, self.window)
            targets = np.arange(self.window) < ends[:, None]
        targets[:, 0] = False
        return targets

    def _positions(self, rows: list[int]) -> Tensor:
        places = np.arange(self.window)
        starts = np.where(self._flags[rows] & START, places, 0)
        return torch.from_numpy(places - np.maximum.accumulate(starts, axis=1))


@dataclass(frozen=True)
class Store:
    """The texts of a run; see `build_store`.

    Attributes:
        folder: where it lies.
        train: a part for every text to train on, whose windows are numbered through.
        held_out: a part for every text to judge on.
        digest: SHA-256 of all tokens and how they are cut: processes with one digest read the same.
        train_digest: the same of what is trained on: runs with one learn from the same.
    """

    folder: Path
    train: tuple[Part, ...]
    held_out: tuple[Part, ...]
    digest: str
    train_digest: str

    @property
    def sizes(self) -> list[int]:
        """Windows of each text to train on."""
        return [part.windows for part in self.train]

    @property
    def windows(self) -> int:
        return sum(self.sizes)

    @property
    def window(self) -> int:
        return self.train[0].window

    def batch(self, indices: Sequence[int]) -> Batch:
        """Training windows by their numbers, in their order."""
        batches = [part.batch([index]) for part, index in map(self._find, indices)]
        positions = [batch.positions for batch in batches if batch.positions is not None]
        return Batch(
            torch.cat([batch.ids for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
            torch.cat(positions) if positions else None,
        )

    def scored(self, indices: Sequence[int]) -> int:
        """How many targets these training windows have together."""
        return sum(part.scored([index]) for part, index in map(self._find, indices))

    def _find(self, index: int) -> tuple[Part, int]:
        firsts = [0, *accumulate(self.sizes)]
        place = bisect_right(firsts, index) - 1
        return self.train[place], index - firsts[place]


def build_store(folder: Path, tokenizer: Any, spec: DataSpec, config: Any) -> Store:
    """Tokenise the texts of a run into a folder, unless that is done already; any number of processes may call it.

    Args:
        folder: the run's own, in which tokens have one of theirs, named by what was asked for; files of a build that
            was cut short are written over.
        tokenizer: the model's own.
        config: the model's, which says how many tokens there are.

    Raises:
        UserError: a text cannot be read, is too short, or does not fit the model.
        EnvironmentFailure: the Hub cannot be reached.
    """
    vocabulary = config.get_text_config(decoder=True).vocab_size
    encoder = Encoder(tokenizer, spec, vocabulary)
    request = {"tokenizer": _tokenizer_hash(tokenizer, encoder), "vocabulary": vocabulary, **asdict(spec)}
    files = {name: _fingerprint(name) for name in (*spec.texts, *spec.eval_texts)}
    request |= {"format_version": FORMAT_VERSION, "files": files}
    folder = folder / (_PREFIX + hashlib.sha256(json.dumps(request).encode()).hexdigest()[:16])
    marker = folder / MARKER
    there = marker.exists()
    if not there:
        try:
            with output_file(marker, wait=True) as file:
                try:
                    _clear(folder)
                    table = _build(folder, spec, encoder)
                except BaseException:
                    _clear(folder)
                    raise
                names = [path.name for suffix in (IDS, FLAGS) for path in folder.glob(f"*{suffix}")]
                hashes = hash_files(folder, names, hashing=True)
                file.write(json.dumps({"request": request, "hashes": hashes, **table}).encode())
        except UserError:
            if not marker.exists():  # else another process made it while this one waited
                raise
    # What was written just now was hashed just now.
    return open_store(folder, verify=there and is_main_process())


def forget_others(folder: Path, store: Store) -> None:
    """Remove the tokens that a run's folder has from other recipes; only while nobody else reads them."""
    for other in folder.glob(f"{_PREFIX}*"):
        if other.name != store.folder.name:
            shutil.rmtree(other, ignore_errors=True)


def open_store(folder: Path, *, verify: bool = False) -> Store:
    """Open what `build_store` made.

    Args:
        verify: read every byte, and compare its hash.

    Raises:
        UserError: it is not there.
        EnvironmentFailure: its files are not what was written.
    """
    try:
        table = json.loads((folder / MARKER).read_bytes())
        hashes: dict[str, str] = dict(table["hashes"].items())
        sides = [tuple(_part(folder, each) for each in table[side]) for side in ("train", "held_out")]
        digests = table["digest"], table["train_digest"]
    except FileNotFoundError:
        raise UserError(f"{folder} holds no tokens of a run; start the run anew") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise damaged(folder / MARKER) from None
    found = hash_files(folder, hashes, hashing=True) if verify else hashes
    if broken := [name for name in hashes if found.get(name) != hashes[name]]:
        raise damaged(folder / broken[0])
    for part in chain(*sides):
        for suffix, size in ((IDS, np.dtype(part.dtype).itemsize), (FLAGS, 1))[: 1 + part.flagged]:
            path = part.base.with_suffix(suffix)
            if not is_there(path) or path.stat().st_size != part.stored * part.window * size:
                raise damaged(path)
    return Store(folder, *sides, *digests)


def _part(folder: Path, said: dict[str, Any]) -> Part:
    """A part as a marker says it.

    Raises:
        ValueError, TypeError, KeyError: it says something else.
    """
    part = Part(base=folder / said["file"], **{name: value for name, value in said.items() if name != "file"})
    if any(not isinstance(getattr(part, name), kind.of) for name, kind in kinds_of(Part).items()):
        raise TypeError
    if part.base.name != said["file"] or np.dtype(part.dtype).kind != "u":
        raise ValueError
    return part


def _build(folder: Path, spec: DataSpec, encoder: Encoder) -> dict[str, Any]:
    """Write all files, and return what the marker says of them."""
    table: dict[str, list[dict[str, Any]]] = {"train": [], "held_out": []}
    digests: dict[str, list[str]] = {"train": [], "held_out": []}
    seen: set[int] = set()  # marks of what is judged on, and so never trained on

    def writer(side: str, limit: int | None) -> PartWriter:
        return PartWriter(folder / f"{side}-{len(table[side])}", encoder.layout, limit)

    def enter(side: str, name: str, part: PartWriter) -> None:
        part.finish()
        if not part.windows:
            what = "train" if side == "train" else "judge"
            raise UserError(
                f"{name} is too short: nothing is left to {what} on; give more text, or held_out 0 and an eval_text"
            )
        table[side].append(
            {
                "name": name,
                "file": part.base.name,
                "window": spec.window,
                "windows": part.windows if side == "train" else min(part.windows, spec.eval_windows),
                "stored": part.windows,
                "last": part.last,
                "dtype": encoder.layout.dtype,
                "flagged": encoder.layout.flagged,
                "reset_positions": spec.reset_positions,
            }
        )
        digests[side].append(part.digest)

    most = _SPREAD * spec.eval_windows
    bound = bound_of(spec.held_out)
    own = [name for name in spec.texts if builtin_kinds(name)]  # those with sides of their own
    for name in dict.fromkeys([*(own if bound else ()), *spec.eval_texts]):
        with writer("held_out", most) as part:
            pieces = split_sides(read_documents(name, spec, judged=True))
            seen.update(*(marks_of(piece.content) for piece in pack(name, pieces, encoder, part)))
            enter("held_out", name, part)
    mixed = [name for name in spec.texts if bound and name not in own]
    spare = {spare_hash(read_documents(name, spec, judged=False), bound) for name in mixed}
    seen.update(key for key in spare if key is not None)
    if len(spec.texts) > 1:  # what one holds out, another may hold in other documents
        for name in mixed:
            if not name.startswith(HUB):
                sides = split_sides(read_documents(name, spec, judged=False), bound, seen)
                seen.update(*(marks_of(piece.content) for held, piece in sides if held))

    for place, name in enumerate(spec.texts):
        divided = name in mixed
        documents = read_documents(name, spec, judged=False)
        pieces = split_sides(documents, bound if divided else 0, seen)
        with writer("train", spec.limit(place)) as kept, writer("held_out", most) if divided else nullcontext() as held:
            deque(pack(name, pieces, encoder, kept, held, spec.eval_windows), maxlen=0)  # only to have them written
            enter("train", name, kept)
            if held:
                enter("held_out", name, held)
    named = [*spec.texts, *spec.eval_texts]
    table["held_out"].sort(key=lambda each: named.index(each["name"]))

    def digest(*sides: str) -> str:
        """Of what these sides hold, whatever the texts are called."""
        cut = [{key: value for key, value in part.items() if key != "name"} for side in sides for part in table[side]]
        return hashlib.sha256(json.dumps([cut, [digests[side] for side in sides]]).encode()).hexdigest()

    return {**table, "digest": digest(*table), "train_digest": digest("train")}


def damaged(path: Path) -> EnvironmentFailure:
    return EnvironmentFailure(f"{path} is damaged; remove {path.parent}, and the run makes it again")


def _fingerprint(name: str) -> list[int]:
    """Tells a file that has changed from one that has not; empty for what is no file."""
    path = Path(name)
    if builtin_kinds(name) or name.startswith(HUB) or not path.is_file():
        return []
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _clear(folder: Path) -> None:
    for suffix in (IDS, FLAGS):
        for path in folder.glob(f"*{suffix}"):
            path.unlink()


def _tokenizer_hash(tokenizer: Any, encoder: Encoder) -> str:
    said = [sorted(tokenizer.get_vocab().items()), encoder.lead, encoder.layout.fill, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _unscored_first(labels: Tensor) -> Tensor:
    labels[:, 0] = UNSCORED
    return labels
