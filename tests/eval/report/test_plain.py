from __future__ import annotations

import math

import pytest

from kvfold.eval.report.plain import cleaned, plain, plain_names
from kvfold.eval.report.record import Growth


@pytest.mark.parametrize("text", ["\x1b[31m", "a\nb", "\udce9", "\x9b", "\u2028", "\u202eabc", "\x00"])
def test_what_steers_or_cannot_be_encoded_is_replaced(text):
    found = plain(text)
    assert found != text and len(found) == len(text)
    assert found.encode() and found.isprintable()


def test_letters_of_all_kinds_stay():
    assert plain("a-Z é 題 👍🏽 $<&>") == "a-Z é 題 👍🏽 $<&>"


def test_names_stay_apart():
    assert plain_names(["a\x1b", "a\x00", "b"]) == ["a\ufffd", "a\ufffd (2)", "b"]


def test_everything_inside_is_cleaned():
    given = Growth("a\nb", [1, math.nan, math.inf, ("\x1b", None, True)])
    assert cleaned(given) == Growth("a\ufffdb", [1, None, None, ("\ufffd", None, True)])
