"""How long `kvfold convert gqa` takes against `cp -r` of the same directory, and how much memory it needs.

    python -m kvfold.recipes.bench.convert [--dir DIR] [--gigabytes 8] [--runs 5]

Runs alternate (cp, convert without hashing, convert with hashing, cp, ...) so that the machine's moods hit all
alike; ratios are of the medians. Nobody calls fsync; dirty pages are flushed between runs, outside the clock.
Whole processes are timed, the start of Python and the import of torch included.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .peak import peak_of
from .synthetic import make_checkpoint

KV_HEADS = 8


def commands(source: Path, out: Path) -> dict[str, list[str]]:
    convert = [
        sys.executable,
        "-m",
        "kvfold.cli",
        "convert",
        "gqa",
        str(source),
        str(out),
        f"--kv-heads={KV_HEADS}",
        "--method=mean",
    ]
    return {
        "cp -r": ["cp", "-r", str(source), str(out)],
        "convert --no-hash": [*convert, "--no-hash"],
        "convert": convert,
    }


def timed(command: list[str], out: Path) -> float:
    """Seconds that one command takes as a whole process; its output is removed again."""
    os.sync()
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return seconds


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(args)
    with tempfile.TemporaryDirectory(prefix="kvfold-bench-", dir=options.dir) as folder:
        source, out = Path(folder) / "source", Path(folder) / "out"
        size = make_checkpoint(source, options.gigabytes)
        table = commands(source, out)
        print(f"{size / 1e9:.2f} GB in bf16, {KV_HEADS} of 32 KV heads, {options.runs} alternating runs")
        for command in table.values():  # once uncounted: page cache, compiled Python files
            timed(command, out)
        times: dict[str, list[float]] = {name: [] for name in table}
        for _ in range(options.runs):
            for name, command in table.items():
                times[name].append(timed(command, out))
        base = statistics.median(times["cp -r"])
        print("| command | median s | min | max | x cp -r | peak anonymous MB | peak mapped MB |")
        print("|---|---|---|---|---|---|---|")
        for name, seconds in times.items():
            median = statistics.median(seconds)
            peak = peak_of(table[name])
            shutil.rmtree(out)
            cells = [f"{median:.2f}", f"{min(seconds):.2f}", f"{max(seconds):.2f}", f"{median / base:.2f}"]
            print("|", " | ".join([name, *cells, f"{peak.anonymous / 1e6:.0f}", f"{peak.files / 1e6:.0f}"]), "|")


if __name__ == "__main__":
    main()
