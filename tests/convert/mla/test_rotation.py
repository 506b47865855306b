"""Which frequencies are kept, and what is folded into them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.common.errors import UserError
from kvfold.convert.mla.rotation import SELECTS, TAIL, channels, full_rank

PAIRS = st.integers(1, 128).flatmap(lambda pairs: st.tuples(st.integers(1, pairs), st.just(pairs)))


@pytest.mark.parametrize(
    ("select", "kept", "expected"),
    [
        ("high", 2, [[0], [1, 2, 3, 4]]),
        ("high", 6, [[0], [1], [2], [3], [4], [5, 6, 7]]),
        ("stride", 2, [[0], [4]]),
        ("stride", 3, [[0], [2], [4]]),
        ("fold", 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("fold", 3, [[0, 1], [2, 3], [4, 5, 6, 7]]),
        ("fold", 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("fold", 5, [[0], [1], [2], [3], [4, 5, 6, 7]]),
        *((select, 8, [[f] for f in range(8)]) for select in SELECTS),
    ],
)
def test_of_eight(select, kept, expected):
    assert channels(select, kept, 8) == tuple(map(tuple, expected))


@given(PAIRS, st.sampled_from(SELECTS))
def test_a_series_that_starts_with_the_first(sizes, select):
    kept, pairs = sizes
    found = channels(select, kept, pairs)
    starts = [channel[0] for channel in found]
    assert len(found) == kept
    assert starts == list(range(0, kept * (starts[1] if kept > 1 else 1), starts[1] if kept > 1 else 1))
    assert all(channel == tuple(range(channel[0], channel[-1] + 1)) for channel in found)
    assert max(channel[-1] for channel in found) < pairs
    used = [f for channel in found for f in channel]
    assert len(used) == len(set(used))  # none is stood for twice


@given(PAIRS)
def test_what_each_selection_folds(sizes):
    kept, pairs = sizes
    high, stride, fold = (channels(select, kept, pairs) for select in ("high", "stride", "fold"))
    assert [len(channel) for channel in high] == [1] * (kept - 1) + [min(TAIL, pairs - kept + 1)]
    assert [len(channel) for channel in stride] == [1] * kept
    assert [channel[0] for channel in stride] == [channel[0] for channel in fold]
    assert sum(map(len, fold)) == fold[-1][-1] + 1  # without gaps
    assert len(fold[-1]) >= min(TAIL, pairs - fold[-1][0])


@given(st.integers(1, 128), st.sampled_from(SELECTS))
def test_all_frequencies_are_kept_as_they_are(pairs, select):
    assert channels(select, pairs, pairs) == tuple((f,) for f in range(pairs))


@pytest.mark.parametrize(
    ("select", "kept", "message"),
    [
        ("hihg", 2, "unknown rotary selection 'hihg'; did you mean high?"),
        ("high", 0, "0 rotary numbers are not possible: a head has 16; give 2 to 16"),
        ("fold", 9, "18 rotary numbers are not possible: a head has 16; give 2 to 16"),
    ],
)
def test_refused(select, kept, message):
    with pytest.raises(UserError) as refused:
        channels(select, kept, 8)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("sizes", "rank"), [((16, 16, 64), 16), ((64, 16, 64), 64), ((32, 8, 64), 56)])
def test_full_rank(sizes, rank):
    assert full_rank(*sizes) == rank
