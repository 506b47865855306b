"""What a reader may not do is noticed; what it may is not."""

from __future__ import annotations

import pytest

from kvfold.common.errors import EnvironmentFailure, KvfoldError, UserError

from . import limits
from .limits import Broken, hold


def say(text: str, error: type[KvfoldError] = UserError) -> None:
    raise error(text)


def spin() -> None:
    while True:
        pass


class Loud(UserError):
    """One whose message nobody has made fit."""

    def __str__(self) -> str:
        return "a\nb"


READERS = {
    "another error": lambda: [][0],
    "no end": spin,
    "no bound": lambda: bytearray(limits.ROOM + (64 << 20)),
    "no bound, said otherwise": lambda: say("x does not fit into memory", EnvironmentFailure),
    "two lines": lambda: say("", Loud),
    "nothing": lambda: say(""),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
def test_is_noticed(reader, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    with pytest.raises(Broken):
        hold(reader)


@pytest.mark.parametrize("text", ["wrong", "x" * 5000, "a\nb\x1b[31m\u202e\ud800"])
def test_a_refusal_is_a_line(text):
    said = hold(lambda: say(text))
    assert said.isprintable()
    assert said == text or len(said) <= 399


def test_a_reader_may_return():
    assert hold(dict) == ""
