"""How a long text is cut into windows, and which of its tokens each window scores.

A token can be scored when something precedes it in its window. Windows do not overlap by default, so every
token but the first of a window is scored. With a smaller stride they overlap, the overlap is context only,
and every token but the first of the text is scored. A BOS in front of every window gives the first token
something to follow: then every token is scored. The BOS counts in the window, which so holds one text token
less, and no model sees more positions than its window says.

Rolling windows are those of lm-evaluation-harness, whose window counts the tokens that it predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from .errors import UserError


class Window(NamedTuple):
    """Tokens `start:stop` of the text, of which `first_scored:stop` are scored here.

    `led` says whether a token that is not of the text, such as a BOS, stands in front of them.
    """

    start: int
    stop: int
    first_scored: int
    led: bool = False

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
    _check_count(max_windows)
    held = window - bos
    stride = held if stride is None else stride
    if not 1 <= stride <= held:
        counted = " (one of its positions is the BOS)" if bos else ""
        raise UserError(f"stride {stride} does not fit window {window}{counted}; give 1 to {held}")
    least = 2 - bos  # something precedes it
    if tokens < least:
        raise UserError(
            f"the text has {tokens} token{'s' * (tokens != 1)}; scoring needs at least {least}; give more text"
        )
    return list(islice(_windows(tokens, held, stride, bos), max_windows))


def _windows(tokens: int, held: int, stride: int, bos: bool) -> Iterator[Window]:
    done = 0  # tokens before this one were scored, or never can be
    for start in range(0, tokens, stride):
        window = Window(start, min(start + held, tokens), max(done, start + (not bos)), bos)
        if window.scored > 0:
            yield window
        done = window.stop


def rolling_windows(tokens: int, window: int, *, max_windows: int | None = None) -> list[Window]:
    """Cut a text of `tokens` tokens so that every one is scored once, as lm-evaluation-harness does.

    The first window is led. Each further one begins with the token before those that it scores; the last reaches
    further back, as far as a whole window does.

    Args:
        window: tokens that a window scores at most, which is how many positions the model sees.
        max_windows: stop after so many.

    Raises:
        UserError: the window or the text is too short.
    """
    if window < 1:
        raise UserError(f"a window of {window} scores nothing; it needs at least 1 position")
    _check_count(max_windows)
    if tokens < 1:
        raise UserError("the text has no tokens; scoring needs at least 1")
    first = Window(0, min(window, tokens), 0, led=True)
    ends = ((done, min(done + window, tokens)) for done in range(window, tokens, window))
    return [first, *(Window(stop - window - 1, stop, done) for done, stop in ends)][:max_windows]


def _check_count(max_windows: int | None) -> None:
    if max_windows is not None and max_windows < 1:
        raise UserError(f"{max_windows} windows score nothing; ask for at least 1")


def batches(windows: Sequence[Window], size: int) -> Iterator[list[Window]]:
    """Group neighbours of one shape, at most `size` together: nothing is ever padded.

    Raises:
        UserError: the size is not positive.
    """
    if size < 1:
        raise UserError(f"batch size {size} is not possible; give 1 or more")
    for _, alike in groupby(windows, key=lambda w: (w.stop - w.start, w.scored, w.led)):
        while batch := list(islice(alike, size)):
            yield batch
