"""Foreign words made fit for a model card: Markdown, HTML and YAML; and names of files without their folders."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path, PurePath
from typing import Any

from ..common.text import HUB
from ..eval.report.plain import plain

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_LONGEST = 400  # letters of a foreign text that a card shows
_MARKS = re.compile(r"([\\`*_\[\]|~#!$])")
_LINE_STARTS = re.compile(r"^([-+](?=\s|$)|[-=]{3,}$|\d+(?=[.)](\s|$)))")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
# What GitHub's Markdown makes a link of without being asked.
_LINKS = re.compile(r"(?i)\b(www|https?|ftp|mailto|xmpp)([.:])")
# An absolute path, or one from home, wherever it stands in a text: `/a/b` and `~/b`, but no part of a URL.
_ABSOLUTE = re.compile(r"(?<![\w.:/~-])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\"<>|`,;:()]+[/\\])+([^\s/\\'\"<>|`,;:()]*)")


def words(text: object) -> str:
    """A foreign text in one line of words, which no Markdown or HTML in it can leave."""
    said = plain(str(text))
    said = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."
    said = "".join(_ENTITIES.get(letter, letter) for letter in said.strip())
    said = _MARKS.sub(r"\\\1", said)
    said = _LINE_STARTS.sub(lambda found: f"&#{ord(found[0][0])};{found[0][1:]}", said)
    return _LINKS.sub(lambda found: f"{found[1]}&#{ord(found[2])};", said)


def fenced(text: str, language: str = "") -> str:
    """A block of code that no line of it can end."""
    runs = re.findall(r"`{3,}", text)
    fence = "`" * (1 + max((len(run) for run in runs), default=2))
    return f"{fence}{language}\n{text}\n{fence}"


def without_folders(text: str) -> str:
    """A text in which every absolute path is its last part."""
    return _ABSOLUTE.sub(lambda found: found[1] or PurePath(found[0]).name, text)


def public_name(name: str, known: Collection[str] = ()) -> str:
    """What may be published of a name: a path's last part; ids of the Hub, texts of the Hub and built-in ones whole.

    Args:
        known: ids of the Hub; a name with one slash that is none of these may as well be a path.
    """
    dataset = name.removeprefix(HUB).partition(":")[0] if name.startswith(HUB) else ""
    if name in known or (dataset and HUB_ID.fullmatch(dataset)):
        return plain(name)
    return plain(re.split(r"[/\\]", name.rstrip("/\\"))[-1])


def is_local(name: str) -> bool:
    """Whether a name is a path of this machine rather than an id of the Hub."""
    if name.startswith(("/", "~", "./", "../", "\\")) or name in (".", ".."):
        return True
    try:
        return "/" in name and Path(name).exists()
    except (OSError, ValueError):
        return False


def mapped(value: Any, of: Callable[[str], str]) -> Any:
    """Plain data with every text in it, keys as well, put through a function."""
    if isinstance(value, str):
        return of(value)
    if isinstance(value, list):
        return [mapped(one, of) for one in value]
    if isinstance(value, dict):
        return {of(str(key)): mapped(one, of) for key, one in value.items()}
    return value
