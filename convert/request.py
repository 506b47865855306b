"""What every conversion that may calibrate and refine is asked for, checked before a file is opened."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..common.errors import UserError
from ..common.text import text_name
from .calibration.knobs import Calibration, RefineKnobs
from .calibration.text import CalibText
from .headers import FLOATS
from .source import Source

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from .calibration.store import Statistics

    class ReportThatWarns(DataclassInstance, Protocol):
        @property
        def warnings(self) -> list[str]: ...

    Report = TypeVar("Report", bound=ReportThatWarns)


NO_FISHER = (
    "the statistics of {path} hold no Fisher moments, so the result is worse; make them anew with kvfold calibrate, "
    "leaving --no-fisher out, or give --no-fisher here too, if that is meant"
)


@dataclass(frozen=True)
class Request:
    """How a conversion learns from text.

    Attributes:
        how: of calibration.
        refining: of refinement, None without.
        compares: whether the conversion itself needs statistics, as far as its method goes.
        stats: a file of them.
    """

    how: Calibration
    refining: RefineKnobs | None
    compares: bool
    stats: Path | None

    @property
    def weights_only(self) -> bool:
        return self.how.text.weights_only

    @property
    def calibrates(self) -> bool:
        return self.compares and not self.weights_only


# Options of a conversion that say where and how it is done, and not what comes of it.
_BESIDE_THE_RESULT = frozenset(
    {"src", "out", "revision", "overwrite", "dry_run", "hash", "progress", "calib_batch_size", "device", "offload"}
)


def asked_for(convert: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a conversion was asked for beside its defaults, as plain data, so that its command can be written again.

    Texts and files are named without the folders in which a user keeps them.

    Args:
        convert: the function.
        given: its arguments by name, such as its `locals()`.
    """
    asked = {}
    for name, parameter in inspect.signature(convert).parameters.items():
        value = given[name]
        value = list(value) if isinstance(value, list | tuple) else value
        default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        if name not in _BESIDE_THE_RESULT and value != default:
            asked[name] = value
    if "calib" in asked:
        texts = asked["calib"]
        asked["calib"] = [text_name(text) for text in ([texts] if isinstance(texts, str) else texts)]
    if "stats" in asked:
        asked["stats"] = Path(asked["stats"]).name
    return asked


def check_writing(dtype: str | None, max_shard_size: int | None) -> None:
    """Refuse a dtype or a size of shards that cannot be written.

    Raises:
        UserError: names it.
    """
    if dtype is not None and dtype not in FLOATS.values():
        raise UserError(f"dtype {dtype} cannot be written; choose one of {', '.join(FLOATS.values())}")
    if max_shard_size is not None and max_shard_size < 1:
        raise UserError(f"a shard of {max_shard_size} bytes holds nothing; give a positive size such as 5GB")


def request(
    *,
    calib: Sequence[str],
    calib_windows: int,
    calib_window: int | None,
    calib_builtin: bool,
    chat: bool,
    fisher: bool,
    offload: bool,
    stats: str | Path | None,
    refine: int,
    refine_passes: int | None,
    device: str,
    calib_dtype: str,
    calib_batch_size: int,
    dtype: str | None,
    max_shard_size: int | None,
    compares: bool,
    method: str,
    refining: Mapping[str, Any] = MappingProxyType({}),
) -> Request:
    """Check what is asked for.

    Args:
        compares: whether the conversion needs statistics.
        method: what to call it to the user.
        refining: the knobs of refinement that differ from `RefineKnobs`; `refine_passes` wins over them.

    Raises:
        UserError: something cannot be, or contradicts something else.
    """
    check_writing(dtype, max_shard_size)
    text = CalibText(calib, calib_windows, calib_window, calib_builtin, chat)
    how = Calibration(text, fisher, offload, calib_batch_size, device, calib_dtype)
    asked = {} if refine_passes is None else {"passes": refine_passes}
    knobs = RefineKnobs(refine, **{**refining, **asked}) if refine else None
    if calib and not compares and not knobs and not text.weights_only:
        raise UserError(f"{method} reads no text; leave --calib out, or add --refine")
    if stats and not compares:
        raise UserError(f"{method} needs no statistics; leave --stats out")
    if stats and calib and not knobs:
        raise UserError("--stats were collected on a text already; leave --calib out, which only --refine would read")
    if knobs and text.weights_only:
        raise UserError("--calib none leaves --refine no text; leave one of them out")
    return Request(how, knobs, compares, Path(stats) if stats else None)


def said_of(statistics: Statistics) -> dict[str, Any]:
    """What a report says of the statistics that were used."""
    about = statistics.about
    return {"stats": str(statistics.path), "calib_tokens": about.tokens, "calib_kinds": about.kinds}


def doubts(asked: Request, statistics: Statistics) -> list[str]:
    """Warnings about the statistics that were used: a file may be less than what would have been made in its place."""
    return [NO_FISHER.format(path=statistics.path)] if asked.how.fisher and not statistics.about.fisher else []


def rehearse(report: Report, source: Source, asked: Request) -> Report:
    """Read what a conversion would read, without running the model; returns the report with what would be done."""
    if not asked.calibrates and not asked.refining:
        return report
    from .calibration.calibrate import Runner, published
    from .calibration.store import Statistics

    runner, said = Runner(source, asked.how), dict[str, Any]()
    if asked.calibrates and asked.stats:
        statistics = Statistics.open(asked.stats)
        said |= said_of(statistics) | {"warnings": [*report.warnings, *doubts(asked, statistics)]}
    elif asked.calibrates:
        windows = runner.windows()
        said |= {"calib_tokens": windows.tokens, "calib_kinds": published(windows.counts)}
    if asked.refining:
        windows = runner.windows(asked.refining.windows)
        said |= {"refine_windows": len(windows), "refine_passes": asked.refining.passes}
    return replace(report, **said)
