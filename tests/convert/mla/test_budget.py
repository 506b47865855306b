"""From what is asked for to sizes: never more than the budget, and no more could be had."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.common.errors import UserError
from kvfold.convert.mla.budget import Choice, Room, choices
from kvfold.convert.mla.rotation import SELECTS, full_rank

ROOM = Room(turning=16, kv_size=32, hidden_size=64)  # caches 64 numbers
NOTHING = {"kv_rank": None, "rope_dim": None, "kv_elements": None, "kv_ratio": None, "rope_select": "auto"}

ROOMS = st.builds(
    lambda heads, pairs, free, hidden: Room(2 * pairs, heads * (2 * pairs + free), hidden),
    st.integers(1, 8), st.integers(1, 32), st.integers(0, 16), st.integers(8, 512),
)  # fmt: skip
SELECT = st.sampled_from(["auto", *SELECTS])


def asked(room=ROOM, **what):
    return choices(room, **{**NOTHING, **what})


def most(room, choice):
    return full_rank(room.kv_size, choice.rope_dim, room.hidden_size)


@given(ROOMS, st.data(), SELECT)
def test_a_budget_is_obeyed_and_used_up(room, data, select):
    budget = data.draw(st.integers(3, 2 * room.kv_size))
    found = asked(room, kv_elements=budget, rope_select=select)
    assert found
    for choice in found:
        size = choice.kv_rank + choice.rope_dim
        assert size <= budget
        assert choice.kv_rank >= 1
        assert 2 <= choice.rope_dim <= room.turning
        assert choice.rope_dim % 2 == 0
        assert size + 1 > budget or choice.kv_rank == most(room, choice)  # the next larger rank does not fit
        assert len(choice.channels(room)) == choice.rope_dim // 2
    assert len({(choice.rope_dim, choice.channels(room)) for choice in found}) == len(found)
    assert {choice.rope_select for choice in found} <= ({"high", "fold"} if select == "auto" else {select})


@given(ROOMS, st.floats(0.01, 1), SELECT)
def test_a_ratio_is_a_budget(room, ratio, select):
    budget = int(ratio * 2 * room.kv_size)
    if budget < 3:
        with pytest.raises(UserError):
            asked(room, kv_ratio=ratio, rope_select=select)
        return
    found = asked(room, kv_ratio=ratio, rope_select=select)
    assert found == asked(room, kv_elements=budget, rope_select=select)
    assert all(choice.kv_rank + choice.rope_dim <= ratio * 2 * room.kv_size for choice in found)


@given(ROOMS, st.data(), SELECT)
def test_one_size_and_a_budget(room, data, select):
    budget = data.draw(st.integers(3, 2 * room.kv_size))
    dim = 2 * data.draw(st.integers(1, min(room.turning, budget - 1) // 2))
    for choice in asked(room, kv_elements=budget, rope_dim=dim, rope_select=select):
        assert choice.rope_dim == dim
        assert choice.kv_rank == min(budget - dim, most(room, choice))
    rank = data.draw(st.integers(1, budget - 2))
    try:
        found = asked(room, kv_elements=budget, kv_rank=rank, rope_select=select)
    except UserError as refused:
        assert rank > full_rank(room.kv_size, min(budget - rank, room.turning) // 2 * 2, room.hidden_size)
        assert "\n" not in str(refused)
        return
    for choice in found:
        assert choice.kv_rank == rank <= most(room, choice)
        assert budget - 1 <= rank + choice.rope_dim <= budget or choice.rope_dim == room.turning


@given(ROOMS, st.data(), SELECT)
def test_both_sizes_are_one_choice_a_selection(room, data, select):
    dim = 2 * data.draw(st.integers(1, room.turning // 2))
    rank = data.draw(st.integers(1, full_rank(room.kv_size, dim, room.hidden_size)))
    found = asked(room, kv_rank=rank, rope_dim=dim, rope_select=select)
    assert {(choice.rope_dim, choice.kv_rank) for choice in found} == {(dim, rank)}
    assert len(found) == (1 if select != "auto" or found[0].channels(room) == fold(room, dim) else 2)


def fold(room, dim):
    return Choice("fold", dim, 1).channels(room)


def test_the_search_tries_sizes_from_all_to_a_quarter():
    dims = [choice.rope_dim for choice in asked(kv_elements=32)]
    assert dims == [16, 12, 10, 8, 8, 6, 6, 4, 4]  # with most kept, high and fold are the same


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({}, "say how large the cache may be: --kv-rank and --rope-dim, or --kv-elements, or --kv-ratio"),
        ({"kv_rank": 8}, "say how large the cache may be"),
        ({"rope_dim": 8}, "say how large the cache may be"),
        ({"kv_elements": 8, "kv_ratio": 0.5}, "--kv-elements and --kv-ratio say the same"),
        ({"kv_rank": 8, "rope_dim": 8, "kv_elements": 16}, "--kv-rank and --rope-dim say all"),
        ({"kv_rank": 8, "rope_dim": 8, "kv_ratio": 0.5}, "--kv-rank and --rope-dim say all"),
        ({"kv_rank": 8, "rope_dim": 7}, "a rotary key of 7 numbers is not possible; give an even number, 2 to 16"),
        ({"kv_rank": 8, "rope_dim": 0}, "a rotary key of 0 numbers is not possible"),
        ({"kv_rank": 8, "rope_dim": 18}, "a rotary key of 18 numbers is not possible"),
        ({"kv_rank": 8, "rope_dim": -2}, "a rotary key of -2 numbers is not possible"),
        ({"kv_rank": 0, "rope_dim": 8}, "a latent of rank 0 holds nothing"),
        ({"kv_rank": -1, "kv_elements": 8}, "a latent of rank -1 holds nothing"),
        ({"kv_rank": 57, "rope_dim": 8}, "rank 57 is more than there is beside 8 rotary numbers; give 56 or less"),
        ({"kv_elements": 0}, "0 cached numbers are not possible; give 3 to 64"),
        ({"kv_elements": -4}, "-4 cached numbers are not possible; give 3 to 64"),
        ({"kv_elements": 65}, "65 cached numbers are not possible; give 3 to 64, which the source caches"),
        ({"kv_elements": 2}, "2 cached numbers hold no rotary key and latent; give other sizes"),
        (
            {"kv_elements": 8, "rope_dim": 8},
            "8 cached numbers hold no rotary key and latent beside --rope-dim 8",
        ),
        (
            {"kv_elements": 8, "kv_rank": 7},
            "8 cached numbers hold no rotary key and latent beside --kv-rank 7",
        ),
        ({"kv_ratio": 0}, "a ratio of 0 is no smaller cache; give more than 0 and at most 1"),
        ({"kv_ratio": 1.01}, "a ratio of 1.01 is no smaller cache"),
        ({"kv_ratio": -0.5}, "a ratio of -0.5 is no smaller cache"),
        ({"kv_ratio": float("nan")}, "a ratio of nan is no smaller cache"),
        ({"kv_ratio": float("inf")}, "a ratio of inf is no smaller cache"),
        ({"kv_ratio": 0.01}, "0 cached numbers hold no rotary key and latent"),
        ({"kv_elements": 32, "rope_select": "hihg"}, "unknown rotary selection 'hihg'; did you mean high?"),
    ],
    ids=str,
)
def test_refused_in_one_line(what, message):
    with pytest.raises(UserError) as refused:
        asked(**what)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
