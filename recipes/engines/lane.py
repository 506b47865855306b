"""The lane itself: export, check, run, compare, and say."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ...common.cache import cache_folder
from ...common.errors import CheckFailed, KvfoldError
from ...common.kvcache import kv_elements
from ...common.loading import load_tokenizer
from ...common.sources import read_config
from ...convert.check import check
from .cases import CASES, EXPORTS, SOURCES, TOLERANCES, Case
from .compare import Answer, Figures, compare, fault
from .environments import converter_folder, python_of
from .synthetic import make_random

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1]
POSITIONS, NEW_TOKENS = 48, 32
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the driver can look at the cache
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
TEXT = """\
The cache holds what attention remembers of every token that it has read. A shorter memory is a cheaper one, and what it
forgets must be chosen with care: names, numbers, and the beginning of a list. The function returns the first of them.
"""


def run_lane(cache: Path, names: Sequence[str]) -> dict[str, tuple[Figures, str]]:
    """Run the cases, and print each as it ends; for each its figures, and what is wrong with them."""
    results = {}
    for name in names:
        case = CASES[name]
        figures = run_case(cache, name, case)
        wrong = fault(figures, TOLERANCES[case.weights])
        if case.broken:
            wrong = "" if wrong else "it should be wrong, and is not: the lane sees nothing"
        results[name] = figures, wrong
        print(f"{name}: {wrong or 'as it should be'}", file=sys.stderr, flush=True)
    return results


def run_case(cache: Path, name: str, case: Case) -> Figures:
    """One engine on one export, or what was found before by the same code on the same files.

    Raises:
        CheckFailed: `kvfold check` refuses the export, or a process failed.
    """
    checkpoint = make_export(cache, case.export)
    reference = make_export(cache, case.reference) if case.reference else checkpoint
    report = check(checkpoint, engine=case.engine)
    visible = case.broken and case.weights == "F32"  # narrower weights are chosen after the export
    if report.passed is visible:
        raise CheckFailed(report.reason or f"kvfold check sees nothing wrong with {name}, which is made to be wrong")
    config = json.loads((checkpoint / "config.json").read_text())
    request = _request(reference, config)
    asked = {
        "case": asdict(case),
        "request": request,
        "checkpoint": digest(path for path in checkpoint.iterdir() if path.is_file()),
        "reference": digest(path for path in reference.iterdir() if path.is_file()),
        "drivers": digest([*HERE.glob("run_*.py"), HERE / "compare.py", HERE / "environments.py"]),
    }
    said = cache / "engines" / "results" / f"{name.replace('/', '-')}.json"
    if said.exists() and (found := json.loads(said.read_text()))["asked"] == asked:
        return Figures(**found["figures"])
    print(f"{name}: {case.engine} reads it", file=sys.stderr, flush=True)
    said.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=said.parent) as scratch:
        engine = _RUN[case.engine](cache, case, checkpoint, request, Path(scratch))
        forced = {"model": str(reference), "forced": engine.tokens.tolist()}
        truth = _drive(Path(sys.executable), "run_transformers.py", {**request, **forced}, Path(scratch))
    figures = compare(engine, truth, kv_elements(read_config(checkpoint)))
    said.write_text(json.dumps({"asked": asked, "figures": asdict(figures)}))
    return figures


def make_export(cache: Path, name: str) -> Path:
    """The checkpoint of a row of `EXPORTS`, made anew unless the same code has made it.

    Raises:
        CheckFailed: `kvfold convert mla` failed; it has said why.
    """
    export, folder = EXPORTS[name], cache / "engines" / "checkpoints" / name
    if not export.sizes and not export.options:
        return SOURCES[export.source](cache)
    code = [path for floor in ("attention", "common", "convert") for path in (PACKAGE / floor).rglob("*.py")]
    asked = {"sizes": dict(export.sizes), "options": dict(export.options), "code": digest(code)}
    if export.source == "random":
        asked["code"] = digest([HERE / "synthetic.py"])
    made = folder.with_name(f"{name}.made.json")
    if folder.exists() and made.exists() and json.loads(made.read_text()) == asked:
        return folder
    print(f"{name}: made from {export.source}", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if export.source == "random":
        make_random(folder, **export.sizes)
    else:
        flags = [part for option in export.options.items() for part in option if part is not None]
        source = SOURCES[export.source](cache)
        command = [sys.executable, "-m", "kvfold.cli", "convert", "mla", source, folder, "--overwrite", *flags]
        _run(command, quiet=False)
    made.write_text(json.dumps(asked))
    return folder


def _request(tokenizer_of: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What every driver is asked; see `run_*.py` for what each reads of it."""
    tokenizer = load_tokenizer(tokenizer_of)
    eos = config.get("eos_token_id")
    ids = tokenizer(TEXT).input_ids[:POSITIONS]
    return {
        "prompt": ids,
        "new_tokens": NEW_TOKENS,
        "vocabulary": config["vocab_size"],
        "eos": [eos] if isinstance(eos, int) else eos or [],
        "filler": ids[0],
    }


