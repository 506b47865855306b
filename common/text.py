"""Text: the user's files, datasets on the Hub, and the English and Python that every installation carries.

The built-in kinds are read at run time from the running interpreter. They differ a little between Python
versions and installations, so figures on built-in text name the hash of the text, and compare models within
one environment.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from .errors import UserError, did_you_mean
from .sources import one_line_errors

BUILTIN = "builtin"
HUB = "hub:"
NO_TEXT = "none"  # in the place of a text to calibrate on
_TABLES = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}  # suffix -> datasets' builder
_COLUMNS = {"text": (str, "strings"), "messages": (list, "lists of messages")}  # what a table may hold documents in
HELD_OUT_EVERY = 10
_NOT_LIBRARY = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}
_NOT_CODE = "encodings/"  # a quarter of all modules: tables of characters
_SHORTEST_README = 200  # characters; below it stands "UNKNOWN", or a link


Pick = Callable[[Iterable[str]], Iterable[str]]
"""Says which documents are wanted, in which order, by their names: what is not need not be read."""


def topics(pick: Pick) -> Iterator[tuple[str, str]]:
    """Python's language reference as `(name, text)` documents, from `pydoc_data.topics`."""
    from pydoc_data.topics import topics as pages

    # A few pages stand under two names; here under the last, so that no text is on both sides of a line.
    names = {text.strip(): f"topic:{name}" for name, text in sorted(pages.items())}
    texts = {name: text for text, name in names.items()}
    yield from ((name, texts[name]) for name in pick(texts))


def docstrings(pick: Pick) -> Iterator[tuple[str, str]]:
    """The standard library's docstrings, one document a module. Sources are parsed, never imported."""
    for name, source in _modules(pick):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a few library files are deliberately unparsable
            continue
        parts = [
            inspect.cleandoc(doc)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and (doc := ast.get_docstring(node, clean=False))
        ]
        if text := "\n\n".join(part for part in parts if part):
            yield name, text


def code(pick: Pick) -> Iterator[tuple[str, str]]:
    """The standard library's sources, one document a module.

    A document has the name of the module's docstrings: it contains them, so both must be on one side of a line.
    """
    for name, source in _modules(lambda names: pick([name for name in names if _NOT_CODE not in name])):
        if text := source.strip():
            yield name, text


@cache
def _library() -> dict[str, Path]:
    """The standard library's modules, each under the name of its docstrings."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return {
        f"docstrings:{path.relative_to(root).as_posix()}": path
        for path in sorted(root.rglob("*.py"))
        if not _NOT_LIBRARY.intersection(path.relative_to(root).parts)
    }


def _modules(pick: Pick) -> Iterator[tuple[str, str]]:
    paths = _library()
    for name in pick(paths):
        try:
            yield name, paths[name].read_text(encoding="utf-8")
        except (ValueError, OSError):  # not UTF-8
            continue


def readmes(pick: Pick) -> Iterator[tuple[str, str]]:
    """The long descriptions of the installed distributions, but kvfold's own."""
    found: dict[str, str] = {}  # the first of a name on the path is the one that is imported
    for distribution in distributions():
        try:
            description = distribution.metadata.json.get("description")
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        except Exception:  # metadata may be broken in any way, and is not the user's to mend
            continue
        found.setdefault(name, description.strip() if isinstance(description, str) else "")
    found.pop(__name__.partition(".")[0], None)  # a checkout and a wheel describe it differently
    # Distributions of one project may share their text; it stands under the last, as in `topics`.
    names = {text: f"readme:{name}" for name, text in sorted(found.items()) if len(text) >= _SHORTEST_README}
    texts = {name: text for text, name in names.items()}
    yield from ((name, texts[name]) for name in pick(texts))


KINDS: dict[str, Callable[[Pick], Iterator[tuple[str, str]]]] = {
    "topics": topics,
    "docstrings": docstrings,
    "code": code,
    "readmes": readmes,
}
PROSE = ("topics", "docstrings")  # what `builtin` means where a model is judged


