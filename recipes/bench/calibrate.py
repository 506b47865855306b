"""What calibration costs: its time against a plain pass over the same text, and its memory.

    python -m kvfold.recipes.bench.calibrate MODEL [--windows 16] [--window 512] [--runs 3]

Both read the same windows of built-in text, one at a time, in one process and in turn, so that the machine's moods
hit both alike; ratios are of the medians. The plain pass is transformers' own: the model as it loads, its weights
frozen, its loss, backward to the embedding's output. Calibration reads each layer's weights from the disk once a run,
inside the clock. Memory is that of whole processes of `calibrate`, with as many windows and with four times as many.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from ...common.loading import load_model
from ...convert.calibration.calibrate import Runner
from ...convert.calibration.collect import collect
from ...convert.calibration.knobs import Calibration
from ...convert.calibration.text import CalibText
from ...convert.projections import projections
from ...convert.source import open_source

# The peak since the process began (VmHWM), which getrusage would mix with that of its parent.
_CHILD = """
import re, sys
from pathlib import Path
from kvfold.convert.calibration.calibrate import calibrate
calibrate(sys.argv[1], sys.argv[2], calib_windows=int(sys.argv[3]), calib_window=int(sys.argv[4]))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def plain(model, batches: Sequence[Tensor]) -> None:
    """Forward and backward through frozen weights, from the token-summed cross entropy."""
    for ids in batches:
        ids = ids.to(model.device)
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=embedded, labels=ids, use_cache=False).loss  # a mean
        (loss * (ids.numel() - len(ids))).backward()


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak(model: str, windows: int, window: int) -> int:
    """Peak resident bytes of one process that calibrates a model on so many windows."""
    with tempfile.TemporaryDirectory(prefix="kvfold-bench-") as folder:
        command = [sys.executable, "-c", _CHILD, model, f"{folder}/stats", str(windows), str(window)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return 1024 * int(done.stdout)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(args)
    with open_source(options.model) as source:
        runner = Runner(source, Calibration(CalibText(windows=options.windows, window=options.window)))
        batches = runner.windows().batches(1)
        places, layered = projections(source.family, runner.sizes), runner.model()
        model = load_model(options.model).requires_grad_(False)
        table: dict[str, Callable[[Sequence[Tensor]], None]] = {
            "plain forward and backward": lambda batches: plain(model, batches),
            "calibration": lambda batches: collect(layered, batches, places, emit=lambda *_: None),
            "calibration --no-fisher": lambda batches: collect(
                layered, batches, places, emit=lambda *_: None, fisher=False
            ),
        }
        for work in table.values():  # once uncounted
            work(batches[:1])
        times: dict[str, list[float]] = {name: [] for name in table}
        for _ in range(options.runs):
            for name, work in table.items():
                times[name].append(timed(lambda work=work: work(batches)))
    base = statistics.median(times["plain forward and backward"])
    print(f"{len(batches)} windows of {options.window} tokens in {runner.dtype}, {options.runs} alternating runs")
    print("| pass | median s | min | max | x plain |")
    print("|---|---|---|---|---|")
    for name, seconds in times.items():
        cells = [statistics.median(seconds), min(seconds), max(seconds), statistics.median(seconds) / base]
        print("|", " | ".join([name, *(f"{cell:.2f}" for cell in cells)]), "|")
    print()
    print("| windows | peak MB |")
    print("|---|---|")
    for windows in (options.windows, 4 * options.windows):
        print(f"| {windows} | {peak(options.model, windows, options.window) / 1e6:.0f} |")


if __name__ == "__main__":
    main()
