"""Where a trial takes place: its folder, and its own folder for temporary files; on the small disk if there is one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SMALL = 160 << 20  # bytes; kvfold wants 64 MiB to be free before it begins
_FILLER = "filler"


@dataclass(frozen=True)
class Place:
    """A place.

    Attributes:
        root: of all of it.
        log: of what the command says, which must not fill the small disk.
    """

    root: Path
    log: Path

    @property
    def folder(self) -> Path:
        """In which the command runs."""
        return self.root / "here"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    def lay_out(self, shared: Path, names: Iterable[str]) -> None:
        """Begin anew, with copies of what the command reads."""
        for name in ("here", "tmp", "cache"):
            shutil.rmtree(self.root / name, ignore_errors=True)
            (self.root / name).mkdir(parents=True)
        self.empty()
        for name in names:
            copy(shared / name, self.folder / name)

    def enter(self, *, unprivileged: bool) -> None:
        """In the fork: temporary files and cache here, and without the right of root to pass over rights."""
        os.environ |= {"TMPDIR": str(self.tmp), "KVFOLD_CACHE": str(self.root / "cache")}
        tempfile.tempdir = None
        if unprivileged and os.geteuid() == 0:
            _drop_capabilities()

    def fill(self) -> None:
        """Leave no byte free."""
        descriptor = os.open(self.root / _FILLER, os.O_WRONLY | os.O_CREAT)
        try:
            at, piece = 0, 64 << 20
            while piece >= 4096:
                try:
                    os.posix_fallocate(descriptor, at, piece)
                    at += piece
                except OSError:
                    piece //= 2
        finally:
            os.close(descriptor)

    def empty(self) -> None:
        (self.root / _FILLER).unlink(missing_ok=True)


def _drop_capabilities() -> None:
    """Then the modes of files count for root as for everybody."""
    version, none = 0x20080522, 6 * [0]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset((ctypes.c_uint32 * 2)(version, 0), (ctypes.c_uint32 * 6)(*none)):
        raise OSError(ctypes.get_errno(), "capset")


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def mount_small_disk(folder: Path) -> bool:
    """Put a small disk in memory there, which only root may; returns whether it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.path.ismount(folder):
        return True
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SMALL}", "kvfold-faults", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


def unmount(folder: Path) -> None:
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)
