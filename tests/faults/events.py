"""The calls by which a process changes or reads files, counted over a command and what it starts; one is struck.

They are seen by the interpreter's own hooks: every call of a C function, and the system's auditing for renameat2, which
kvfold calls through ctypes. So moments are the same in every run, and lie where files change.
"""

from __future__ import annotations

import io
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any

CHANGES = frozenset(
    {"open", "write", "pwrite", "writelines", "truncate", "ftruncate", "fsync", "close", "__exit__", "sendfile"}
    | {"copy_file_range", "rename", "replace", "renameat2", "link", "symlink", "mkdir", "rmdir", "unlink", "remove"}
    | {"chmod", "utime", "flock", "serialize_file", "write_record", "write_end_of_file", "send", "sendall"}
)
WRITES = frozenset({"write", "pwrite", "fsync", "mkdir", "sendfile", "truncate", "ftruncate", "rename", "renameat2"})
READS = frozenset({"open", "read", "readinto", "readinto1", "read1", "readline", "preadv", "pread", "sendfile"})
_MODULES = frozenset({"posix", "fcntl", "io", "_io", "safetensors._safetensors_rust"})
Strike = Callable[[int], None]
"""Called at a call, with the number of the process that was started first; what it raises is what the call raises."""


class Events:
    """A count that forks share.

    Args:
        names: of the calls that count.
        within: count only calls on files in this folder.
        at: the call to strike, from 1; 0 for none.
        strike: called in the process, and the thread, that makes the call.
    """

    def __init__(
        self,
        names: frozenset[str],
        *,
        within: Path | None = None,
        at: int = 0,
        strike: Strike | None = None,
    ) -> None:
        self.names, self.within, self.at, self.strike = names, within, at, strike
        self._shared = mmap.mmap(-1, 8)

    @property
    def count(self) -> int:
        return struct.unpack("<q", self._shared[:8])[0]

    def watch(self) -> None:
        """From now on, in this process and its forks."""
        self._first = os.getpid()
        threading.setprofile(self._see)
        sys.addaudithook(self._hear)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or called.__name__ not in self.names:
            return
        of = getattr(called, "__self__", None)
        if isinstance(of, io.StringIO | io.BytesIO) or of in (sys.stdout, sys.stderr):
            return
        known = isinstance(of, io.IOBase | socket.socket) or getattr(of, "__name__", "") in _MODULES
        if (known or _is_of_torch(called)) and (self.within is None or self._touches(frame, of)):
            self._happened()

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "ctypes.dlsym" and arguments[1] in self.names:
            self._happened()

    def _happened(self) -> None:
        now = self.count + 1
        self._shared[:8] = struct.pack("<q", now)
        if now == self.at and self.strike:
            self.strike(self._first)

    def _touches(self, frame: FrameType, of: Any) -> bool:
        """Whether the file at hand, or one that the caller holds, lies in the folder."""
        held = [getattr(of, "name", None)]
        for value in frame.f_locals.values():
            held.append(getattr(value, "name", None) if isinstance(value, io.IOBase) else value)
        return any(isinstance(name, str | Path) and self.within in Path(name).absolute().parents for name in held)


def _is_of_torch(called: Any) -> bool:
    return isinstance(called, BuiltinFunctionType) and called.__name__ in ("write_record", "write_end_of_file")
