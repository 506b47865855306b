"""Which windows of tokens a model is calibrated on: several kinds of text, dealt in turn.

A model calibrated on one kind of text is much worse on others (methods.md, section 10), so the built-in kinds
are always mixed in unless the user forbids it.

1. A kind's documents come one after the other: the built-in ones in mixed order, a user's as one long text, or
   conversations from all over a table.
2. A long document is cut into pieces of about two windows. Each round takes one piece of every document, and a
   document's pieces spread over its length however many are taken. So few windows see many documents, and a
   long file from end to end.
3. With `chat`, every piece becomes a conversation in the model's template.
4. The pieces, a blank line between two, are one stream of tokens, cut into windows of one length. What the
   tokenizer puts in front of a text by default (a BOS, if anything) stands in front of every window, since that
   is how the model saw text in training: Gemma and Llama break or drift without it, Qwen never saw one.
5. The kinds are dealt by their shares, none ahead of its share by more than a window. What is dealt first does
   not depend on how much is dealt after it: the first n windows are those of a request for n.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle, islice
from typing import TYPE_CHECKING, Any

from ...common.errors import UserError
from ...common.kvcache import fit_context
from ...common.text import BUILTIN, KINDS, NO_TEXT, builtin_kinds, join_documents, mixed_documents, stream_text
from ...common.tokens import check_vocabulary, leading_ids, plain_ids, render_chat

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_WINDOW = 512
_PIECE_WINDOWS = 2
_TOKEN_CHARACTERS = 4  # of English, about; more or less only makes pieces shorter or longer
_BLOCK = 1 << 23  # characters of a table that are spread over at a time
_GOLDEN = (5**0.5 - 1) / 2
_TURNS = (("user", 1), ("assistant", 3))  # and the paragraphs that each has
_TINY = 40  # characters; a paragraph below it is a heading or a rule

Document = str | list[dict[str, Any]]
"""A text, or a conversation: messages of `role` and `content`."""


@dataclass(frozen=True)
class CalibText:
    """The text to calibrate on.

    Attributes:
        texts: what the user named: texts (see `common.text.stream_text`), or the single word `none`. A built-in
            kind that is named is mixed in the place of all of them.
        windows: how many windows.
        window: tokens of each; 512 by default, or the model's context if that is smaller.
        builtin: whether the built-in kinds are mixed with the user's texts, half and half.
        chat: whether to render all text as conversations, in the tokenizer's chat template.

    Raises:
        UserError: a number is out of range, or the texts contradict each other.
    """

    texts: Sequence[str] = ()
    windows: int = 64
    window: int | None = None
    builtin: bool = True
    chat: bool = False

    def __post_init__(self) -> None:
        # A single name is no sequence of letters.
        object.__setattr__(self, "texts", (self.texts,) if isinstance(self.texts, str) else tuple(self.texts))
        if self.windows < 1:
            raise UserError(f"{self.windows} calibration windows are not possible; ask for at least 1")
        if self.window is not None and self.window < 2:
            raise UserError(f"a calibration window of {self.window} predicts nothing; it needs at least 2 tokens")
        named = [name for name in self.texts if builtin_kinds(name)]
        if NO_TEXT in self.texts:
            if other := next((name for name in self.texts if name != NO_TEXT), None):
                raise UserError(f"calibration text {NO_TEXT!r} stands alone; leave it or {other!r} out")
        elif not self.builtin:
            if named:
                raise UserError(f"calibration text {named[0]!r} contradicts --no-calib-builtin; leave one of them out")
            if not self.texts:
                raise UserError("no calibration text is left; name one with --calib, or leave --no-calib-builtin out")

    @property
    def weights_only(self) -> bool:
        """Whether the user wants no calibration."""
        return NO_TEXT in self.texts

    def shares(self) -> dict[str, int]:
        """The kinds, each named as a user names it, and how many windows each has beside the others' many."""
        texts = [name for name in dict.fromkeys(self.texts) if not builtin_kinds(name)]
        kinds = dict.fromkeys(kind for name in self.texts for kind in builtin_kinds(name, KINDS))
        if not kinds and self.builtin:
            kinds = dict.fromkeys(KINDS)
        return {name: len(kinds) or 1 for name in texts} | {f"{BUILTIN}:{kind}": len(texts) or 1 for kind in kinds}


