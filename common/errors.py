"""The errors a user may see, and the exit status that each one stands for.

Every message is one line: what is wrong, with the number or the tensor name, and the way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from .shown import shown

_LONGEST = 399  # letters of a message
_ELLIPSIS = " ... "


class KvfoldError(Exception):
    """Base of the errors that are shown as one line instead of a traceback.

    A message quotes names from files that may be anybody's, and words of other programs: it is as `shown` makes it,
    and of what is far too long the middle is left out, since what is wrong stands at the beginning and the way out at
    the end.
    """

    exit_status = 70

    def __init__(self, message: str) -> None:
        super().__init__(_in_a_line(message))


class CheckFailed(KvfoldError):
    """A check that the user asked for said no."""

    exit_status = 1


class UserError(KvfoldError, ValueError):
    """The input is wrong; the message says how to mend it."""

    exit_status = 2


class EnvironmentFailure(KvfoldError):
    """The machine failed: disk, network or memory. The input may be fine."""

    exit_status = 3


def _in_a_line(message: str) -> str:
    message = shown(message if message.isprintable() else " ".join(message.split()))
    if len(message) > _LONGEST:
        half = (_LONGEST - len(_ELLIPSIS)) // 2
        message = f"{message[:half]}{_ELLIPSIS}{message[-half:]}"
    return message


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean X?"`` when a known name is near, and the whole list otherwise."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"


def divisors(number: int) -> list[int]:
    """All positive divisors of ``number``, ascending: the head counts that a model can take."""
    return [n for n in range(1, number + 1) if number % n == 0]
