"""How a long text is cut into windows, and which of its tokens each window scores.

A token can be scored when something precedes it in its window. Windows do not overlap by default, so every
token but the first of a window is scored. With a smaller stride they overlap, the overlap is context only,
and every token but the first of the text is scored. A BOS in front of every window gives the first token
something to follow: then every token is scored. The BOS counts in the window, which so holds one text token
less, and no model sees more positions than its window says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from .errors import UserError


class Window(NamedTuple):
    """Tokens `start:stop` of the text, of which `first_scored:stop` are scored here."""

    start: int
    stop: int
    first_scored: int

    @property
    def scored(self) -> int:
        return self.stop - self.first_scored


def split_windows(
    tokens: int, window: int, *, stride: int | None = None, bos: bool = False, max_windows: int | None = None
) -> list[Window]:
    """Cut a text of `tokens` tokens.

    Args:
        tokens: length of the text.
        window: positions a window has, the BOS included.
        stride: text tokens from one window's start to the next; all that a window holds by default.
        bos: whether a BOS precedes the text of every window.
        max_windows: stop after so many.

    A last short window is kept if it scores at least one token.

    Raises:
        UserError: the window, the stride or the text is too short, or the stride too long.
    """
    if window < 2:
        raise UserError(f"a window of {window} scores nothing; it needs at least 2 positions")
    if max_windows is not None and max_windows < 1:
        raise UserError(f"{max_windows} windows score nothing; ask for at least 1")
    held = window - bos
    stride = held if stride is None else stride
    if not 1 <= stride <= held:
        counted = " (one of its positions is the BOS)" if bos else ""
        raise UserError(f"stride {stride} does not fit window {window}{counted}; give 1 to {held}")
    if tokens < 2:
        raise UserError(f"the text has {tokens} token{'s' * (tokens != 1)}; scoring needs at least 2")
    return list(islice(_windows(tokens, held, stride, bos), max_windows))


def _windows(tokens: int, held: int, stride: int, bos: bool) -> Iterator[Window]:
    done = 0  # tokens before this one were scored, or never can be
    for start in range(0, tokens, stride):
        window = Window(start, min(start + held, tokens), max(done, start + (not bos)))
        if window.scored > 0:
            yield window
        done = window.stop


def batches(windows: Sequence[Window], size: int) -> Iterator[list[Window]]:
    """Group neighbours of one shape, at most `size` together: nothing is ever padded.

    Raises:
        UserError: the size is not positive.
    """
    if size < 1:
        raise UserError(f"batch size {size} is not possible; give 1 or more")
    for _, alike in groupby(windows, key=lambda w: (w.stop - w.start, w.scored)):
        while batch := list(islice(alike, size)):
            yield batch
