"""The demo: the embedded model folded to fewer and fewer KV heads, judged on text it has never seen."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..common.atomic import output_directory
from ..common.progress import Progress
from ..common.text import BUILTIN
from ..convert.gqa import convert_gqa
from ..convert.inspect import inspect_model
from ..eval.cache import cache_size
from ..eval.ppl import PerplexityReport, Protocol, perplexity
from .tiny import MODEL_DIR

KV_HEADS = (4, 2, 1)
REFINE_WINDOWS = 32
# What is done to each number of heads: name, method, windows to refine on.
WAYS = (("mean", "mean", 0), ("svd", "svd", 0), (f"svd --refine {REFINE_WINDOWS}", "svd", REFINE_WINDOWS))
MAX_WINDOWS = 40

COLUMNS = {
    "method": "name",
    "kind": "attention_kind",
    "KV heads": "num_key_value_heads",
    "elements/token/layer": "kv_elements_per_token_per_layer",
    "bytes/token": "kv_bytes_per_token",
    "measured cache bytes": "measured_kv_bytes",
    "perplexity": "perplexity",
    "x source": "perplexity_ratio",
}

NEXT_STEPS = """
Nothing here was trained from end to end. Averaging heads destroys more than it has to: svd keeps what the loss minds,
and refinement repairs each layer on {windows} windows of text.
Try next:
  kvfold inspect {model}
  kvfold convert gqa {model} my-gqa --kv-heads 4 --refine {windows}
  kvfold verify {model} my-gqa --text builtin --max-windows 40
and then the same with a checkpoint of yours in the place of {model}."""


@dataclass(frozen=True)
class DemoRow:
    """One model of the demo; the fields are those of `inspect`, `eval cache` and `eval ppl`."""

    model: str
    name: str
    method: str
    refine_windows: int
    attention_kind: str
    num_key_value_heads: int
    kv_elements_per_token_per_layer: int
    kv_bytes_per_token: int
    context: int
    measured_kv_bytes: int
    perplexity: float
    perplexity_ratio: float


@dataclass(frozen=True)
class DemoReport:
    """What the demo measured: the source first, then every conversion, under one protocol."""

    model: str
    family: str
    parameters: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    tokens: int
    protocol: Protocol
    results: list[DemoRow]

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.results]


def run_demo(*, out: Path | None = None, progress: Progress | None = None) -> DemoReport:
    """Convert the embedded model to 4, 2 and 1 KV heads in several ways and judge each result.

    Args:
        out: a directory to create for the converted checkpoints; they are thrown away if None.
        progress: called with conversions done and conversions in all.

    Raises:
        UserError: `out` exists.
    """
    steps = [(heads, *way) for heads in KV_HEADS for way in WAYS]
    with ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfold-demo-")))
        else:
            folder = stack.enter_context(output_directory(out))
        source = inspect_model(MODEL_DIR)
        rows = [_judge(MODEL_DIR, str(MODEL_DIR), "source", "", 0, None)]
        for done, (heads, name, method, windows) in enumerate(steps):
            path = folder / f"kv{heads}-{method}{'-refined' if windows else ''}"
            convert_gqa(MODEL_DIR, path, kv_heads=heads, method=method, refine=windows)
            shown = path if out is None else out / path.name
            rows.append(_judge(path, str(shown), name, method, windows, rows[0][0].perplexity))
            if progress:
                progress(done + 1, len(steps))
    return DemoReport(
        model=str(MODEL_DIR),
        family=source.family,
        parameters=source.parameters,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        head_dim=source.head_dim,
        tokens=rows[0][1].tokens,
        protocol=rows[0][1].protocol,
        results=[row for row, _ in rows],
    )


def _judge(
    path: Path, shown: str, name: str, method: str, windows: int, reference: float | None
) -> tuple[DemoRow, PerplexityReport]:
    """What is said of one model; `reference` is the source's perplexity."""
    cache = cache_size(path)
    judged = perplexity(path, text=[BUILTIN], max_windows=MAX_WINDOWS, batch_size=8)
    looked = inspect_model(path)
    row = DemoRow(
        model=shown,
        name=name,
        method=method,
        refine_windows=windows,
        attention_kind=looked.attention_kind,
        num_key_value_heads=looked.num_key_value_heads,
        kv_elements_per_token_per_layer=cache.kv_elements_per_token_per_layer,
        kv_bytes_per_token=cache.kv_bytes_per_token,
        context=cache.context,
        measured_kv_bytes=cache.measured_kv_bytes,
        perplexity=judged.perplexity,
        perplexity_ratio=judged.perplexity / (reference or judged.perplexity),
    )
    return row, judged
