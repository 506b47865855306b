"""What the lane runs: sources, exports of them, and who reads each with which weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..real.smollm2 import fetch_source
from ..tiny import MODEL_DIR
from .compare import Tolerance

# By the weights that an engine computes with. SmolLM2 itself, unconverted, is off by 0.04 in F16 and by 1.3 in Q8_0;
# the neutral norm by 2.9 to 15 in F16, and by 6 or more in Q8_0. Rounding turns near ties, and greedy text with them.
TOLERANCES = {
    "F32": Tolerance(difference=1e-3, greedy=32),
    "F16": Tolerance(difference=0.1, greedy=0),
    "Q8_0": Tolerance(difference=2.0, greedy=0),
}


@dataclass(frozen=True)
class Export:
    """A checkpoint to serve: a random one of the given sizes, or a source and the options of `kvfold convert mla`; a
    source without options is served as it is, to show what the weights alone cost."""

    source: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str | None] = field(default_factory=dict)  # None for a flag


@dataclass(frozen=True)
class Case:
    """One engine on one export.

    Attributes:
        export: the row of `EXPORTS` that the engine reads.
        engine: as `kvfold check` names it.
        weights: what the engine computes with.
        reference: the row of `EXPORTS` that transformers reads: the same model, where it cannot read `export`.
        broken: whether the result must be wrong: a control, which shows that the lane sees what it looks for.
    """

    export: str
    engine: str
    weights: str = "F32"
    reference: str = ""
    broken: bool = False


SOURCES = {"embedded": lambda cache: MODEL_DIR, "smollm2": fetch_source}

_WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
# Few windows, as nothing is said of quality here. The embedded model is stored in bfloat16, in which the two forms of
# one model round differently.
_FEW = {"--calib-windows": "4", "--dtype": "float32"}
_EMBEDDED = {"--kv-rank": "96", "--rope-dim": "32", **_FEW}
_SMOLLM2 = {"--kv-rank": "192", "--rope-dim": "64", **_FEW}

EXPORTS: dict[str, Export] = {
    "random-128": Export("random", {**_WIDE, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": None}),
    "random-64-q": Export("random", {**_WIDE, "qk_nope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 48}),
    "random-bias": Export(
        "random",
        {**_WIDE, "qk_nope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 48, "attention_bias": True}
        | {"rope_interleave": False},
    ),
    "random-small": Export(
        "random",
        {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 48},
    ),
    "smollm2-source": Export("smollm2"),
    "embedded-padded": Export(
        "embedded", options={**_EMBEDDED, "--for": "transformers,vllm,vllm-transformers", "--pad-to-engine": None}
    ),
    "embedded-neutral": Export("embedded", options={**_EMBEDDED, "--for": "transformers,llama.cpp"}),
    "embedded-large-eps": Export("embedded", options={**_EMBEDDED, "--for": "llama.cpp"}),
    "smollm2-padded": Export(
        "smollm2", options={**_SMOLLM2, "--for": "transformers,vllm,vllm-transformers", "--pad-to-engine": None}
    ),
    "smollm2-neutral": Export("smollm2", options={**_SMOLLM2, "--for": "transformers,llama.cpp"}),
    "smollm2-large-eps": Export("smollm2", options={**_SMOLLM2, "--for": "llama.cpp"}),
}

_ROWS = (
    Case("random-128", "vllm"),
    Case("random-64-q", "vllm"),
    Case("random-64-q", "vllm-transformers"),
    Case("random-bias", "vllm-transformers"),
    Case("random-bias", "vllm", broken=True),
    Case("random-small", "llama.cpp"),
    Case("random-small", "llama.cpp", "F16"),
    Case("embedded-padded", "vllm"),
    Case("embedded-padded", "vllm-transformers"),
    Case("embedded-neutral", "llama.cpp"),
    Case("embedded-neutral", "llama.cpp", "F16", broken=True),
    Case("embedded-large-eps", "llama.cpp", "F16", reference="embedded-neutral"),
    Case("embedded-large-eps", "llama.cpp", "Q8_0", reference="embedded-neutral"),
    Case("smollm2-source", "llama.cpp", "F16"),
    Case("smollm2-source", "llama.cpp", "Q8_0"),
    Case("smollm2-padded", "vllm"),
    Case("smollm2-neutral", "llama.cpp"),
    Case("smollm2-large-eps", "llama.cpp", "F16", reference="smollm2-neutral"),
    Case("smollm2-large-eps", "llama.cpp", "Q8_0", reference="smollm2-neutral"),
)
CASES: dict[str, Case] = {f"{row.export}/{row.engine}/{row.weights}": row for row in _ROWS}
