"""What a page shows, read back from its HTML."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from kvfold.eval.report.say import NOTHING

UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "%": 0.01, "M": 1e6, "G": 1e9, "T": 1e12}
_NUMBER = re.compile(r"(-?[\d,]*\.?\d+(?:e[+-]\d+)?)\.?\s*(\S*)")


class Page(HTMLParser):
    """Figures as (key, value, text), tags, and text of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.figures: list[tuple[str, str, str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: dict[str, str | None] | None = None
        self._text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "data":
            self._open, self._text = dict(attrs), ""

    def handle_data(self, data):
        self._text += data

    def handle_endtag(self, tag):
        if tag == "data" and self._open:
            self.figures.append((self._open["data-key"], self._open["value"], self._text))
            self._open = None


def as_attribute(leaf) -> str:
    """A leaf of report.json as the page has to hold it."""
    return leaf if isinstance(leaf, str) else json.dumps(leaf)


def agrees(text: str, leaf) -> bool:
    """Whether what is read is the leaf, rounded."""
    if leaf is None or leaf == "":
        return text in (NOTHING, "none")
    if isinstance(leaf, bool):
        return text == ("yes" if leaf else "no")
    if isinstance(leaf, str):
        return text == leaf
    number, unit = _NUMBER.fullmatch(text).groups()
    factor = UNITS.get(unit[:2]) or UNITS.get(unit[:1], 1)
    return abs(float(number.replace(",", "")) * factor - leaf) <= 0.006 * abs(leaf)
