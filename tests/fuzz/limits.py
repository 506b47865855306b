"""What a reader may do with any file: return, or say in a line what is wrong; soon, and in little room."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfold.common.errors import EnvironmentFailure, UserError

SECONDS = 5.0  # of this process's own time, so that a busy machine fails nobody
ROOM = 512 << 20  # bytes, beside what the process has already
LONGEST = 400  # letters of a message


class TooSlow(BaseException):
    """Not an Exception, so that no reader on the way takes it for a fault of the file."""


class Broken(AssertionError):
    """A reader did what none may."""


def hold(read: Callable[[], object]) -> str:
    """Run a reader within limits.

    Returns:
        What it said of the file; empty if it took it.

    Raises:
        Broken: it did neither, took too long or too much room, or said it in more than a line.
    """
    try:
        with _limited():
            read()
    except (UserError, EnvironmentFailure) as error:
        said = str(error)
        if not said.isprintable() or not 0 < len(said) < LONGEST:
            raise Broken(f"says {said!r} ({len(said)} letters)") from error
        if "memory" in said and isinstance(error, EnvironmentFailure):  # what MemoryError is made to say
            raise Broken("needs too much room") from error
        return said
    except (Exception, TooSlow) as error:
        raise Broken(f"raises {type(error).__name__}: {str(error)[:200]}") from error
    return ""


def kind_of(broken: Broken) -> str:
    """What one mend would mend: the error, and the place that raised it."""
    cause = broken.__cause__
    places = []
    trace = cause.__traceback__ if cause else None
    while trace:
        code = trace.tb_frame.f_code
        places.append(f"{Path(code.co_filename).stem}.{code.co_name}")
        trace = trace.tb_next
    own = [place for place in places if not place.startswith(("limits.", "targets."))]
    where = own[-1:] if not isinstance(cause, TooSlow) else own[:2]  # where time runs out is chance
    return "-".join([type(cause).__name__, *where]).translate(str.maketrans("<>/ ", "____"))


@contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise TooSlow(f"not done after {SECONDS:g} seconds")

    before, (soft, hard) = signal.signal(signal.SIGPROF, late), resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + ROOM, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process: heap and private memory, not files that are mapped."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
