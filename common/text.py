"""Text: the user's files, datasets on the Hub, and the English that every CPython carries.

The built-in kinds are read at run time from the running interpreter. They differ a little between Python
versions, so figures on built-in text name the hash of the text, and compare models within one environment.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from .errors import UserError, did_you_mean
from .sources import one_line_errors

BUILTIN = "builtin"
HUB = "hub:"
_TABLES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # suffix -> datasets' builder
HELD_OUT_EVERY = 10
_NOT_LIBRARY = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}


Wanted = Callable[[str], bool]
"""Says whether a document is wanted, by its name: what is not need not be read."""


def topics(wanted: Wanted) -> Iterator[tuple[str, str]]:
    """Python's language reference as `(name, text)` documents, from `pydoc_data.topics`."""
    from pydoc_data.topics import topics as pages

    # A few pages stand under two names; here under the last, so that no text is on both sides of a line.
    names = {text.strip(): f"topic:{name}" for name, text in sorted(pages.items())}
    yield from ((name, text) for text, name in names.items() if wanted(name))


def docstrings(wanted: Wanted) -> Iterator[tuple[str, str]]:
    """The standard library's docstrings, one document a module. Sources are parsed, never imported."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = f"docstrings:{path.relative_to(root).as_posix()}"
        if _NOT_LIBRARY.intersection(path.relative_to(root).parts) or not wanted(name):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):  # a few library files are deliberately unparsable
            continue
        parts = [
            inspect.cleandoc(doc)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and (doc := ast.get_docstring(node, clean=False))
        ]
        if text := "\n\n".join(part for part in parts if part):
            yield name, text


KINDS: dict[str, Callable[[Wanted], Iterator[tuple[str, str]]]] = {"topics": topics, "docstrings": docstrings}


def is_held_out(name: str) -> bool:
    """Whether a built-in document belongs to the fixed part that nothing is trained or calibrated on."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_EVERY == 0


@cache
def _read_kind(kind: str, held_out: bool) -> list[str]:
    """One side of a kind; kept, because parsing the library takes seconds and its text does not change."""
    return [text for _, text in KINDS[kind](lambda name: is_held_out(name) == held_out)]


def builtin_documents(*, held_out: bool, kinds: Iterable[str] = tuple(KINDS)) -> list[str]:
    """The built-in documents of the given kinds: the held-out tenth, or the other nine.

    Raises:
        UserError: a kind is not one of `KINDS`.
    """
    documents: list[str] = []
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"unknown built-in text {kind!r}{did_you_mean(kind, KINDS)}")
        documents += _read_kind(kind, held_out)
    return documents


def read_texts(names: Iterable[str]) -> list[str]:
    """Read the texts that a user named, as documents.

    Args:
        names: each a UTF-8 text file; a `.jsonl`, `.json`, `.csv` or `.parquet` file with a column `text`;
            `builtin` for the held-out built-in documents; or `hub:NAME[:CONFIG[:SPLIT]]` for a dataset on the
            Hub with a column `text` (its `test` split, else `validation`, else the first).

    Raises:
        UserError: a text is missing, empty, not UTF-8, or without such a column.
        EnvironmentFailure: the Hub cannot be reached.
    """
    documents = []
    for name in names:
        if name == BUILTIN:
            documents += builtin_documents(held_out=True)
        elif name.startswith(HUB):
            documents += _read_hub(name)
        else:
            documents += _read_file(name)
    if not documents:
        raise UserError(f"no text given; name a file, or {BUILTIN!r}")
    return documents


def _read_file(name: str) -> list[str]:
    path = Path(name)
    if not name or path.is_dir():
        raise UserError(f"{name or 'an empty name'} is a directory; name its files one by one")
    if not path.exists():
        raise UserError(f"text {name} does not exist; give a path, {BUILTIN!r}, or {HUB}NAME")
    if path.stat().st_size == 0:
        raise UserError(f"{name} holds no text")
    if path.suffix in _TABLES:
        with one_line_errors(name):
            from datasets import load_dataset
            from datasets.utils import logging

            logging.set_verbosity(logging.CRITICAL)  # its line would stand beside ours

            table = load_dataset(_TABLES[path.suffix], data_files=str(path), split="train", streaming=True)
            return _column(name, table)
    try:
        text = path.read_bytes().decode("utf-8-sig")  # a byte order mark is no text; line ends stay as they are
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text (byte {error.start}); convert it first") from None
    if not text.strip():
        raise UserError(f"{name} holds no text")
    return [text]


def _read_hub(name: str) -> list[str]:
    dataset, config, split = [*name.removeprefix(HUB).split(":"), None, None][:3]
    if not dataset:
        raise UserError(f"{name} names no dataset; write {HUB}NAME")
    with one_line_errors(name):
        from datasets import get_dataset_split_names, load_dataset

        if not split:
            splits = get_dataset_split_names(dataset, config)
            split = next((wanted for wanted in ("test", "validation") if wanted in splits), splits[0])
        return _column(name, load_dataset(dataset, config, split=split, streaming=True))


def _column(name: str, rows: Iterable[dict]) -> list[str]:
    """The column `text` of a table; empty rows hold no document."""
    documents = []
    for row in rows:
        if "text" not in row:
            raise UserError(f"{name} has no column 'text' (its columns: {', '.join(row)})")
        text = row["text"] or ""
        if not isinstance(text, str):
            raise UserError(f"{name} holds {type(text).__name__} in its column 'text'; it must be strings")
        if text.strip():
            documents.append(text)
    if not documents:
        raise UserError(f"{name} holds no text")
    return documents


def join_documents(documents: Iterable[str]) -> str:
    """Join documents by one blank line: the rule of the perplexity protocol."""
    return "\n\n".join(documents)


def text_hash(text: str) -> str:
    """Short SHA-256 of a text, printed with every figure that was measured on it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
