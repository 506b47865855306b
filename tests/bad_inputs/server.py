"""A process with kvfold's command line and nothing else, that forks a child for every command it is sent.

So each command begins as in a fresh process, and none pays for the imports again. Run as a script, with the modules to
import beforehand as arguments; it reads a request a line from standard input, and answers a line each.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from importlib import import_module
from typing import Any, NoReturn

PATIENCE = 60.0  # seconds until a command counts as hanging
_POLL = 0.005
# What reads the weights themselves, as module, class if any, and name.
_READERS = (
    ("kvfold.convert.checkpoint", "Checkpoint", "tensor"),
    ("kvfold.convert.checkpoint", "Checkpoint", "pieces"),
    ("transformers", "PreTrainedModel", "from_pretrained"),
)


def serve(preloaded: list[str]) -> None:
    """Import, say what that took, and then answer."""
    start = time.perf_counter()
    import_module("kvfold.cli")
    answer: dict[str, Any] = {"seconds": time.perf_counter() - start, "megabytes": _peak()}
    for module in preloaded:
        import_module(module)
    _say(answer)
    for line in sys.stdin:
        _say(_fork(json.loads(line)))
    os._exit(0)  # taking torch down takes seconds


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _fork(request: dict[str, Any]) -> dict[str, Any]:
    """Run a command in a child, and say how it ended; one that hangs is killed."""
    reader, writer = os.pipe()
    start = time.perf_counter()
    if (child := os.fork()) == 0:
        os.close(reader)
        _run(request, writer)
    os.close(writer)
    end = start + PATIENCE
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.perf_counter() > end:
            os.kill(child, signal.SIGKILL)
            end += PATIENCE
        time.sleep(_POLL)
    with os.fdopen(reader) as pipe:
        said = json.loads(pipe.read() or "{}")
    return {"status": os.waitstatus_to_exitcode(status), "megabytes": usage.ru_maxrss / 1024, **said}


def _run(request: dict[str, Any], writer: int) -> NoReturn:
    """The child: kvfold's own `main`, up to where it would end the process."""
    from kvfold import cli

    read: list[str] = []

    def leave(status: int) -> NoReturn:
        packages = sorted({name.partition(".")[0] for name in sys.modules})
        said = {"seconds": time.perf_counter() - start, "packages": packages, "read": read}
        os.write(writer, json.dumps(said).encode())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)

    cli.leave = leave
    _watch(read)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for number, name in enumerate((os.devnull, request["stdout"], request["stderr"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    sys.argv = ["kvfold", *request["args"]]
    start = time.perf_counter()
    cli.main()


def _watch(read: list[str]) -> None:
    """Note whenever weights are read."""
    for module, holder, name in _READERS:
        if module == "transformers" and module not in sys.modules:
            continue
        owner = getattr(import_module(module), holder)
        was = owner.__dict__[name]
        inner = getattr(was, "__func__", was)

        def noted(*args: Any, inner: Any = inner, name: str = f"{holder}.{name}", **options: Any) -> Any:
            read.append(name)
            return inner(*args, **options)

        setattr(owner, name, classmethod(noted) if isinstance(was, classmethod) else noted)


if __name__ == "__main__":
    serve(sys.argv[1:])