@dataclass(frozen=True)
class Windows:
    """Token windows to calibrate on.

    Attributes:
        ids: one tensor [S] of int64 a window; shorter ones end a text that did not fill its share.
        kinds: what each is of: a user's text, or `builtin:KIND`.
    """

    ids: tuple[Tensor, ...]
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    @property
    def counts(self) -> dict[str, int]:
        """How many windows came of each kind."""
        return dict(Counter(self.kinds))

    @property
    def digest(self) -> str:
        """Short SHA-256 of the ids, window by window: the same text under the same tokenizer has the same."""
        return hashlib.sha256(json.dumps([window.tolist() for window in self.ids]).encode()).hexdigest()[:16]

    def first(self, number: int) -> Windows:
        """The first so many windows, which are mixed as all of them are."""
        return Windows(self.ids[:number], self.kinds[:number])

    def after(self, number: int) -> Windows:
        """The windows after the first so many."""
        return Windows(self.ids[number:], self.kinds[number:])

    def joined(self, length: int, lead: Sequence[int]) -> Windows:
        """The same text in windows of up to `length` tokens, each of them neighbours of one kind put together.

        Args:
            lead: what every window begins with; it stays at the beginning only.
        """
        import torch

        held: dict[str, Tensor] = {}
        done: list[tuple[str, Tensor]] = []
        for kind, ids in zip(self.kinds, self.ids, strict=True):
            more = ids[len(lead) :] if ids[: len(lead)].tolist() == list(lead) else ids
            if kind in held and len(held[kind]) + len(more) > length:
                done.append((kind, held.pop(kind)))
            held[kind] = torch.cat([held[kind], more]) if kind in held else ids
        done += held.items()
        return Windows(tuple(ids for _, ids in done), tuple(kind for kind, _ in done))

    def batches(self, size: int) -> list[Tensor]:
        """All windows as batches [B, S], B at most `size`: those of one length together, nothing padded.

        Raises:
            UserError: the size is not positive.
        """
        import torch

        if size < 1:
            raise UserError(f"batch size {size} is not possible; give 1 or more")
        alike: dict[int, list[Tensor]] = {}
        for window in self.ids:
            alike.setdefault(len(window), []).append(window)
        return [
            torch.stack(windows[start : start + size])
            for windows in alike.values()
            for start in range(0, len(windows), size)
        ]


def calibration_windows(tokenizer: Any, knobs: CalibText, config: Any) -> Windows:
    """Cut the windows that the knobs ask for; a text that is too short leaves its share to the others.

    Args:
        tokenizer: the model's own.
        knobs: which text; not `none`.
        config: the model's, which bounds a window.

    Raises:
        UserError: a text cannot be read, is empty, or does not fit the model.
        EnvironmentFailure: the Hub cannot be reached.
    """
    import torch

    assert not knobs.weights_only
    window = fit_context(config, "calibration window", knobs.window, DEFAULT_WINDOW)
    if knobs.chat and not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template; leave --chat out, or calibrate an instruct model")
    lead = leading_ids(tokenizer)
    if window <= len(lead):
        raise UserError(
            f"a calibration window of {window} has no room for text after the tokenizer's {len(lead)} leading tokens; "
            "give more"
        )
    shares = knobs.shares()
    streams = {}
    for kind in shares:
        documents = _documents(kind, window, knobs.chat)
        stream = _cut(_tokens(tokenizer, kind, documents, knobs.chat), window, lead)
        if (start := next(stream, None)) is not None:
            streams[kind] = chain([start], stream)
        elif not builtin_kinds(kind):
            raise UserError(f"{kind} has fewer than 2 tokens; calibration needs at least 2")
    dealt = list(islice(_deal(streams, shares), knobs.windows))
    if not dealt:
        raise UserError(f"{', '.join(shares)} holds no text here; name a file with --calib")
    check_vocabulary(config, max(max(ids) for _, ids in dealt))
    return Windows(tuple(torch.tensor(ids) for _, ids in dealt), tuple(kind for kind, _ in dealt))


def _deal(streams: dict[str, Iterator[list[int]]], shares: dict[str, int]) -> Iterator[tuple[str, list[int]]]:
    """Take from the streams in turn, by their shares, until all are used up (smooth weighted round robin).

    Each turn credits every stream with its share; the one with most credit is dealt, and pays for all.
    """
    waiting = {kind: next(stream) for kind, stream in streams.items()}
    credit = dict.fromkeys(waiting, 0)
    while waiting:
        for kind in waiting:
            credit[kind] += shares[kind]
        kind = max(waiting, key=credit.__getitem__)
        credit[kind] -= sum(shares[kind] for kind in waiting)
        yield kind, waiting[kind]
        if (following := next(streams[kind], None)) is None:
            del waiting[kind]
        else:
            waiting[kind] = following


