"""What a text is cut into, and which side each piece is on: nothing that is judged on is trained on."""

import dataclasses
from itertools import islice

import pytest

from kvfold.common.errors import UserError
from kvfold.common.text import builtin_documents
from kvfold.uptrain.data import documents
from kvfold.uptrain.data.documents import DataSpec, bound_of, hash_of, spare_hash, split_sides

from .conftest import documents_of, paragraphs, text_of


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
@pytest.mark.parametrize("number", [1, 9, 400, 6000])
def test_pieces_of_one_document_are_the_document(mark, number):
    text = mark.join(paragraphs(0, number))
    pieces = [piece for _, piece in split_sides([text])]
    assert "".join(piece.content for piece in pieces) == text
    assert [piece.opens for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.closes for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    sizes = [len(piece.content) for piece in pieces]
    assert max(sizes) <= 16_000 and min(sizes[:-1], default=500) >= 500
    assert number < 400 or 60 <= len(pieces) < 200
    if mark:
        assert all(left.content.endswith(mark) or mark == " " for left in pieces[:-1])
        assert all(right.content[0] == " " or mark != " " for right in pieces[1:])


def test_rows_of_a_table_are_cut_only_if_long():
    rows = ["a" * 3000, "b" * 16_000, "c" * 40_000]
    assert [len(piece.content) for _, piece in split_sides(rows)] == [3000, 16_000, 16_000, 16_000, 8000]


def test_what_stays_of_a_document_is_one_document():
    text = "".join(letter * 1000 for letter in "abcdef")
    away = {hash_of(letter * 1000) for letter in "acf"}
    pieces = [(out, p.content[0], p.opens, p.closes) for out, p in split_sides([text], seen=away)]
    assert pieces == [(True, "a", True, True), (False, "b", True, False), (True, "c", True, True),
                      (False, "d", False, False), (False, "e", False, True), (True, "f", True, True)]  # fmt: skip


def test_hashes_are_the_contents_own_on_every_machine():
    assert hash_of("text") == hash_of(" text\n") == 0x982D9E3EB996F559
    assert hash_of([{"role": "user", "content": "x"}]) == hash_of([{"content": "x", "role": "user"}])


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_about_the_share_is_held_out(share):
    rows = [f"row {number}" for number in range(4000)]
    held = sum(out for out, _ in split_sides(rows, bound_of(share)))
    assert held == pytest.approx(4000 * share, rel=0.25)


def test_a_piece_is_spared_where_the_share_takes_none():
    rows = [f"row {number}" for number in range(5)]
    assert spare_hash(rows, bound_of(0.001)) == min(map(hash_of, rows))
    assert spare_hash(rows, min(map(hash_of, rows)) + 1) is None
    read = iter(rows * 100)
    spare_hash(read, bound_of(0.9))
    assert len(list(read)) > 490, "it reads no further than the first that is held out"


@pytest.mark.parametrize("held_out", [0.001, 0.05, 0.4])
def test_nothing_held_out_is_trained_on(write, build, held_out):
    """With every document twice in one text, and in two texts."""
    rows = paragraphs(1, 120, 40)
    one, two = write("one.jsonl", rows + rows[::-1]), write("two.jsonl", rows[:60] * 2)
    store = build(one, two, held_out=held_out, eval_windows=1000)
    trained = {document for part in store.train for document in documents_of(part)}
    judged = {document for part in store.held_out for document in documents_of(part)}
    assert trained and judged and not trained & judged and trained | judged == set(rows)
    assert [part.name for part in store.held_out] == [part.name for part in store.train] == [one, two]
    for part, given in zip(store.train, (rows + rows[::-1], rows[:60] * 2), strict=True):
        assert documents_of(part) == [row for row in given if row not in judged], "in order, and nothing is lost"


def test_a_file_is_told_off_by_pieces(write, build):
    said = paragraphs(2, 300)
    store = build(write("book", "\n\n".join(said)), held_out=0.1, eval_windows=1000)
    kept, held = text_of(store.train[0]), text_of(store.held_out[0])
    assert held.count("<s>") == held.rstrip("</s>").count("</s>") + 1 > 1
    assert kept.startswith("<s>") and kept.count("<s>") == 1 and kept.rstrip("</s>").count("</s>") == 0
    sides = [(paragraph in kept, paragraph in held) for paragraph in said]
    assert all(left != right for left, right in sides)
    assert 10 < sum(right for _, right in sides) < 60


def test_what_is_judged_on_anywhere_is_trained_on_nowhere(write, build):
    rows = paragraphs(3, 60, 40)
    judge, small = write("judge.jsonl", rows[:20]), write("small.jsonl", rows[20:23])
    large = write("large.jsonl", rows)
    store = build(small, large, eval_texts=[judge], held_out=0.001, eval_windows=1000)
    named = {part.name: set(documents_of(part)) for part in store.held_out}
    assert named[judge] == set(rows[:20]) and list(named) == [small, large, judge]
    (spared,) = named[small]
    assert spared == min(rows[20:23], key=hash_of)
    trained = [set(documents_of(part)) for part in store.train]
    assert trained[0] == set(rows[20:23]) - {spared}
    assert not trained[1] & (set(rows[:20]) | {spared}) and len(trained[1]) >= 38


@pytest.mark.parametrize("mark", ["\n\n", "\n", " "])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_what_is_judged_on_is_known_in_other_documents(write, build, mark, share):
    """An excerpt to judge on, or a share of the excerpts, of a book that is trained on."""
    said = paragraphs(5, 300)
    book = write("book", mark.join(said))
    excerpts = [mark.join(said[start : start + 40]) for start in (7, 61, 130)]
    rows = write("rows.jsonl", excerpts)
    if share:
        store = build(book, rows, held_out=share, eval_windows=10**6)
    else:
        store = build(book, held_out=0.0, eval_texts=[rows], eval_windows=10**6)
    trained = "".join(text_of(part) for part in store.train)
    judged = "".join(text_of(part) for part in store.held_out)
    # Of each excerpt, less than a grain at either end may be left.
    both = [paragraph for paragraph in said if paragraph in judged and paragraph in trained]
    assert len(both) <= 2 * 2 * 3 and sum(paragraph in judged for paragraph in said) > 30
    assert sum(paragraph in trained for paragraph in said) > 100, "the others are still trained on"


def test_builtin_text_keeps_its_fixed_sides(build):
    kinds = ["builtin:topics"]
    store = build(*kinds, window=512, eval_windows=10**6, held_out=0.3)
    assert documents_of(store.held_out[0]) == builtin_documents(held_out=True, kinds=["topics"])
    whole = builtin_documents(held_out=False, kinds=["topics"])
    trained = documents_of(store.train[0])
    assert len(trained) == len(whole)
    # Python's topics repeat each other; what they share is on the held-out side alone.
    assert 0.9 * len("".join(whole)) < len("".join(trained)) < len("".join(whole))
    # Judged on once, even if named twice; and as a whole where nothing else is held out.
    again = build(*kinds, window=512, eval_windows=10**6, held_out=0.0, eval_texts=kinds)
    assert [part.windows for part in again.held_out] == [part.windows for part in store.held_out]
    both = build(*kinds, window=512, eval_windows=10**6, eval_texts=kinds)
    assert [part.name for part in both.held_out] == kinds


def test_a_stream_is_read_as_far_as_needed(build, monkeypatch):
    rows = paragraphs(4, 20_000, 40)

    def read_by(knobs):
        read = []
        monkeypatch.setattr(documents, "stream_text", lambda *_, **__: (read.append(row) or row for row in rows))
        store = build("hub:endless", eval_windows=2, **knobs)
        return len(read), store

    number, store = read_by({"needed_windows": 100, "held_out": 0.1})
    assert store.windows == 100 and store.held_out[0].windows == 2
    assert 100 * 32 / 42 < number < 2 * 100 * 32 / 42 * 1.2 + 20
    further, wider = read_by({"needed_windows": 800, "held_out": 0.1})
    assert wider.windows == 800 and 6 * number < further
    assert text_of(wider.train[0]).startswith(text_of(store.train[0])), "a longer run reads on"
    # What is held out is read too, though training needs no more.
    _, late = read_by({"needed_windows": 1, "held_out": 0.005})
    assert late.windows == 1 and late.held_out[0].windows == 2


def test_weights_say_how_far_a_stream_is_read(build, monkeypatch):
    spec = DataSpec(["hub:a", "hub:b", "file"], 32, weights=[1, 2, 1], needed_windows=1000)
    assert [spec.limit(place) for place in range(3)] == [250, 500, 1 << 17]
    assert dataclasses.replace(spec, weights=None).limit(0) == 1000
    assert dataclasses.replace(spec, needed_windows=None).limit(0) is None
    monkeypatch.setattr(documents, "stream_text", lambda name, **_: iter(paragraphs(len(name), 2000, 40)))
    store = build("hub:a", "hub:bb", weights=[1, 3], needed_windows=400, held_out=0.1)
    assert store.sizes == [100, 300]


def test_windows_to_judge_on_are_spread(write, build):
    rows = paragraphs(5, 200, 40)
    eval_text = write("eval.jsonl", rows)
    store = build(write("a", "\n\n".join(paragraphs(6, 9))), eval_texts=[eval_text], eval_windows=10)
    part = store.held_out[1]
    assert (part.windows, part.stored) == (10, 160)
    seen = text_of(part)
    found = [number for number, row in enumerate(rows) if any(word in seen for word in row.strip(".").split())]
    assert min(found) < 2 and max(found) > 100


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        ({"texts": ()}, "no text to train on"),
        ({"texts": ("a", "a")}, "text a is named twice"),
        ({"texts": ("a",), "eval_texts": ("a",)}, "a is trained on and an eval_text too"),
        ({"weights": (1, 2)}, "2 weights do not fit 1 texts"),
        ({"weights": (0,)}, "weight 0 is not possible"),
        ({"window": 1}, "window of 1 predicts nothing"),
        ({"held_out": 1.0}, "held_out 1.0 is not possible"),
        ({"held_out": -0.1}, "held_out -0.1 is not possible"),
        ({"held_out": 0}, "leaves nothing to judge on"),
        ({"eval_windows": 0}, "eval_windows 0 is not possible"),
        ({"needed_windows": 0}, "needed_windows 0 is not possible"),
        ({"chat": True, "loss_on": "assistants"}, "unknown loss_on 'assistants'; did you mean assistant"),
        ({"loss_on": "assistant"}, "needs conversations; set chat"),
    ],
)
def test_specs_that_cannot_be(knobs, match):
    with pytest.raises(UserError, match=match) as caught:
        DataSpec(**{"texts": ("a",), "window": 32, **knobs})
    assert "\n" not in str(caught.value)


def test_texts_that_cannot_be(write, build, tmp_path):
    good = write("good", "\n\n".join(paragraphs(0, 9)))
    rows = {"short": "A line.", "empty": " \n", "same.jsonl": ["one and the same"] * 50, "good.jsonl": ["a", "b"]}
    names = {name: write(name, content) for name, content in rows.items()}
    wrong = {
        str(tmp_path / "nowhere"): "does not exist",
        names["empty"]: "holds no text",
        names["short"]: "short is too short: nothing is left to train on; give more text",
        names["same.jsonl"]: "same.jsonl is too short: nothing is left to train on",
    }
    for number, (name, match) in enumerate(wrong.items()):
        with pytest.raises(UserError, match=match) as caught:
            build(good, name, folder=f"wrong{number}")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / f"wrong{number}").exists(), "nothing half-made is left"
    with pytest.raises(UserError, match="nowhere does not exist"):
        build(good, eval_texts=[str(tmp_path / "nowhere")])
    assert list(islice(documents_of(build(names["good.jsonl"]).train[0]), 2)) in (["a"], ["b"])
    assert build(names["short"], held_out=0, eval_texts=[good]).windows == 1
