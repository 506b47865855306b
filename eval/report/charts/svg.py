"""What matplotlib writes, made fit to stand in a page: no ids that clash, and colours of the page's theme."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from ..palette import LIGHT

_TAG = re.compile(r"<[^>]*>")
_NAMES = {value: name for name, value in LIGHT.items()}


def inline(text: str, *, prefix: str, title: str, description: str, hints: Mapping[str, str]) -> str:
    """An SVG element for a page.

    Args:
        text: a file that matplotlib wrote, with text as text.
        prefix: of all ids, unlike those of other charts on the page.
        title, description: for those who do not see it.
        hints: what to say of a group when it is pointed at, by its id.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    head, body = text.split(">", 1)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head).groups()
    # Text holds no < or >, so only matplotlib's own marks are touched.
    body = _TAG.sub(lambda tag: _themed(_renamed(tag[0], prefix)), body)
    for name, hint in hints.items():
        group = f'<g id="{prefix}-{name}">'
        body = body.replace(group, f"{group}<title>{escape(hint)}</title>")
    return (
        f'<svg class="{prefix.rpartition("-")[2]}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="{prefix}-title {prefix}-desc" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{prefix}-title">{escape(title)}</title><desc id="{prefix}-desc">{escape(description)}</desc>'
        + re.sub(r"\n\s*", "\n", body)
    )


def _renamed(tag: str, prefix: str) -> str:
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", tag)


def _themed(tag: str) -> str:
    # The page has its own font.
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    return re.sub(r"(fill|stroke): (#[0-9a-f]{6})", _property, tag)


def _property(match: re.Match[str]) -> str:
    role, colour = match.groups()
    return f"{role}: var(--{_NAMES[colour]})" if colour in _NAMES else match[0]
