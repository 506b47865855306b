from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.common.errors import UserError
from kvfold.common.windows import Window, batches, rolling_windows, split_windows


@st.composite
def cuts(draw):
    bos = draw(st.booleans())
    window = draw(st.integers(2, 40))
    stride = draw(st.integers(1, window - bos))
    return draw(st.integers(2, 200)), window, stride, bos


@given(cuts())
def test_each_token_is_scored_once_and_after_something(cut):
    tokens, window, stride, bos = cut
    windows = split_windows(tokens, window, stride=stride, bos=bos)
    scored = [token for w in windows for token in range(w.first_scored, w.stop)]
    assert scored == sorted(set(scored))
    if bos:
        never = set()
    elif stride < window:
        never = {0}
    else:
        never = set(range(0, tokens, window))
    assert set(scored) == set(range(tokens)) - never
    for w in windows:
        assert 0 <= w.start <= w.first_scored < w.stop <= tokens
        assert w.first_scored > w.start or bos
        assert w.stop - w.start + bos <= window
        assert w.start % stride == 0
    # Only the last may be short, and no window repeats what another scored already.
    assert all(w.stop - w.start + bos == window for w in windows[:-1])


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (8, {}, [(0, 4, 1), (4, 8, 5)]),
        (10, {}, [(0, 4, 1), (4, 8, 5), (8, 10, 9)]),
        (9, {}, [(0, 4, 1), (4, 8, 5)]),  # one token alone has nothing before it
        (9, {"stride": 2}, [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 9, 8)]),
        (7, {"bos": True}, [(0, 3, 0), (3, 6, 3), (6, 7, 6)]),
        (7, {"bos": True, "stride": 2}, [(0, 3, 0), (2, 5, 3), (4, 7, 5)]),
        (3, {}, [(0, 3, 1)]),
        (100, {"max_windows": 2}, [(0, 4, 1), (4, 8, 5)]),
    ],
)
def test_windows_of_four(tokens, options, expected):
    assert split_windows(tokens, 4, **options) == [Window(*window, options.get("bos", False)) for window in expected]


@pytest.mark.parametrize(
    ("tokens", "window", "options", "message"),
    [
        (10, 1, {}, "at least 2 positions"),
        (10, 4, {"stride": 5}, "give 1 to 4"),
        (10, 4, {"stride": 0}, "give 1 to 4"),
        (10, 4, {"stride": 4, "bos": True}, "is the BOS.*give 1 to 3"),
        (1, 4, {}, "1 token;"),
        (0, 4, {}, "0 tokens;"),
        (0, 4, {"bos": True}, "0 tokens; scoring needs at least 1"),
        (10, 4, {"max_windows": 0}, "at least 1"),
    ],
)
def test_refusals(tokens, window, options, message):
    with pytest.raises(UserError, match=message):
        split_windows(tokens, window, **options)


@given(cuts(), st.integers(1, 9))
def test_batches_keep_order_and_shape(cut, size):
    tokens, window, stride, bos = cut
    windows = split_windows(tokens, window, stride=stride, bos=bos)
    grouped = list(batches(windows, size))
    assert [w for batch in grouped for w in batch] == windows
    for batch in grouped:
        assert 1 <= len(batch) <= size
        assert len({(w.stop - w.start, w.scored) for w in batch}) == 1
    # Only a first or last window may differ in shape, so at most two batches more than needed.
    assert len(grouped) <= -(-len(windows) // size) + 2


def test_a_batch_size_must_be_positive():
    with pytest.raises(UserError, match="batch size 0"):
        list(batches([Window(0, 4, 1)], 0))


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        (3, {}, [(0, 3, 0, True)]),
        (4, {}, [(0, 4, 0, True)]),
        (5, {}, [(0, 4, 0, True), (0, 5, 4)]),
        (8, {}, [(0, 4, 0, True), (3, 8, 4)]),
        (11, {}, [(0, 4, 0, True), (3, 8, 4), (6, 11, 8)]),
        (11, {"max_windows": 2}, [(0, 4, 0, True), (3, 8, 4)]),
    ],
)
def test_rolling_windows_of_four(tokens, options, expected):
    assert rolling_windows(tokens, 4, **options) == [Window(*window) for window in expected]


@given(st.integers(1, 200), st.integers(1, 40))
def test_rolling_windows_score_every_token_once_and_never_exceed_the_context(tokens, window):
    cut = rolling_windows(tokens, window)
    assert [t for w in cut for t in range(w.first_scored, w.stop)] == list(range(tokens))
    # The last token of a window is predicted only: the model does not see it.
    assert all(w.led + w.stop - w.start - 1 <= window for w in cut)
    assert all(w.led or w.first_scored > w.start for w in cut)


@pytest.mark.parametrize(("tokens", "window", "options"), [(0, 4, {}), (4, 0, {}), (4, 4, {"max_windows": 0})])
def test_rolling_windows_that_score_nothing(tokens, window, options):
    with pytest.raises(UserError, match=r"scores? nothing|needs at least 1"):
        rolling_windows(tokens, window, **options)
