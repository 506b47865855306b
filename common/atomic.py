"""Directories that appear whole or not at all.

The new directory is written as a hidden sibling and moved into place at the end, so that whoever looks at
OUT at any moment (or after a kill at any moment) finds nothing, the old one, or the new one. The sibling is
locked while its writer lives; what a dead writer left is cleaned by the next run.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import EnvironmentFailure, UserError

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_MARGIN = 64 << 20
MARKER = "config.json"  # what an existing directory must hold before it may be replaced
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def _rename_with(flag: int, source: Path, target: Path) -> bool:
    """Linux's renameat2; False where the system or the file system does not offer the flag."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    if (code := ctypes.get_errno()) in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(target))


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _claim(staging: Path, out: Path) -> int:
    """Create or take over the staging directory; the descriptor returned holds its lock."""
    while True:
        staging.mkdir(exist_ok=True)
        try:
            descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # its writer finished between the two calls
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock counts only if the name still leads to the directory that was locked.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), staging.stat()):
                    _empty(staging)
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"another kvfold is writing {out}; wait for it, or choose another OUT") from None
        os.close(descriptor)


def _flush(folder: Path) -> None:
    """Put a directory's files on the disk, before the only other copy goes."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _install(staging: Path, backup: Path, out: Path) -> None:
    if not out.exists():
        if not _rename_with(_NOREPLACE, staging, out):
            staging.rename(out)
        return
    _flush(staging)
    if not _rename_with(_EXCHANGE, staging, out):
        out.rename(backup)  # a kill before the next line leaves the backup, which the next run restores
        try:
            staging.rename(out)
        except BaseException:
            backup.rename(out)
            raise
        shutil.rmtree(backup)
        return
    shutil.rmtree(staging)


def check_room(path: Path, needed: int) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        EnvironmentFailure: fewer than `needed` bytes (and a margin for small files) are free where `path` will be.
    """
    folder = next(folder for folder in (path.resolve(), *path.resolve().parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN:
        raise EnvironmentFailure(f"{folder} has {free:,} bytes free and {needed:,} are needed; make room first")


def check_output(out: Path, *, overwrite: bool, marker: str = MARKER) -> None:
    """Refuse an OUT that may not be written, before any work is done.

    Args:
        out: the directory to appear.
        overwrite: whether the user allowed an existing one to be replaced.
        marker: a file that shows that an existing directory is one of ours to replace.

    Raises:
        UserError: it exists and `overwrite` is false, or it is not a checkpoint.
    """
    if blocked := [parent for parent in out.parents if parent.exists() and not parent.is_dir()]:
        raise UserError(f"{blocked[0]} is a file, so {out} cannot be created in it; choose another OUT")
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file; OUT is the directory to create")
    if not overwrite:
        raise UserError(f"{out} exists; choose another OUT, or replace it with --overwrite")
    if any(out.iterdir()) and not (out / marker).is_file():
        raise UserError(f"{out} is not a checkpoint (no {marker}), so --overwrite does not replace it; move it away")


@contextmanager
def output_directory(out: Path, *, overwrite: bool = False, marker: str = MARKER) -> Iterator[Path]:
    """Yield an empty staging directory that becomes `out` when the block ends without an error.

    Raises:
        UserError: see `check_output`; or another process is writing the same `out`.
        OSError: the disk failed. Nothing half-written is left in either case.
    """
    out = out.resolve()
    check_output(out, overwrite=True, marker=marker)
    staging, backup = (out.with_name(f".{out.name}.kvfold-{part}") for part in ("new", "old"))
    made = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = _claim(staging, out)
    try:
        if backup.exists():  # only a run killed in the middle of _install leaves one
            if out.exists():
                shutil.rmtree(backup)
            else:
                backup.rename(out)
        check_output(out, overwrite=overwrite, marker=marker)
        yield staging
        _install(staging, backup, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    finally:
        os.close(lock)