def _run_vllm(cache: Path, case: Case, checkpoint: Path, request: Mapping[str, Any], scratch: Path) -> Answer:
    impl = "transformers" if case.engine == "vllm-transformers" else "vllm"
    asked = {**request, "model": str(checkpoint), "model_impl": impl}
    return _drive(python_of("vllm", cache), "run_vllm.py", asked, scratch)


def _run_llama_cpp(cache: Path, case: Case, checkpoint: Path, request: Mapping[str, Any], scratch: Path) -> Answer:
    gguf = scratch / "model.gguf"
    _run([sys.executable, HERE / "run_to_gguf.py", converter_folder(cache), checkpoint, gguf, case.weights.lower()])
    return _drive(python_of("llama.cpp", cache), "run_llama_cpp.py", {**request, "model": str(gguf)}, scratch)


_RUN = {"vllm": _run_vllm, "vllm-transformers": _run_vllm, "llama.cpp": _run_llama_cpp}


def _drive(python: Path, driver: str, request: Mapping[str, Any], scratch: Path) -> Answer:
    """Let an interpreter run a driver, without the environment of this one."""
    asked, answered = scratch / "request.json", scratch / "answer.npz"
    asked.write_text(json.dumps(request))
    _run([python, "-I", HERE / driver, asked, answered])
    with np.load(answered) as arrays:
        return Answer(**{name: arrays[name] for name in arrays.files})


def _run(command: Sequence[object], *, quiet: bool = True) -> None:
    """Run a process; what it writes is shown only if it fails.

    Raises:
        CheckFailed: it failed.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **_ENVIRONMENT}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if quiet else {"stdout": sys.stderr}
    done = subprocess.run(list(map(str, command)), env=environment, text=True, errors="replace", **output)
    if done.returncode:
        print(done.stdout or "", file=sys.stderr)
        raise CheckFailed(f"{' '.join(map(str, command[:4]))} ... ended with status {done.returncode}")


def digest(paths: Iterable[Path]) -> str:
    """A hash of files, by their names and bytes."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(f"{path.name}\n{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                total.update(chunk)
    return total.hexdigest()[:16]


def print_results(results: Mapping[str, tuple[Figures, str]]) -> None:
    """The table, as docs/engines.md has it."""
    heads = ["checkpoint", "engine", "weights", "prompt", "decode", "greedy", "cached", "result"]
    print("|", " | ".join(heads), "|")
    print("|" + "---|" * len(heads))
    for name, (figures, wrong) in results.items():
        case = CASES[name]
        how = ", --model-impl transformers" if case.engine == "vllm-transformers" else ""
        cells = [case.export, figures.version + how, case.weights]
        cells += [f"{figures.prompt:.1e}", f"{figures.decode:.1e}"]
        cells += [f"{figures.greedy}/{figures.new_tokens}", f"{figures.cached:g}"]
        print("|", " | ".join([*cells, wrong or ("wrong, as it must be" if case.broken else "right")]), "|")
    print(
        f"Largest log-probability difference against {next(iter(results.values()))[0].reference} over {POSITIONS - 1} "
        f"positions of the prompt and {NEW_TOKENS} of decoding; greedy tokens equal before the first that is not; "
        "cached elements per token per layer, as the engine allocated them."
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=cache_folder())
    parser.add_argument("--only", action="append", metavar="CASE", help=f"part of a name of {', '.join(CASES)}")
    options = parser.parse_args(args)
    names = [name for name in CASES if any(part in name for part in options.only or [""])]
    if not names:
        parser.error(f"no case has {options.only} in its name; they are {', '.join(CASES)}")
    try:
        results = run_lane(options.cache.resolve(), names)
    except KvfoldError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
    print_results(results)
    if bad := [f"{name}: {wrong}" for name, (_, wrong) in results.items() if wrong]:
        sys.exit(f"{len(bad)} of {len(results)} results are wrong; {bad[0]}")
