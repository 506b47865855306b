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
from ..eval.ppl import Protocol, perplexity
from .tiny import MODEL_DIR

KV_HEADS = (4, 2, 1)
MAX_WINDOWS = 40

COLUMNS = {
    "model": "name",
    "kind": "attention_kind",
    "KV heads": "num_key_value_heads",
    "elements/token/layer": "kv_elements_per_token_per_layer",
    "bytes/token": "kv_bytes_per_token",
    "measured cache bytes": "measured_kv_bytes",
    "perplexity": "perplexity",
    "x source": "perplexity_ratio",
}

NEXT_STEPS = """
Averaging heads needs no training and costs quality, the more the fewer are left; uptraining wins it back.
Try next:
  kvfold inspect {model}
  kvfold convert gqa {model} my-gqa --kv-heads 4
  kvfold eval ppl my-gqa --text builtin
and then the same with a checkpoint of yours in the place of {model}."""


@dataclass(frozen=True)
class DemoRow:
    """One model of the demo; the fields are those of `inspect`, `eval cache` and `eval ppl`."""

    model: str
    name: str
    method: str
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
    """Convert the embedded model to 4, 2 and 1 KV heads and judge each result.

    Args:
        out: a directory to create for the converted checkpoints; they are thrown away if None.
        progress: called with models done and models in all.

    Raises:
        UserError: `out` exists.
    """
    with ExitStack() as stack:
        if out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfold-demo-")))
        else:
            folder = stack.enter_context(output_directory(out))
        shown = folder if out is None else out
        rows: list[DemoRow] = []
        source = inspect_model(MODEL_DIR)
        for done, heads in enumerate((source.num_key_value_heads, *KV_HEADS)):
            is_source = heads == source.num_key_value_heads
            path, name = (MODEL_DIR, "source") if is_source else (folder / f"kv{heads}", f"kv{heads}")
            if not is_source:
                convert_gqa(MODEL_DIR, path, kv_heads=heads, method="mean")
            cache = cache_size(path)
            judged = perplexity(path, text=[BUILTIN], max_windows=MAX_WINDOWS, batch_size=8)
            rows.append(
                DemoRow(
                    model=str(path if is_source else shown / name),
                    name=name,
                    method="" if is_source else "mean",
                    attention_kind=inspect_model(path).attention_kind,
                    num_key_value_heads=heads,
                    kv_elements_per_token_per_layer=cache.kv_elements_per_token_per_layer,
                    kv_bytes_per_token=cache.kv_bytes_per_token,
                    context=cache.context,
                    measured_kv_bytes=cache.measured_kv_bytes,
                    perplexity=judged.perplexity,
                    perplexity_ratio=judged.perplexity / (rows[0].perplexity if rows else judged.perplexity),
                )
            )
            if progress:
                progress(done + 1, 1 + len(KV_HEADS))
    return DemoReport(
        model=str(MODEL_DIR),
        family=source.family,
        parameters=source.parameters,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        head_dim=source.head_dim,
        tokens=judged.tokens,
        protocol=judged.protocol,
        results=rows,
    )
