"""Text that is there without a network: the user's files, and the English that every CPython carries.

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

BUILTIN = "builtin"
HELD_OUT_EVERY = 10
_NOT_LIBRARY = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}


def topics() -> Iterator[tuple[str, str]]:
    """Python's language reference as `(name, text)` documents, from `pydoc_data.topics`."""
    from pydoc_data.topics import topics as pages

    for name, text in sorted(pages.items()):
        yield f"topic:{name}", text.strip()


def docstrings() -> Iterator[tuple[str, str]]:
    """The standard library's docstrings, one document a module. Sources are parsed, never imported."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _NOT_LIBRARY.intersection(path.relative_to(root).parts):
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
            yield f"docstrings:{path.relative_to(root).as_posix()}", text


KINDS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {"topics": topics, "docstrings": docstrings}


def is_held_out(name: str) -> bool:
    """Whether a built-in document belongs to the fixed part that nothing is trained or calibrated on."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_EVERY == 0


@cache
def _read_kind(kind: str) -> list[tuple[str, str]]:
    """A kind's documents; parsing the whole library takes seconds, and its text does not change."""
    return list(KINDS[kind]())


def builtin_documents(*, held_out: bool, kinds: Iterable[str] = tuple(KINDS)) -> list[str]:
    """The built-in documents of the given kinds: the held-out tenth, or the other nine.

    Raises:
        UserError: a kind is not one of `KINDS`.
    """
    documents = []
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"unknown built-in text {kind!r}{did_you_mean(kind, KINDS)}")
        documents += [text for name, text in _read_kind(kind) if is_held_out(name) == held_out]
    return documents


def read_texts(names: Iterable[str]) -> list[str]:
    """Read the texts that a user named: paths, or ``builtin`` for the held-out built-in documents.

    Raises:
        UserError: a file is missing, a directory, empty, or not UTF-8.
    """
    documents = []
    for name in names:
        if name == BUILTIN:
            documents += builtin_documents(held_out=True)
            continue
        path = Path(name)
        if path.is_dir():
            raise UserError(f"{name} is a directory; name its files one by one")
        if not path.exists():
            raise UserError(f"text {name} does not exist; give a path, or {BUILTIN!r}")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{name} is not UTF-8 text (byte {error.start}); convert it first") from None
        if not text.strip():
            raise UserError(f"{name} holds no text")
        documents.append(text)
    if not documents:
        raise UserError(f"no text given; name a file, or {BUILTIN!r}")
    return documents


def join_documents(documents: Iterable[str]) -> str:
    """Join documents by one blank line: the rule of the perplexity protocol."""
    return "\n\n".join(documents)


def text_hash(text: str) -> str:
    """Short SHA-256 of a text, printed with every figure that was measured on it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