def _documents(kind: str, window: int, chat: bool) -> Iterator[Document]:
    """What a kind holds, in pieces, in the order in which they are used."""
    size = window * _PIECE_WINDOWS * _TOKEN_CHARACTERS
    if names := builtin_kinds(kind):
        yield from _pieces(mixed_documents(*names), size)
        return
    columns = ("messages", "text") if chat else ("text",)
    for block in _blocks(stream_text(kind, held_out=False, columns=columns)):
        if isinstance(block[0], str):  # rows may be the lines of one text, which makes sense in its order only
            yield from _pieces([join_documents(block)], size)
        else:
            yield from (block[place] for place in _spread(len(block), 0))


def _blocks(documents: Iterable[Document]) -> Iterator[list[Any]]:
    """Group documents, so that a dataset of any length needs little memory."""
    block: list[Document] = []
    size = 0
    for document in documents:
        block.append(document)
        size += len(document) if isinstance(document, str) else len(str(document))
        if size >= _BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _pieces(documents: Iterable[str], size: int) -> Iterator[str]:
    """One piece of every document, then a second one of every longer document, and so on.

    A piece has about `size` characters. What is no longer is not cut.
    """
    longer = []
    for document in documents:
        if len(document) <= size:
            yield document
            continue
        number = -(-len(document) // size)
        places = _spread(number, int.from_bytes(hashlib.sha256(document.encode()).digest()[:4], "big") / 2**32)
        longer.append((document, number, places))
        yield _piece(document, next(places), number)
    while longer:
        left = []
        for document, number, places in longer:
            if (place := next(places, None)) is not None:
                left.append((document, number, places))
                yield _piece(document, place, number)
        longer = left


def _spread(number: int, start: float) -> Iterator[int]:
    """All of `range(number)`, from a start (0 to 1) on, each as far as can be from those before.

    Multiples of the golden ratio, modulo 1, leave no wide gap however many are taken.
    """
    seen: set[int] = set()
    for step in count():
        place = int((start + step * _GOLDEN) % 1 * number)
        if place not in seen:
            seen.add(place)
            yield place
        if len(seen) == number:
            return


def _piece(text: str, place: int, number: int) -> str:
    """One of a text's equal pieces, from the start of a paragraph, line or word near its own to the next piece's."""
    reach = len(text) // number // 2

    def boundary(near: int) -> int:
        if 0 < near < len(text):
            for mark in ("\n\n", "\n", " "):
                if (found := text.find(mark, near - len(mark), near - len(mark) + reach)) >= 0:
                    return found + len(mark)
        return near

    start, stop = (boundary(len(text) * edge // number) for edge in (place, place + 1))
    return text[start:stop].strip("\n")


def _tokens(tokenizer: Any, kind: str, documents: Iterable[Document], chat: bool) -> Iterator[list[int]]:
    """The documents' ids, so that one after the other they are the ids of all, joined by blank lines."""
    if chat:  # a template says where a conversation ends
        for document in documents:
            messages = _conversation(document) if isinstance(document, str) else document
            yield plain_ids(tokenizer, render_chat(tokenizer, kind, messages))
        return
    texts = (document for document in documents if document.strip())
    previous = next(texts, "")
    for text in texts:  # the blank line stands at the end, where many tokenizers merge it with the last sign
        yield plain_ids(tokenizer, join_documents([previous, ""]))
        previous = text
    yield plain_ids(tokenizer, previous)


def _cut(parts: Iterable[list[int]], window: int, lead: list[int]) -> Iterator[list[int]]:
    """Cut one stream of ids into windows that each begin with `lead`; the last may be short, but has two tokens."""
    held: list[int] = []

    def missing() -> list[int]:  # a chat template writes its own
        return [] if held[: len(lead)] == lead else lead

    for part in parts:
        held += part
        while len(held) >= (room := window - len(missing())):
            yield missing() + held[:room]
            held = held[room:]
    if held and len(last := missing() + held) >= 2:
        yield last


def _conversation(text: str) -> list[dict[str, Any]]:
    """A text whose paragraphs are said in turn by user and assistant."""
    paragraphs = [paragraph.strip("\n") for paragraph in re.split(r"\n\s*\n", text)]
    said = iter([paragraph for paragraph in paragraphs if len(paragraph) >= _TINY] or [text.strip()])
    messages = []
    for role, number in cycle(_TURNS):
        if not (content := join_documents(islice(said, number))):
            break
        messages.append({"role": role, "content": content})
    return messages
