"""Which text a run trains on, and which it is judged on and never sees: the sides are fixed by the text itself.

1. A text is documents, and a document is one piece, or pieces of about 16,000 characters that end with a paragraph. A
   text that is a single document is cut finer, so that a share of it can be told off. A conversation is one piece.
2. A piece is held out if the hash of its content is below the share asked for. So the same piece is on the same side
   in every text, on every machine and in every run. If a text has no such piece, the one of the smallest hash is.
3. Built-in text has its own fixed sides (`common.text`).
4. What is judged on, from whatever text, is trained on in none, even where other documents hold it: it is known by its
   grains, passages of about 300 characters whose borders follow from the words around them (content-defined chunking,
   as of LBFS, Muthitacharoen et al. 2001). Less than a grain at both ends of an excerpt is not, nor is a passage of
   less than 100 characters, nor what a stream from the Hub holds out beside another text.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

from ...common.errors import UserError, did_you_mean
from ...common.text import HUB, builtin_kinds, stream_text
from ...common.tokens import check_messages
from ..order import check_weights

ALL, ASSISTANT = "all", "assistant"
_PIECE = 16_000  # characters
_FINEST_PIECE = 1_000
_PIECES = 64  # of a text that is one document, if it is neither short nor long
_LEAST_TOKENS = 1 << 22  # read of a text that is here anyway, so that a small budget sees more than its first pages
_HASHES = 1 << 64
_GRAIN = 300  # characters on average
_LEAST_GRAIN = 100  # what is shorter stands in many a text
_SENTENCE_END = re.compile(r"\n+|(?<=[.!?。！？])[ \t]+")

Document = str | list[dict[str, Any]]
"""A text, or a conversation: messages of `role` and `content`."""


@dataclass(frozen=True)
class DataSpec:
    """What to train and judge on.

    Attributes:
        texts: to train on, as `common.text.stream_text` takes them.
        window: tokens of a window.
        weights: how often each text is drawn, by proportion; by default all windows alike.
        reset_positions: whether positions start anew with every document. A document's first token then follows
            nothing, and is no target.
        chat: whether tables may hold conversations (`messages`), which the chat template renders.
        loss_on: `all`, or `assistant`: of conversations, only what assistants say.
        held_out: share of every text that is never trained on, but judged on. 0 leaves only `eval_texts`.
        eval_texts: further texts to judge on; built-in ones and datasets give their held-out side.
        eval_windows: how many windows of every text to judge on.
        needed_windows: windows that the run trains on in all. A text is read no further than that takes.

    Raises:
        UserError: a number is out of range, or the texts contradict each other.
    """

    texts: Sequence[str]
    window: int
    weights: Sequence[float] | None = None
    reset_positions: bool = False
    chat: bool = False
    loss_on: str = ALL
    held_out: float = 0.02
    eval_texts: Sequence[str] = ()
    eval_windows: int = 16
    needed_windows: int | None = None

    def __post_init__(self) -> None:
        for name in ("texts", "eval_texts"):
            value = getattr(self, name)
            # A single name is no sequence of letters.
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if not self.texts:
            raise UserError("no text to train on is given; name a file, or 'builtin'")
        for names in (self.texts, self.eval_texts):
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise UserError(f"text {twice} is named twice; name it once (weights say how often it is drawn)")
        if name := next((name for name in self.eval_texts if name in self.texts and not builtin_kinds(name)), None):
            raise UserError(
                f"{name} is trained on and an eval_text too; leave one out (held_out judges on a share of it)"
            )
        check_weights(self.weights, len(self.texts))
        if self.window < 2:
            raise UserError(f"a window of {self.window} predicts nothing; it needs at least 2 tokens")
        if not 0 <= self.held_out < 1:
            raise UserError(f"held_out {self.held_out} is not possible; give a share from 0 to below 1")
        if not self.held_out and not self.eval_texts:
            raise UserError("held_out 0 leaves nothing to judge on; name an eval_text, or hold a share out")
        for name in ("eval_windows", "needed_windows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} {value} is not possible; give 1 or more")
        if self.loss_on not in (ALL, ASSISTANT):
            raise UserError(f"unknown loss_on {self.loss_on!r}{did_you_mean(self.loss_on, (ALL, ASSISTANT))}")
        if self.loss_on == ASSISTANT and not self.chat:
            raise UserError("loss_on assistant needs conversations; set chat, or loss_on all")

    def limit(self, place: int) -> int | None:
        """How many windows of a text to keep at most; None for all."""
        if self.needed_windows is None:
            return None
        share = self.weights[place] / math.fsum(self.weights) if self.weights else 1.0
        needed = math.ceil(share * self.needed_windows)
        return needed if self.texts[place].startswith(HUB) else max(needed, -(-_LEAST_TOKENS // self.window))


@dataclass(frozen=True)
class Piece:
    """Some of a document, or all of it.

    Attributes:
        content: the text, or the whole conversation.
        opens, closes: whether it is the first and the last of its document on its side.
    """

    content: Document
    opens: bool
    closes: bool


def read_documents(name: str, spec: DataSpec, *, judged: bool) -> Iterator[Document]:
    """The documents of a text that have anything to learn or judge; `judged` chooses the side that a text has itself.

    Where only assistants count, a conversation without one has nothing, and a plain text is only judged on.

    Raises:
        UserError: see `stream_text`; messages lack role or content; no document has anything.
        EnvironmentFailure: the Hub cannot be reached.
    """
    columns = ("messages", "text") if spec.chat else ("text",)
    empty = True
    for document in stream_text(name, held_out=judged, columns=columns):
        if isinstance(document, str):
            counts = spec.loss_on == ALL or judged
        else:
            document = check_messages(name, document)
            counts = spec.loss_on == ALL or any(message.get("role") == ASSISTANT for message in document)
        if counts:
            empty = False
            yield document
    if empty:  # no text at all is an error of its own
        raise UserError(f"{name} has no assistant turns; leave it out, or set loss_on all")


def split_sides(
    documents: Iterable[Document], bound: int = 0, seen: Collection[int] = ()
) -> Iterator[tuple[bool, Piece]]:
    """Every piece of the documents, in order, and whether it is held out.

    What stays of a document is one document still; each piece that is held out is one of its own.

    Args:
        bound: a piece is held out if its hash is below it, see `bound_of`,
        seen: or among these, of what is judged on somewhere. Grains of other pieces that are among them are left out.
    """
    for document, bounds in _cut(documents):
        sides = []
        for start, stop in bounds:
            key = hash_of(document[start:stop])
            held = key < bound or key in seen
            rest = [(start, stop)] if held or not seen else _unseen(document, start, stop, seen)
            sides += [(held, *each) for each in rest]
        kept = [place for place, (held, _, _) in enumerate(sides) if not held]
        for place, (held, start, stop) in enumerate(sides):
            yield held, Piece(document[start:stop], held or place == kept[0], held or place == kept[-1])


def marks_of(content: Document) -> set[int]:
    """By what a piece that is judged on is known elsewhere: its hash, and those of its grains."""
    return {hash_of(content)} | {key for _, _, key in _grains(content) if key is not None}


def _unseen(document: Document, start: int, stop: int, seen: Collection[int]) -> list[tuple[int, int]]:
    """What stays of a piece, from start to stop, without the grains that were seen."""
    rest: list[tuple[int, int]] = []
    for first, last, key in _grains(document[start:stop]):
        if key in seen:
            continue
        if rest and rest[-1][1] == start + first:
            rest[-1] = (rest[-1][0], start + last)
        else:
            rest.append((start + first, start + last))
    return rest


def _grains(content: Document) -> Iterator[tuple[int, int, int | None]]:
    """Where each grain of a piece starts and stops, and its hash; None where it is too short to tell anything."""
    if not isinstance(content, str):
        yield 0, len(content), hash_of(content)
        return
    for start, stop in pairwise([0, *grain_ends(content), len(content)]):
        if start == stop:
            continue
        long = len(content[start:stop].strip()) >= _LEAST_GRAIN
        yield start, stop, hash_of(content[start:stop]) if long else None


def grain_ends(text: str) -> list[int]:
    """Where grains end inside a text: behind a line or sentence, with a chance of its length in `_GRAIN`.

    Chance is a hash of the line or sentence itself, so the same passage has the same grains wherever it stands.
    """
    ends, last = [], 0
    for mark in _SENTENCE_END.finditer(text):
        said = text[last : mark.start()].strip()
        last = mark.end()
        if zlib.crc32(said.encode()) % _GRAIN < len(said):
            # A blank belongs to the word after it, as most tokenizers have it.
            ends.append(mark.end() if "\n" in mark[0] else mark.start())
    return ends


def bound_of(share: float) -> int:
    """The hash below which a piece is held out."""
    return int(share * _HASHES)


def spare_hash(documents: Iterable[Document], bound: int) -> int | None:
    """The hash of the piece to hold out where the share is too small for these documents; None where it is not."""
    least = None
    for document, bounds in _cut(documents):
        for start, stop in bounds:
            key = hash_of(document[start:stop])
            if key < bound:
                return None
            least = key if least is None else min(least, key)
    return least


def hash_of(content: Document) -> int:
    """64 bits of the SHA-256 of a piece; blanks around it do not count."""
    text = content.strip() if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _cut(documents: Iterable[Document]) -> Iterator[tuple[Document, list[tuple[int, int]]]]:
    """Every document and where its pieces start and stop."""
    documents = iter(documents)
    first = list(islice(documents, 2))
    for document in chain(first, documents):
        size = _PIECE
        if len(first) == 1:
            size = min(_PIECE, max(_FINEST_PIECE, len(document) // _PIECES))
        # A conversation, a list, is never cut.
        edges = _edges(document, size) if isinstance(document, str) else [0, len(document)]
        yield document, list(pairwise(edges))


def _edges(text: str, size: int) -> list[int]:
    """Where to cut a text into pieces of `size` characters, or fewer so as to end with a paragraph, line or word.

    If it can be, where a grain ends: so that what is held out is whole grains.
    """
    if len(text) <= size:
        return [0, len(text)]
    edges, ends = [0], grain_ends(text)
    while len(text) - edges[-1] > size:
        start, stop = edges[-1] + size // 2, edges[-1] + size
        grains = ends[bisect_right(ends, start) : bisect_right(ends, stop)]
        for mark, taken in (("\n\n", 2), ("\n", 1), (" ", 0)):
            if whole := [end for end in grains if text[end - taken : end] == mark[:taken]]:
                stop = whole[-1]
                break
            if (found := text.rfind(mark, start, stop)) >= 0:
                stop = found + taken
                break
        edges.append(stop)
    return [*edges, len(text)]
