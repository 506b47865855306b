"""Where text comes from, and that the held-out part stays held out."""

import importlib.metadata
import json
from itertools import islice
from pathlib import Path

import pytest

from kvfold.common import text
from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.common.text import (
    builtin_documents,
    join_documents,
    mixed_documents,
    read_texts,
    stream_text,
    text_hash,
)


def held_out(names):
    return [name for name in names if text.is_held_out(name)]


@pytest.mark.parametrize("kind", text.KINDS)
def test_builtin_kinds_are_english_and_in_a_fixed_order(kind):
    documents = list(text.KINDS[kind](list))
    assert [name for name, _ in text.KINDS[kind](held_out)] == [n for n, _ in documents if text.is_held_out(n)]
    names = [name for name, _ in documents]
    assert len(set(names)) == len(names) > 20
    assert all(content.strip() for _, content in documents)
    joined = " ".join(content for _, content in documents)
    assert joined.count(" the ") > 500


@pytest.mark.parametrize("kinds", [text.PROSE, ("code",), ("readmes",)])
def test_held_out_part_is_apart_and_about_a_tenth(kinds):
    kept, held = builtin_documents(held_out=False, kinds=kinds), builtin_documents(held_out=True, kinds=kinds)
    assert not {document for document in set(kept) & set(held) if len(document) > 100}
    assert 0.02 < len(held) / (len(kept) + len(held)) < 0.2


def test_builtin_is_prose_and_other_kinds_are_named():
    prose = builtin_documents(held_out=True, kinds=["topics"]) + builtin_documents(held_out=True, kinds=["docstrings"])
    assert prose == builtin_documents(held_out=True) == read_texts(["builtin"])
    assert read_texts(["builtin:code"]) == builtin_documents(held_out=True, kinds=["code"])
    assert list(stream_text("builtin:code", held_out=False)) == builtin_documents(held_out=False, kinds=["code"])


def test_a_modules_code_and_docstrings_are_on_one_side():
    """The code contains the docstrings, so one held out and the other not would tell what is held out."""
    code = dict(text.code(list))
    docs = dict(text.docstrings(lambda names: [name for name in names if name in code][::10]))
    assert len(docs) > 20
    assert not any("encodings" in name for name in code)  # tables of characters
    assert all(max(filter(str.isalpha, docs[name].split()), key=len) in code[name] for name in docs)
    for side in (True, False):
        assert builtin_documents(held_out=side, kinds=["code"]) == [
            content for name, content in code.items() if text.is_held_out(name) == side
        ]


@pytest.mark.parametrize("kind", ["topics", "code", "readmes"])
def test_mixed_documents_are_the_kept_ones_in_another_order(kind):
    kept, mixed = builtin_documents(held_out=False, kinds=[kind]), list(mixed_documents(kind))
    assert mixed != kept and sorted(mixed) == sorted(kept)
    assert list(islice(mixed_documents(kind), 9)) == mixed[:9]


def test_mixed_documents_are_read_in_their_turn(monkeypatch):
    read, original = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **how: read.append(path) or original(path, **how))
    assert len(list(islice(mixed_documents("code"), 3))) == 3
    assert 3 <= len(read) < 6  # empty modules are no documents


def test_readmes_of_installed_distributions(tmp_path, monkeypatch):
    def install(place, folder, metadata):
        path = tmp_path / place / f"{folder}-1.dist-info"
        path.mkdir(parents=True)
        if metadata is not None:
            (path / "METADATA").write_bytes(metadata)

    def described(name, description):
        return f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n\n{description}".encode()

    install("one", "B_two", described("B_two", "two " * 100))
    install("one", "a", described("a", "one " * 100))
    install("one", "twin", described("twin", "one " * 100))  # of one project, with one text
    install("one", "tiny", described("tiny", "UNKNOWN"))
    install("one", "none", None)
    install("one", "bytes", described("bytes", "") + b"\xff" * 300)
    install("one", "kvfold", described("kvfold", "own " * 100))
    install("two", "b.two", described("b.two", "old " * 100))
    path = [str(tmp_path / "one"), str(tmp_path / "two")]
    monkeypatch.setattr(text, "distributions", lambda: importlib.metadata.distributions(path=path))
    assert dict(text.readmes(list)) == {"readme:twin": ("one " * 100).strip(), "readme:b-two": ("two " * 100).strip()}


def test_held_out_does_not_depend_on_the_process():
    """A hash that Python seeds anew in each process would mix the two parts."""
    assert [i for i in range(30) if text.is_held_out(f"topic:{i}")] == [0, 2, 10]


def test_unknown_kind():
    with pytest.raises(UserError, match="unknown built-in text 'topic'; did you mean topics"):
        builtin_documents(held_out=True, kinds=["topic"])
    with pytest.raises(UserError, match="unknown built-in text 'readme'; did you mean readmes"):
        read_texts(["builtin:readme"])


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


def test_tables_of_conversations(tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}], [], "no list"]
    path.write_text("\n".join(json.dumps({"id": 1, "messages": row}) for row in rows[:2]))
    assert list(stream_text(str(path), held_out=False, columns=["messages", "text"])) == rows[:1]
    with pytest.raises(UserError, match=r"no column 'text' \(its columns: id, messages\); .* with --chat"):
        read_texts([str(path)])
    path.write_text(json.dumps({"messages": rows[2]}))
    with pytest.raises(UserError, match="holds str in its column 'messages'; it must be lists of messages"):
        list(stream_text(str(path), held_out=False, columns=["messages", "text"]))
    path.write_text(json.dumps({"content": "x"}))
    with pytest.raises(UserError, match=r"no column 'messages' or 'text' \(its columns: content\)$"):
        list(stream_text(str(path), held_out=False, columns=["messages", "text"]))


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
    assert list(stream_text("hub:org/data", held_out=False)) == ["from the hub"]
    assert calls[-1] == ("org/data", None, "train")


def test_hub_that_cannot_be_reached():
    with pytest.raises(EnvironmentFailure, match="Hub cannot be reached"):
        read_texts(["hub:org/data"])
