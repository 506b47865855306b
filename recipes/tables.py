"""Tables in Markdown, as the documents show them."""

from __future__ import annotations


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def rule(columns: int) -> str:
    """What stands between the titles and the rows."""
    return "|" + "---|" * columns
