"""Directories that appear whole or not at all.

The new directory is written as a hidden sibling and moved into place at the end, so that whoever looks at
OUT at any moment (or after a kill at any moment) finds nothing, the old one, or the new one. The sibling is
locked while its writer lives; what a dead writer left is cleaned by the next run.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import EnvironmentFailure, UserError

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_MARGIN = 64 << 20
_LONGEST_NAME = 200  # bytes; most file systems hold 255, and the siblings add some
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


@dataclass(frozen=True)
class Kind:
    """What a directory must be to be replaced.

    Attributes:
        name: such as "a checkpoint".
        holds: whether a directory is one; may raise a UserError that says why it must stay all the same.
    """

    name: str
    holds: Callable[[Path], bool]


def _is_checkpoint(folder: Path) -> bool:
    """Whether a directory is of the kind that we replace: its config.json names a model type."""
    try:
        return "model_type" in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


CHECKPOINT = Kind("a checkpoint", _is_checkpoint)


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


def _lock(folder: Path, *, wait: bool = False) -> int:
    """Lock a directory; the lock lasts as long as the descriptor. Never through a symbolic link."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _claim(staging: Path, out: Path) -> int:
    """Create or take over the staging directory; the descriptor returned holds its lock."""
    if staging.is_symlink() or (staging.exists() and not staging.is_dir()):
        raise UserError(f"{staging} stands where the work on {out} belongs; move it away")
    while True:
        staging.mkdir(exist_ok=True)
        try:
            descriptor = _lock(staging)
        except FileNotFoundError:  # its writer finished between the two calls
            continue
        except BlockingIOError:
            raise UserError(f"another kvfold is writing {out}; wait for it, or choose another OUT") from None
        # The lock counts only if the name still leads to the directory that was locked.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), staging.stat()):
                _empty(staging)
                return descriptor
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
    """Move the finished directory to its name; what it replaces goes."""
    if not out.exists():
        if not _rename_with(_NOREPLACE, staging, out):
            staging.rename(out)
        return
    _flush(staging)
    # Exchanged, the old directory carries the staging name: locked too, so that no other writer takes it over
    # while it is being removed.
    old = _lock(out, wait=True)
    try:
        if _rename_with(_EXCHANGE, staging, out):
            shutil.rmtree(staging)
            return
        out.rename(backup)  # a kill before the next line leaves the backup, which the next run restores
        try:
            staging.rename(out)
        except BaseException:
            backup.rename(out)
            raise
        shutil.rmtree(backup, ignore_errors=True)  # the next writer may be removing it as well
    except BaseException:
        with suppress(FileNotFoundError):  # a signal after the exchange: the rest of the old one goes all the same
            if os.path.samestat(os.fstat(old), staging.stat()):
                shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(old)


def siblings(out: Path) -> tuple[Path, Path]:
    """Where the new directory is written, and where the old one waits on systems without an atomic exchange."""
    name = out.name
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f"{name[:50]}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
    return out.with_name(f".{name}.kvfold-new"), out.with_name(f".{name}.kvfold-old")


