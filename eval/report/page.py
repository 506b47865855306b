"""The page of a report: one HTML file that needs nothing else, and runs no script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .charts.draw import Chart
from .headings import heading, meaning
from .palette import DARK, LIGHT, properties
from .record import Report, leaves, to_json
from .say import say
from .verdict import ALL

# Figures of a result that have a column of their own in the first table; the others are in the second.
_FIRST = ("name", "attention_kind", "kv_bytes_per_token", "kv_ratio", "perplexity", "perplexity_ratio")
_FIRST += ("kl", "top1_agreement", "verdict")
_LISTS = ("layer_errors", "made_by")


class Figures:
    """The report's figures by their dotted paths, each marked up with its full value, and which of them were shown."""

    def __init__(self, data: dict[str, Any]):
        self.values = dict(leaves(data))
        self.shown: set[str] = set()

    def __call__(self, path: str, text: str | None = None) -> Markup:
        """A figure as people read it, or as `text`; its full value is in the attribute."""
        value = self.values[path]
        self.shown.add(path)
        return Markup('<data value="{}" data-key="{}">{}</data>').format(
            full(value), path, say(path, value) if text is None else text
        )

    def rest(self) -> list[str]:
        """Paths of what has not been shown yet."""
        return [path for path in self.values if path not in self.shown]


def full(value: Any) -> str:
    """A value as an attribute holds it: as JSON has it, texts without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def render(report: Report, charts: Sequence[Chart]) -> str:
    """The page's HTML."""
    folder = files(__package__)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    data = to_json(report)
    figures = Figures(data)
    css = (folder / "page.css").read_text(encoding="utf-8")
    page = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    names = [row.name for row in report.results]
    return page.render(
        report=report,
        figure=figures,
        heading=heading,
        meaning=meaning,
        charts={chart.key: chart for chart in charts},
        css=Markup(css.replace("/*LIGHT*/", properties(LIGHT)).replace("/*DARK*/", properties(DARK))),
        svg=Markup,
        levels=ALL,
        number={name: place for place, name in enumerate(names)},
        best=names.index(report.best.name) if report.best else None,
        scalars=[key for key in data["results"][0] if key not in (*_FIRST, *_LISTS)],
        depth=max(len(row.layer_errors) for row in report.results),
        speed_keys=[key for key in data["speed"]["results"][0] if key != "model"] if data["speed"] else [],
        speed_protocol=["memory_budget_bytes", *(f"protocol.{key}" for key in data["speed"]["protocol"])]
        if data["speed"]
        else [],
        protocol=list(data["protocol"]),
    )
