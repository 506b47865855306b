"""Which files are statistics of `kvfold calibrate`, told by their headers: free of torch, so that a wrong file is told
before it is imported."""

from __future__ import annotations

from pathlib import Path

from ...common.atomic import check_output_file
from ...common.errors import UserError
from ..headers import read_header

METADATA = "kvfold"  # the key under which a file says what its statistics were made of


def is_statistics(path: Path) -> bool:
    """Whether a file is of the kind that `kvfold calibrate` writes, of whatever version."""
    try:
        return METADATA in read_header(path)[1]
    except UserError:
        return False


def check_statistics(path: Path) -> None:
    """Refuse what is not a file of statistics.

    Raises:
        UserError: it is none.
    """
    if not path.exists():
        raise UserError(f"statistics {path} do not exist; make them with kvfold calibrate")
    if not path.is_file():
        raise UserError(f"{path} is no file; name a file that kvfold calibrate wrote")
    if not is_statistics(path):
        raise UserError(f"{path} holds no statistics of kvfold calibrate; make them again")


def check_new_statistics(out: Path, *, overwrite: bool) -> None:
    """Refuse a file of statistics that may not be written. One that is there may turn out to hold what is asked for.

    Raises:
        UserError: something else is there.
    """
    there = out.is_file()
    if there and overwrite and not is_statistics(out):
        raise UserError(f"{out} holds no statistics, so --overwrite does not replace it; move it away")
    check_output_file(out, overwrite=overwrite or (there and is_statistics(out)))
