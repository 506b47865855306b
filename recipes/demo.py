"""The demo: the embedded model folded to fewer KV heads, and to smaller latents, judged on text it has never seen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from ..common.atomic import output_directory
from ..common.cache import cache_folder
from ..common.progress import Stages, silent
from ..common.protocol import Protocol
from ..common.text import BUILTIN
from ..convert.gqa import convert_gqa
from ..convert.inspect import inspect_model
from ..convert.mla.convert import convert_mla
from ..convert.mla.report import MlaReport
from ..eval.report.measure import report
from ..eval.report.record import Result
from ..eval.report.write import PAGE
from .tiny import MODEL_DIR

KV_HEADS = (4, 2, 1)
KV_ELEMENTS = (128, 64)  # as many as 2 heads and 1 cache
REFINE_WINDOWS = 32
SEARCH_WINDOWS = 4  # enough to tell the choices of so small a model apart
# What is done to each number of heads: name, method, windows to refine on.
WAYS = (("mean", "mean", 0), ("svd", "svd", 0), (f"svd --refine {REFINE_WINDOWS}", "svd", REFINE_WINDOWS))
# What is done to each budget of latent attention: name, windows to refine on.
LATENT_WAYS = (("mla", 0), (f"mla --refine {REFINE_WINDOWS}", REFINE_WINDOWS))
MAX_WINDOWS = 40

COLUMNS = {
    "method": "name",
    "kind": "attention_kind",
    "KV heads": "num_key_value_heads",
    "rank + rope": "latent",
    "elements/token/layer": "kv_elements_per_token_per_layer",
    "bytes/token": "kv_bytes_per_token",
    "measured cache bytes": "measured_kv_bytes",
    "perplexity": "perplexity",
    "x source": "perplexity_ratio",
}

NEXT_STEPS = """
Nothing here was trained from end to end. Averaging heads destroys more than it has to: svd keeps what the loss minds,
latent attention shares what heads have in common, and refinement repairs each layer on {windows} windows of text.
Every result is read by stock transformers, the latent ones as DeepSeek-V3.
Open this page in a browser; it shows what each result costs, layer by layer, and how fast it decodes:
  {report}
Try next:
  kvfold inspect {model}
  kvfold convert gqa {model} my-gqa --kv-heads 4 --refine {windows}
  kvfold convert mla {model} my-mla --kv-elements 128 --refine {windows}
  kvfold verify {model} my-mla --text builtin --max-windows 40
  kvfold check my-mla --engine vllm
  kvfold uptrain model=my-gqa out=my-healed teacher={model} tokens=1e5 --dry-run
  kvfold run embedded-gqa
and then the same with a checkpoint of yours in the place of {model}."""


@dataclass(frozen=True)
class DemoRow:
    """One model of the demo; the fields are those of `report`.

    `num_key_value_heads` is None where a latent is cached, the sizes of the latent where heads are.
    """

    model: str
    name: str
    method: str
    refine_windows: int
    attention_kind: str
    num_key_value_heads: int | None
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    kv_elements_per_token_per_layer: int
    kv_bytes_per_token: int
    context: int
    measured_kv_bytes: int | None
    perplexity: float | None
    perplexity_ratio: float | None


@dataclass(frozen=True)
class DemoReport:
    """What the demo measured: the source first, then every conversion, under one protocol.

    The checkpoints are kept in `folder`; `report` is the page that shows them all.
    """

    model: str
    family: str
    parameters: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    tokens: int
    folder: str
    report: str
    protocol: Protocol
    results: list[DemoRow]

    def rows(self) -> list[dict[str, Any]]:
        """The results for a table, with what a latent is made of in one cell."""
        return [asdict(row) | {"latent": _sum(row.kv_lora_rank, row.qk_rope_head_dim)} for row in self.results]


def _sum(rank: int | None, rope: int | None) -> str:
    return "" if rank is None else f"{rank} + {rope}"


@dataclass(frozen=True)
class _Step:
    """One conversion: what it is called in the table and on the disk, and what makes it there."""

    name: str
    method: str
    windows: int
    folder: str
    convert: Callable[[Path], object]


class _Latents:
    """Conversions to MLA: what was chosen for a budget without refinement is refined, not searched for again."""

    def __init__(self) -> None:
        self.chosen: dict[int, MlaReport] = {}

    def convert(self, path: Path, *, elements: int, windows: int) -> None:
        before = self.chosen.get(elements)
        sizes: dict[str, Any] = {"kv_elements": elements, "search_windows": SEARCH_WINDOWS}
        if before:
            sizes = {
                "kv_rank": before.kv_lora_rank,
                "rope_dim": before.qk_rope_head_dim,
                "rope_select": before.rope_select,
            }
        self.chosen[elements] = convert_mla(MODEL_DIR, path, refine=windows, **sizes)


def _steps() -> list[_Step]:
    def refined(windows: int) -> str:
        return "-refined" if windows else ""

    latents = _Latents()
    return [
        *(
            _Step(
                name,
                method,
                windows,
                f"kv{heads}-{method}{refined(windows)}",
                partial(convert_gqa, MODEL_DIR, kv_heads=heads, method=method, refine=windows),
            )
            for heads in KV_HEADS
            for name, method, windows in WAYS
        ),
        *(
            _Step(
                name,
                "mla",
                windows,
                f"mla{elements}{refined(windows)}",
                partial(latents.convert, elements=elements, windows=windows),
            )
            for elements in KV_ELEMENTS
            for name, windows in LATENT_WAYS
        ),
    ]


def run_demo(*, out: Path | None = None, progress: Stages = silent) -> DemoReport:
    """Convert the embedded model to fewer KV heads, and to latents of several sizes, judge each result, and show all on
    one page.

    Args:
        out: a directory to create for the converted checkpoints and the page. By default `demo` in kvfold's cache,
            where the next demo takes the place of this one.
        progress: opened for each stage.

    Raises:
        UserError: `out` exists.
    """
    folder = out or cache_folder() / "demo"
    if out is None:
        shutil.rmtree(folder, ignore_errors=True)
    steps = _steps()
    source = inspect_model(MODEL_DIR)
    with output_directory(folder) as staging, progress("converting") as advance:
        for number, step in enumerate(steps):
            step.convert(staging / step.folder)
            advance(number + 1, len(steps))
    page = folder / "report"
    judged = report(
        MODEL_DIR,
        [folder / step.folder for step in steps],
        out=page,
        text=[BUILTIN],
        max_windows=MAX_WINDOWS,
        batch_size=8,
        title="kvfold demo",
        progress=progress,
    )
    names = [("source", "", 0), *((step.name, step.method, step.windows) for step in steps)]
    return DemoReport(
        model=str(MODEL_DIR),
        family=source.family,
        parameters=source.parameters,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        head_dim=source.head_dim,
        tokens=judged.tokens,
        folder=str(folder),
        report=str(page / PAGE),
        protocol=judged.protocol,
        results=[
            DemoRow(name=name, method=method, refine_windows=windows, context=judged.cache_context, **_shared(row))
            for (name, method, windows), row in zip(names, judged.results, strict=True)
        ],
    )


def _shared(row: Result) -> dict[str, Any]:
    """What a row of the demo repeats of a report's."""
    names = {field.name for field in fields(DemoRow)} - {"name"}
    return {name: value for name, value in vars(row).items() if name in names}
