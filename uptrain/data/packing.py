"""Turn pieces of text into windows of tokens in files: a stream of documents, cut into windows of one length.

1. A document is what the tokenizer puts in front of a text by default (a BOS, if anything), its tokens, and a
   separator. A conversation is what the chat template makes of it, which says where it begins and ends.
2. One follows on the other, and the stream is cut every S tokens. What is left at the end is filled up; the filling
   counts nowhere.
3. A window without any target is left out: nothing is to be learned from it.

Legend: S tokens of a window, n tokens of a piece. No more than a batch of pieces is held at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import UserError
from ...common.sources import one_line_errors
from ...common.tokens import encode, leading_ids, render_chat
from .chat import assistant_spans, tokens_in
from .documents import ALL, ASSISTANT, DataSpec, Piece

SCORED, START = 1, 2  # bits of a token's flags: it is a target; positions start anew with it
IDS, FLAGS = ".ids", ".flags"
_BATCH_PIECES = 1000
_BATCH_CHARACTERS = 1 << 20  # a tokenizer takes some hundred bytes for each while it works


@dataclass(frozen=True)
class Layout:
    """How tokens stand in files: ids of `dtype` and, if `flagged`, a byte of flags each, in windows of S tokens."""

    window: int
    dtype: str
    flagged: bool
    fill: int

    @property
    def files(self) -> dict[str, str]:
        """The files of a part: suffix to dtype."""
        return {IDS: self.dtype} | ({FLAGS: "uint8"} if self.flagged else {})


class Encoder:
    """Turns pieces into tokens.

    Raises:
        UserError: the tokenizer lacks what the spec needs.
    """

    def __init__(self, tokenizer: Any, spec: DataSpec, vocabulary: int):
        self.tokenizer, self.spec, self.vocabulary = tokenizer, spec, vocabulary
        ends = (tokenizer.eos_token_id, tokenizer.bos_token_id)
        separator = next((end for end in ends if end is not None), None)
        if separator is None:
            raise UserError(
                "the tokenizer has neither an EOS nor a BOS token to part documents by; give it an EOS token"
            )
        if spec.chat and not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template; leave chat out, or heal an instruct model")
        if spec.loss_on == ASSISTANT and not tokenizer.is_fast:
            raise UserError("only fast tokenizers tell which tokens are the assistant's; use loss_on all")
        self.lead = leading_ids(tokenizer)
        dtype = "uint16" if vocabulary <= 1 << 16 else "uint32"
        self.layout = Layout(spec.window, dtype, spec.reset_positions or spec.loss_on != ALL, separator)

    def __call__(self, name: str, pieces: list[Piece]) -> Iterator[tuple[np.ndarray, ...]]:
        """The tokens of pieces of the text `name`: for each, an array [n] a file of the layout.

        Raises:
            UserError: they do not fit the tokenizer, its chat template or the model.
        """
        rendered = [self._render(name, piece) for piece in pieces]
        spanned = any(spans is not None for _, spans in rendered)
        with one_line_errors(name):
            encoded = encode(self.tokenizer, [text for text, _ in rendered], return_offsets_mapping=spanned)
        for place, (piece, (_, spans)) in enumerate(zip(pieces, rendered, strict=True)):
            ids = encoded["input_ids"][place]
            scored = np.ones(len(ids), bool) if spans is None else tokens_in(encoded["offset_mapping"][place], spans)
            yield self._tokens(piece, ids, scored)

    def _render(self, name: str, piece: Piece) -> tuple[str, list[tuple[int, int]] | None]:
        """The text, and which characters are targets: None for all."""
        if isinstance(piece.content, str):
            return piece.content, None
        if self.spec.loss_on == ASSISTANT:
            return assistant_spans(self.tokenizer, name, piece.content)
        return render_chat(self.tokenizer, name, piece.content), None

    def _tokens(self, piece: Piece, ids: list[int], scored: np.ndarray) -> tuple[np.ndarray, ...]:
        if isinstance(piece.content, str):
            before = self.lead if piece.opens else []
            after = [self.layout.fill] if piece.closes else []
            ids = [*before, *ids, *after]
            scored = np.pad(scored, (len(before), len(after)), constant_values=True)
        if (highest := max(ids, default=0)) >= self.vocabulary:
            raise UserError(
                f"token id {highest} lies beyond the model's vocabulary of {self.vocabulary}; use its own tokenizer"
            )
        tokens = np.array(ids, dtype=self.layout.dtype)
        if not self.layout.flagged:
            return (tokens,)
        flags = scored.astype(np.uint8) * SCORED
        if self.spec.reset_positions and piece.opens and len(flags):
            flags[0] = START  # and no target: what came before is another document
        return tokens, flags


class PartWriter:
    """Appends tokens to the files of one part, window by window.

    Attributes:
        windows: how many stand in the files.
        last: tokens of the last of them that are no filling.
    """

    def __init__(self, base: Path, layout: Layout, limit: int | None):
        self.base, self.layout, self.limit = base, layout, limit
        self.windows, self.last = 0, layout.window
        self._files = [base.with_suffix(suffix).open("wb") for suffix in layout.files]
        self._hashes = [hashlib.sha256() for _ in self._files]
        self._pending: list[tuple[np.ndarray, ...]] = []
        self._held = 0  # tokens pending

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    @property
    def full(self) -> bool:
        """Whether it takes no more."""
        return self.limit is not None and self.windows >= self.limit

    @property
    def digest(self) -> str:
        """SHA-256 of the files' own."""
        return hashlib.sha256(b"".join(each.digest() for each in self._hashes)).hexdigest()

    def add(self, tokens: tuple[np.ndarray, ...]) -> None:
        """Append an array [n] to each file; what there is no room for is dropped."""
        self._pending.append(tokens)
        self._held += len(tokens[0])
        if self._held >= (window := self.layout.window):
            joined = self._join()
            whole = self._held // window * window
            self._write([array[:whole].reshape(-1, window) for array in joined])  # (k*S,) -> (k, S)
            self._pending = [tuple(array[whole:] for array in joined)]
            self._held -= whole

    def finish(self) -> None:
        """Fill up the last window, and put all on the disk."""
        before = self.windows
        if self._held > 1:
            missing = self.layout.window - self._held
            fills = (self.layout.fill, 0)  # no flag: not a target
            rows = [np.pad(a, (0, missing), constant_values=f)[None] for a, f in zip(self._join(), fills, strict=False)]
            self._write(rows)
        if self.windows > before:
            self.last = self._held
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def _join(self) -> list[np.ndarray]:
        return [np.concatenate(arrays) for arrays in zip(*self._pending, strict=True)]

    def _write(self, rows: list[np.ndarray]) -> None:
        """Write windows [k, S] of each file: those with a target, as many as there is room for."""
        if self.layout.flagged:
            useful = (rows[1][:, 1:] & SCORED).any(1)
            rows = [array[useful] for array in rows]
        if self.limit is not None:
            rows = [array[: self.limit - self.windows] for array in rows]
        for file, digest, array in zip(self._files, self._hashes, rows, strict=True):
            file.write(data := array.tobytes())
            digest.update(data)
        self.windows += len(rows[0])