def is_held_out(name: str) -> bool:
    """Whether a built-in document belongs to the fixed part that nothing is trained or calibrated on."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_EVERY == 0


def find_kind(kind: str) -> Callable[[Pick], Iterator[tuple[str, str]]]:
    """The built-in kind of that name.

    Raises:
        UserError: there is none.
    """
    if kind not in KINDS:
        raise UserError(f"unknown built-in text {kind!r}{did_you_mean(kind, KINDS)}")
    return KINDS[kind]


def builtin_kinds(name: str, default: Iterable[str] = PROSE) -> tuple[str, ...]:
    """The kinds that a text's name stands for: `default` for `builtin`, one for `builtin:KIND`, else none.

    Raises:
        UserError: there is no such kind.
    """
    head, colon, kind = name.partition(":")
    if head != BUILTIN:
        return ()
    if not colon:
        return tuple(default)
    find_kind(kind)
    return (kind,)


@cache
def _read_kind(kind: str, held_out: bool) -> list[str]:
    """One side of a kind; kept, because parsing the library takes seconds and its text does not change."""
    side = find_kind(kind)(lambda names: [name for name in names if is_held_out(name) == held_out])
    return [text for _, text in side]


def builtin_documents(*, held_out: bool, kinds: Iterable[str] = PROSE) -> list[str]:
    """The built-in documents of the given kinds: the held-out tenth, or the other nine.

    Raises:
        UserError: a kind is not one of `KINDS`.
    """
    return [document for kind in kinds for document in _read_kind(kind, held_out)]


def mixed_documents(kind: str) -> Iterator[str]:
    """The documents of a kind that are not held out, in a fixed order that mixes them: by a hash of their names.

    Each is read in its turn, so that a few from all over the library take no longer than its first few.

    Raises:
        UserError: the kind is not one of `KINDS`.
    """

    def mix(names: Iterable[str]) -> list[str]:
        kept = (name for name in names if not is_held_out(name))
        return sorted(kept, key=lambda name: hashlib.sha256(name.encode()).digest())

    return (text for _, text in find_kind(kind)(mix))


def text_name(name: str) -> str:
    """What may be published of how a user named a text: without the folders in which it is kept."""
    return name if name == NO_TEXT or name.startswith(HUB) or builtin_kinds(name) else Path(name).name


def check_text(name: str) -> None:
    """Refuse a text that is not there; what is on the Hub is known when it is read.

    Raises:
        UserError: names it.
    """
    if name.startswith(HUB) or builtin_kinds(name):
        return
    if not name or Path(name).is_dir():
        raise UserError(f"{name or 'an empty name'} is a directory; name its files one by one")
    if not Path(name).exists():
        raise UserError(f"text {name} does not exist; give a path, {BUILTIN!r}, or {HUB}NAME")
    if not Path(name).is_file():  # a pipe would be waited for, and a device has no end
        raise UserError(f"text {name} is a pipe or a device; give the path of a file")
    if Path(name).stat().st_size == 0:
        raise UserError(f"{name} holds no text; give another file, or {BUILTIN!r}")


def read_texts(names: Iterable[str]) -> list[str]:
    """Read the texts that a user named to judge a model on, as documents; see `stream_text` for the names.

    Raises:
        UserError: a text is missing, empty, not UTF-8, or without a column `text`.
        EnvironmentFailure: the Hub cannot be reached.
    """
    documents = [document for name in names for document in stream_text(name, held_out=True)]
    if not documents:
        raise UserError(f"no text given; name a file, or {BUILTIN!r}")
    return documents


def stream_text(name: str, *, held_out: bool, columns: Iterable[str] = ("text",)) -> Iterator[Any]:
    """Read a text that a user named, document by document: a dataset may have no end.

    Args:
        name: a UTF-8 text file, which is one document; a `.jsonl`, `.ndjson`, `.json`, `.csv` or `.parquet` file with
            one of the columns; `builtin` for the built-in prose, or `builtin:KIND` for one of `KINDS`; or
            `hub:NAME[:CONFIG[:SPLIT]]` for a dataset on the Hub with one of the columns.
        held_out: whether to judge a model on it: the held-out built-in documents, and a dataset's `test` split,
            else `validation`, else the first. If not, the other documents, and the split `train`, else the first.
        columns: where a table's documents may stand, the best first: `text` for strings, `messages` for lists.

    Raises:
        UserError: the text is missing, empty, not UTF-8, or without such a column.
        EnvironmentFailure: the Hub cannot be reached.
    """
    if kinds := builtin_kinds(name):
        documents: Iterable[Any] = builtin_documents(held_out=held_out, kinds=kinds)
    elif name.startswith(HUB):
        documents = _read_hub(name, held_out, tuple(columns))
    else:
        documents = _read_file(name, tuple(columns))
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise UserError(f"{name} holds no text; give another file, or {BUILTIN!r}")


def _read_file(name: str, columns: tuple[str, ...]) -> Iterator[Any]:
    check_text(name)
    path = Path(name)
    if (suffix := path.suffix.lower()) in _TABLES:
        with one_line_errors(name):
            from datasets import load_dataset
            from datasets.utils import logging

            logging.set_verbosity(logging.CRITICAL)  # its line would stand beside ours

            table = load_dataset(_TABLES[suffix], data_files=str(path), split="train", streaming=True)
            yield from _documents(name, table, columns)
        return
    try:
        text = path.read_bytes().decode("utf-8-sig")  # a byte order mark is no text; line ends stay as they are
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text (byte {error.start}); convert it first") from None
    if text.strip():
        yield text


def _read_hub(name: str, held_out: bool, columns: tuple[str, ...]) -> Iterator[Any]:
    dataset, config, split = [*name.removeprefix(HUB).split(":"), None, None][:3]
    if not dataset:
        raise UserError(f"{name} names no dataset; write {HUB}NAME")
    with one_line_errors(name):
        from datasets import get_dataset_split_names, load_dataset

        if not split:
            splits = get_dataset_split_names(dataset, config)
            wanted = ("test", "validation") if held_out else ("train",)
            split = next((choice for choice in wanted if choice in splits), splits[0])
        yield from _documents(name, load_dataset(dataset, config, split=split, streaming=True), columns)


def _documents(name: str, rows: Iterable[dict], columns: tuple[str, ...]) -> Iterator[Any]:
    """The first of the columns that a table has; empty rows hold no document."""
    for row in rows:
        column = next((column for column in columns if column in row), None)
        if column is None:
            wanted = " or ".join(map(repr, columns))
            chat = "; calibration reads its 'messages' with --chat, uptraining with chat=true"
            way = chat if "messages" in row else ""
            raise UserError(f"{name} has no column {wanted} (its columns: {', '.join(row)}){way}")
        kind, described = _COLUMNS[column]
        value = row[column] or kind()
        if not isinstance(value, kind):
            raise UserError(f"{name} holds {type(value).__name__} in its column {column!r}; it must be {described}")
        if value.strip() if isinstance(value, str) else value:
            yield value


def join_documents(documents: Iterable[str]) -> str:
    """Join documents by one blank line: the rule of the perplexity protocol."""
    return "\n\n".join(documents)


def text_hash(text: str) -> str:
    """Short SHA-256 of a text, printed with every figure that was measured on it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