def check_room(path: Path, needed: int) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        EnvironmentFailure: fewer than `needed` bytes (and a margin for small files) are free where `path` will be.
    """
    folder = next(folder for folder in (real_path(path), *real_path(path).parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN:
        raise EnvironmentFailure(f"{folder} has {free:,} bytes free and {needed:,} are needed; make room first")


def check_output(out: Path, *, overwrite: bool | None, kind: Kind = CHECKPOINT) -> None:
    """Refuse an OUT that may not be written, before any work is done.

    Args:
        out: the directory to appear.
        overwrite: whether the user allowed an existing directory of this kind to be replaced; None where nobody can.
        kind: what may be replaced.

    Raises:
        UserError: it exists and may not be replaced, or what exists is of another kind.
    """
    target = _free_way(out)
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{out} is a file; OUT is the directory to create")
    if not overwrite:
        way_out = "" if overwrite is None else ", or replace it with --overwrite"
        raise UserError(f"{out} exists; choose another name{way_out}")
    if Path.cwd().is_relative_to(target):
        raise UserError(f"{out} holds the current directory; --overwrite does not replace that")
    if any(target.iterdir()) and not kind.holds(target):
        raise UserError(f"{out} is not {kind.name}, so --overwrite does not replace it; move it away")


def check_output_file(out: Path, *, overwrite: bool | None) -> None:
    """Refuse a file that may not be written, before any work is done.

    Args:
        overwrite: whether an existing file may be replaced; None where no command offers to.

    Raises:
        UserError: it exists and may not be replaced, or is no file.
    """
    target = _free_way(out)
    if target.exists() and not target.is_file():  # a device such as /dev/null could even be replaced
        raise UserError(f"{out} is a {'directory' if target.is_dir() else 'device'}; name a file")
    if target.exists() and not overwrite:
        way = "move it away" if overwrite is None else "replace it with --overwrite"
        raise UserError(f"{out} exists; choose another name, or {way}")


def _free_way(out: Path) -> Path:
    """The path to write to, behind links.

    Raises:
        UserError: it leads through a file, or over a link to where nothing is: nobody can say whether that was meant.
    """
    target = real_path(out)
    if out.is_symlink() and not out.exists():
        raise UserError(f"{out} is a link that leads nowhere; mend it, or choose another OUT")
    if blocked := [parent for parent in target.parents if parent.exists() and not parent.is_dir()]:
        raise UserError(f"{blocked[0]} is a file, so {out} cannot be created in it; choose another OUT")
    return target


def real_path(path: Path) -> Path:
    """The absolute path behind all links; a loop of links stays as it is, and fails when it is used."""
    return Path(os.path.realpath(path))


@contextmanager
def output_file(out: Path, *, overwrite: bool | None = False, wait: bool = False) -> Iterator[BinaryIO]:
    """Yield an empty file that becomes `out` when the block ends without an error.

    It is written as a hidden sibling, locked while its writer lives; what a dead writer left is written over.

    Args:
        overwrite: replace an existing file; None where no command offers to.
        wait: for another process that is writing `out`, rather than to fail.

    Raises:
        UserError: `out` exists and may not be replaced, is a directory, or is being written by another process.
        OSError: the disk failed. Nothing half-written is left in either case.
    """
    target = real_path(out)
    staging, _ = siblings(target)
    check_output_file(out, overwrite=overwrite)
    with _parents(target), _claim_file(staging, out, wait) as file:
        try:
            check_output_file(out, overwrite=overwrite)
            yield file
            os.fsync(file)
            if overwrite or not _rename_with(_NOREPLACE, staging, target):
                check_output_file(out, overwrite=overwrite)  # it may be there by now
                staging.replace(target)
        except BaseException:
            staging.unlink(missing_ok=True)
            raise


def _claim_file(staging: Path, out: Path, wait: bool) -> BinaryIO:
    """Create or take over the staging file, empty and locked for as long as it is open."""
    while True:
        file = os.fdopen(os.open(staging, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            raise UserError(f"another kvfold is writing {out}; wait for it, or choose another name") from None
        # The lock counts only if the name still leads to the file that was locked: its writer may have installed it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), staging.stat()):
                file.truncate(0)
                return file
        file.close()


@contextmanager
def output_directory(out: Path, *, overwrite: bool | None = None, kind: Kind = CHECKPOINT) -> Iterator[Path]:
    """Yield an empty staging directory that becomes `out` when the block ends without an error.

    Raises:
        UserError: see `check_output`; or another process is writing the same `out`.
        OSError: the disk failed. Nothing half-written is left in either case.
    """
    shown, out = out, real_path(out)
    staging, backup = siblings(out)
    with _parents(out):
        lock = _claim(staging, shown)
        try:
            if backup.is_dir() and not backup.is_symlink():  # only a run killed in the middle of _install leaves one
                if out.exists():
                    shutil.rmtree(backup, ignore_errors=True)
                else:
                    backup.rename(out)
            check_output(out, overwrite=overwrite, kind=kind)
            yield staging
            _install(staging, backup, out)
        except BaseException:
            with suppress(FileNotFoundError):  # unless it is installed already, or somebody else's by now
                if os.path.samestat(os.fstat(lock), staging.stat()):
                    shutil.rmtree(staging, ignore_errors=True)
            raise
        finally:
            os.close(lock)


@contextmanager
def working_folder(folder: Path) -> Iterator[Path]:
    """Create a folder, unless it is there, and keep other processes of kvfold out of it.

    One that was made here, and that the block leaves without a file when it fails, goes again.

    Raises:
        UserError: another process is working in it, or a file has its name.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder to work in")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = _lock(real_path(folder))
    except BlockingIOError:
        raise UserError(f"another kvfold is working in {folder}; wait for it, or choose another folder") from None
    try:
        yield folder
    except BaseException:
        if made:
            inside = sorted(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())
            with suppress(OSError):  # one that is not empty stays, and so do those that it is in
                for path in [*reversed(inside), *made]:
                    path.rmdir()
        raise
    finally:
        os.close(descriptor)


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Create a folder for temporary files (TMPDIR says where), which goes again, as far as that is still allowed.

    Python's own TemporaryDirectory does not end, before 3.12, where it may not remove its folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _parents(out: Path) -> Iterator[None]:
    """Create the folders that `out` will be in; those that were missing go again if the block fails."""
    made = [parent for parent in out.parents if not parent.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
