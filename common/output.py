"""How a report reaches standard output: one JSON object, or a table for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .parallel import is_main_process
from .shown import say, shown, without_secrets

A_ROW = 10  # layers a row of a table; round, so that a layer's number can be read off


def to_dict(report: Any) -> dict[str, Any]:
    """A report as plain data; a dataclass's fields are the JSON keys."""
    return dataclasses.asdict(report) if dataclasses.is_dataclass(report) else dict(report)


def print_report(report: Any, *, as_json: bool, hide: Sequence[str] = ()) -> None:
    """Print one report, unless another process does; `hide` names fields that the caller shows in another way."""
    data = to_dict(report)
    if as_json:
        if is_main_process():
            print(without_secrets(json.dumps(data, allow_nan=False)))
        return
    kept = {key: value for key, value in data.items() if key not in hide}
    rows = [(key, _say(key, value)) for key, value in _flat(kept).items()]
    width = max(len(key) for key, _ in rows)
    print_lines(*(f"{key:<{width}}  {value}" for key, value in rows))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, title: str = "") -> None:
    """Print rows under headings, as `print_report` does; `columns` maps each heading to a key of the rows.

    The first column stands left. A title is set off from what was printed before.
    """
    if title:
        print_lines("", title)
    cells = [list(columns), *([_say(key, row[key]) for key in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        head, *rest = (
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        print_lines("  ".join([head, *rest]))


def print_layers(title: str, figures: Sequence[float | None]) -> None:
    """Print one figure a layer, under a title."""
    columns = [f"+{i}" for i in range(min(A_ROW, len(figures)))]
    rows = [
        {"layer": start, **dict.fromkeys(columns, ""), **dict(zip(columns, figures[start:], strict=False))}
        for start in range(0, len(figures), A_ROW)
    ]
    print_table(rows, {name: name for name in ("layer", *columns)}, title=title)


def print_warnings(warnings: Iterable[str]) -> None:
    """What a user should know beside a report, a line each, on standard error from one process of all."""
    if is_main_process():
        for warning in warnings:
            say(f"warning: {warning}")


def print_lines(*lines: str) -> None:
    """Print lines beside a report, from one process of all."""
    if is_main_process():
        print(*map(shown, lines), sep="\n")


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _say(key: str, value: Any) -> str:
    if value is None or (isinstance(value, str | list | tuple) and not value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    if isinstance(value, int) and "bytes" in key:
        return f"{value:,}{_bytes(value)}"
    if isinstance(value, int) and "flops" in key:
        return f"{value:,}{_in_brackets(*_decimal(value, 'FLOP'))}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def _bytes(count: int) -> str:
    """In binary units, as machines are sized, and from a gigabyte on in decimal ones beside, as papers are."""
    # Half a GiB is a size that people know, half a MiB is not.
    units = ((4, "TiB", 1), (3, "GiB", 0.5), (2, "MiB", 1), (1, "KiB", 1))
    said = [f"{count / 1024**power:.2f} {unit}" for power, unit, least in units if count >= least * 1024**power][:1]
    return _in_brackets(*said, *(_decimal(count, "B") if count >= 10**9 else ()))


def _decimal(count: int, unit: str) -> list[str]:
    prefixes = ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"))
    return [f"{count / 10**power:.2f} {prefix}{unit}" for power, prefix in prefixes if count >= 10**power][:1]


def _in_brackets(*texts: str) -> str:
    return f" ({', '.join(texts)})" if texts else ""
