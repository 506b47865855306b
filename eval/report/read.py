"""Read a report back from its figures: what `write` wrote, or what anybody put in its place."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ...common.errors import UserError
from .plain import cleaned, plain
from .record import FORMAT, FORMAT_VERSION, Report
from .write import FIGURES

_LARGEST = 64 << 20  # bytes
_MOST_RESULTS = 100  # whose marks find their places on a chart within seconds


def read_report(folder: Path) -> Report:
    """The figures of a report, typed.

    Raises:
        UserError: there is none, or it is broken, or of another version.
    """
    path = folder / FIGURES
    if not path.is_file():
        raise UserError(f"{folder} holds no {FIGURES}; give the folder that kvfold report wrote")
    if path.stat().st_size > _LARGEST:
        raise UserError(f"{path} is larger than any report; make it again with kvfold report")
    try:
        data = json.loads(path.read_bytes(), parse_constant=_no_number)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UserError(f"{path} is no report of kvfold's; give the folder that kvfold report wrote")
        if data.get("format_version") != FORMAT_VERSION:
            raise UserError(f"{path} was written by another kvfold; make it again with kvfold report")
        report = cleaned(_typed(data, Report, "report"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        said = plain(str(error))[:120]
        raise UserError(f"{path} is broken ({said}); make it again with kvfold report") from None
    if not report.results:
        raise UserError(f"{path} has no results; make it again with kvfold report")
    if len(report.results) > _MOST_RESULTS:
        count = len(report.results)
        raise UserError(f"{path} has {count} results, more than a page can show; make it again with fewer")
    return report


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _typed(value: Any, kind: Any, where: str) -> Any:
    """Plain data as a dataclass, or whatever an annotation says.

    Raises:
        ValueError: it is something else.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (kind,) = (one for one in inner if one is not NoneType)
        return _typed(value, kind, where)
    if origin in (list, tuple):
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        return origin(_typed(one, inner[0], f"{where}.{place}") for place, one in enumerate(value))
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is no table")
        hints, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
        if strange := sorted(value.keys() - known.keys()):
            raise ValueError(f"{where} has an unknown key {strange[0]!r}")
        needed = {n for n, one in known.items() if one.default is MISSING and one.default_factory is MISSING}
        if missing := sorted(needed - value.keys()):
            raise ValueError(f"{where} lacks {missing[0]}")
        return kind(**{name: _typed(one, hints[name], f"{where}.{name}") for name, one in value.items()})
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is not {getattr(kind, '__name__', kind)}")
    return value