def pack(
    name: str,
    pieces: Iterable[tuple[bool, Piece]],
    encoder: Encoder,
    kept: PartWriter,
    held: PartWriter | None = None,
    enough: int = 0,
) -> Iterator[Piece]:
    """Write the pieces of the text `name` to its two sides, and yield each that was written.

    Reading ends when `kept` is full and `held` has `enough` windows. Where exactly does not depend on how many pieces
    are tokenised together, which is few at first: so that of a stream not much more is read than is needed.

    Args:
        pieces: with whether they are held out; without `held`, those are left out.
    """
    for batch in _batches(pieces):
        pairs = [(held if out else kept, piece) for out, piece in batch]
        wanted = [(writer, piece) for writer, piece in pairs if writer is not None and not writer.full]
        encoded = encoder(name, [piece for _, piece in wanted]) if wanted else ()
        for (writer, piece), tokens in zip(wanted, encoded, strict=True):
            writer.add(tokens)
            yield piece
            if kept.full and (held is None or held.windows >= enough):
                return


def _batches(pieces: Iterable[tuple[bool, Piece]]) -> Iterator[list[tuple[bool, Piece]]]:
    batch: list[tuple[bool, Piece]] = []
    most, characters = 8, 0
    for pair in pieces:
        batch.append(pair)
        content = pair[1].content
        characters += len(content) if isinstance(content, str) else len(str(content))
        if len(batch) >= most or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters, most = [], 0, min(2 * most, _BATCH_PIECES)
    if batch:
        yield batch
