"""Where text comes from, and that the held-out part stays held out."""

import json

import pytest

from kvfold.common import text
from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.common.text import builtin_documents, join_documents, read_texts, text_hash


@pytest.mark.parametrize("kind", text.KINDS)
def test_builtin_kinds_are_english_and_in_a_fixed_order(kind):
    documents = list(text.KINDS[kind](lambda name: True))
    assert [name for name, _ in text.KINDS[kind](text.is_held_out)] == [n for n, _ in documents if text.is_held_out(n)]
    names = [name for name, _ in documents]
    assert len(set(names)) == len(names) > 50
    assert all(content.strip() for _, content in documents)
    joined = " ".join(content for _, content in documents)
    assert joined.count(" the ") > 1000


def test_held_out_part_is_apart_and_about_a_tenth():
    kept, held = builtin_documents(held_out=False), builtin_documents(held_out=True)
    assert not {document for document in set(kept) & set(held) if len(document) > 100}
    assert 0.05 < len(held) / (len(kept) + len(held)) < 0.15
    assert held == read_texts(["builtin"])


def test_held_out_does_not_depend_on_the_process():
    """A hash that Python seeds anew in each process would mix the two parts."""
    assert [i for i in range(30) if text.is_held_out(f"topic:{i}")] == [0, 2, 10]


def test_unknown_kind():
    with pytest.raises(UserError, match="unknown built-in text 'topic'; did you mean topics"):
        builtin_documents(held_out=True, kinds=["topic"])


def test_files_keep_their_order_and_bytes(tmp_path):
    (tmp_path / "a").write_text("één\r\n", newline="")
    (tmp_path / "b").write_text("two")
    texts = read_texts([str(tmp_path / "b"), str(tmp_path / "a"), str(tmp_path / "b")])
    assert join_documents(texts).startswith("two\n\néén")
    assert len(texts) == 3
    assert text_hash("a") != text_hash("b")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_tables(tmp_path, suffix):
    import pandas

    path = tmp_path / f"rows{suffix}"
    table = pandas.DataFrame({"id": [1, 2, 3], "text": ["one", " ", "two\nlines"]})
    save = {".jsonl": lambda: table.to_json(path, orient="records", lines=True), ".csv": lambda: table.to_csv(path),
            ".parquet": lambda: table.to_parquet(path)}  # fmt: skip
    save[suffix]()
    assert read_texts([str(path)]) == ["one", "two\nlines"]


def test_wrong_texts(tmp_path):
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"content": "x"}) + "\n")
    (tmp_path / "broken.jsonl").write_text("{")
    for name, match in {
        "": "is a directory",
        "nowhere": "does not exist",
        "empty": "holds no text",
        "latin": "not UTF-8 text .byte 0.",
        "rows.jsonl": "has no column 'text' .its columns: content.",
        "broken.jsonl": "cannot load",
    }.items():
        with pytest.raises(UserError, match=match) as caught:
            read_texts([str(tmp_path / name)])
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no text given"):
        read_texts([])


def test_hub_datasets(monkeypatch):
    import datasets

    calls = []

    def load(name, config, *, split, streaming):
        calls.append((name, config, split))
        return iter([{"text": "from the hub"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["train", "validation", "test"])
    assert read_texts(["hub:org/data", "hub:org/data:part:train"]) == ["from the hub", "from the hub"]
    assert calls == [("org/data", None, "test"), ("org/data", "part", "train")]


def test_hub_that_cannot_be_reached():
    with pytest.raises(EnvironmentFailure, match="Hub cannot be reached"):
        read_texts(["hub:org/data"])
