"""``python -m tests.fuzz TARGET [--minutes M] [--corpus DIR]``: hostile files for one reader, as long as one likes.

With atheris in the environment, coverage of kvfold and of what reads for it guides the search (`pip install atheris`:
there are wheels for CPython 3.11 to 3.13 on Linux; it is no dependency of the project). Without, the files are those
of the tests, with other draws. Whatever breaks a reader goes to ``DIR/crashes``, once a kind, and does not end the
search; ``python -m tests.fuzz TARGET FILE...`` reads such files again.

The search runs in a process of its own, which libFuzzer ends when it is done, or when the process hangs outside Python
or grows beyond 2 GiB; then another goes on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

INSTRUMENTED = ["kvfold", "gguf", "yaml", "json"]
_RSS_MIB, _HANG, _LONGEST = 2048, 30, 1 << 16  # of the whole process; seconds; bytes of a file
_TALLY, _CRASHES = "tally.json", "crashes"
_DONE = 77  # exit status that libFuzzer uses for nothing


class Tally:
    """What has been tried, kept in a file for the process that waits."""

    def __init__(self, corpus: Path, name: str):
        from .targets import TARGETS

        self.corpus, self.name, self.target = corpus, name, TARGETS[name]
        self.path = corpus / _TALLY
        self.executions, self.kinds = 0, set()
        if self.path.exists():
            said = json.loads(self.path.read_text())
            self.executions, self.kinds = said["executions"], set(said["kinds"])
        self.scratch = Path(tempfile.mkdtemp(prefix="kvfold-fuzz-"))

    def run(self, file: bytes) -> None:
        from .limits import Broken, hold, kind_of
        from .targets import read_in

        self.executions += 1
        try:
            hold(lambda: read_in(self.target, file, self.scratch))
        except Broken as broken:
            if (kind := kind_of(broken)) not in self.kinds:
                self.kinds.add(kind)
                (self.corpus / _CRASHES / kind).write_bytes(file)
                print(f"{self.name}: {kind}: {str(broken)[:200]} ({self.corpus / _CRASHES / kind})", flush=True)
                self.save()
        if self.executions % 100 == 0:
            self.save()

    def save(self) -> None:
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps({"executions": self.executions, "kinds": sorted(self.kinds)}))
        aside.replace(self.path)


def guided(corpus: Path, name: str, seconds: int) -> None:
    """By coverage; does not return."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        tally = Tally(corpus, name)

    def mutated(file: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        found = tally.target.mutate(file, random) if random.randint(0, 3) else atheris.Mutate(file, len(file) + 64)
        return found[:most]

    flags = {"max_total_time": seconds, "rss_limit_mb": _RSS_MIB, "timeout": _HANG, "max_len": _LONGEST}
    flags |= {"artifact_prefix": f"{corpus / _CRASHES}/", "verbosity": 0, "print_final_stats": 0}
    said = [f"-{key}={value}" for key, value in flags.items()]
    atheris.Setup([sys.argv[0], *said, str(corpus / "files")], tally.run, custom_mutator=mutated)
    atheris.Fuzz()


def drawn(corpus: Path, name: str, seconds: int) -> None:
    """As in the tests, round after round with other draws."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from .test_readers import hostile

    tally, end = Tally(corpus, name), time.monotonic() + seconds
    options = settings(
        max_examples=500, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    while time.monotonic() < end:
        seed(tally.executions)(options(given(hostile(tally.target))(tally.run)))()
    tally.save()
    sys.exit(_DONE)


def search(name: str, minutes: float, corpus: Path) -> int:
    """Search in processes of their own until time is up; returns how many kinds of crashes there are."""
    from .targets import TARGETS

    (corpus / "files").mkdir(parents=True, exist_ok=True)
    (corpus / _CRASHES).mkdir(exist_ok=True)
    (corpus / _TALLY).unlink(missing_ok=True)
    for number, file in enumerate(TARGETS[name].seeds()):
        (corpus / "files" / f"seed-{number}").write_bytes(file)
    how: Callable[[Path, str, int], None] = guided if importlib.util.find_spec("atheris") else drawn
    begun, end = time.monotonic(), time.monotonic() + 60 * minutes
    with (corpus / "log").open("w") as log:
        while (left := end - time.monotonic()) > 1:
            asked = [name, "--corpus", str(corpus), f"--{how.__name__}", str(int(left))]
            ended = subprocess.run([sys.executable, "-m", __package__, *asked], stderr=log)
            if ended.returncode in (0, _DONE):  # else it hung, grew or died
                break
    took, tally = time.monotonic() - begun, json.loads((corpus / _TALLY).read_text())
    crashes = sorted((corpus / _CRASHES).iterdir())
    rate = tally["executions"] / took
    print(f"{name} ({how.__name__}): {tally['executions']} executions in {took / 60:.1f} minutes, {rate:.0f} a second")
    for crash in crashes:
        print(f"  {crash}")
    return len(crashes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition(":")[2])
    parser.add_argument("target")
    parser.add_argument("files", nargs="*", type=Path, help="read these again, and search for no others")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--corpus", type=Path, help="where files are found and kept; a temporary folder without")
    for how in (guided, drawn):
        parser.add_argument(f"--{how.__name__}", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.guided or asked.drawn:
        (guided if asked.guided else drawn)(asked.corpus, asked.target, asked.guided or asked.drawn)
    from .limits import hold
    from .targets import TARGETS, read_in

    if asked.target not in TARGETS:
        parser.error(f"no target {asked.target}; known: {', '.join(TARGETS)}")
    for file in asked.files:
        with tempfile.TemporaryDirectory() as folder:
            print(hold(partial(read_in, TARGETS[asked.target], file.read_bytes(), Path(folder))) or "taken")
    if asked.files:
        return 0
    return bool(search(asked.target, asked.minutes, asked.corpus or Path(tempfile.mkdtemp(prefix="kvfold-corpus-"))))


if __name__ == "__main__":
    sys.exit(main())
