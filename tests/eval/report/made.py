"""Reports that were never measured, with every kind of figure in them."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from kvfold.common.protocol import Protocol
from kvfold.eval.report.record import CacheGrowth, Growth, HeldOut, Report, Result, Uptraining
from kvfold.eval.report.verdict import judge
from kvfold.eval.speed.record import SpeedProtocol, SpeedReport, SpeedRow

SOURCE = 20.0  # its perplexity
SIZES = {"MHA": 512, "GQA": 256, "MQA": 64, "MLA": 128}


def make_result(name: str, kind: str = "GQA", ratio: float | None = 1.05, **figures: Any) -> Result:
    elements = SIZES[kind]
    perplexity = None if ratio is None else SOURCE * ratio
    usual: dict[str, Any] = {
        "model": f"models/{name}",
        "name": name,
        "attention_kind": kind,
        "num_key_value_heads": None if kind == "MLA" else elements // 64,
        "kv_lora_rank": 104 if kind == "MLA" else None,
        "qk_rope_head_dim": 24 if kind == "MLA" else None,
        "parameters": 2_361_472,
        "kv_elements_per_token_per_layer": elements,
        "kv_bytes_per_token": 8 * elements,
        "kv_ratio": elements / SIZES["MHA"],
        "kv_elements_ratio": elements / SIZES["MHA"],
        "kv_dtype": "bfloat16",
        "kv_bytes": 512 * 8 * elements,
        "measured_kv_bytes": 512 * 8 * elements,
        "perplexity": perplexity,
        "perplexity_ratio": ratio,
        "loss": None if perplexity is None else math.log(perplexity),
        "kl": 0.0123456789,
        "top1_agreement": 0.9517,
        "layer_errors": [0.01 / 3, 0.02, None, 0.04],
        "first_bad_layer": 2,
        "made_by": [f"convert {kind.lower()}: method svd"],
    }
    return Result(**usual | figures)


def make_source(**figures: Any) -> Result:
    nothing: dict[str, Any] = {"kl": None, "top1_agreement": None, "layer_errors": [], "first_bad_layer": None}
    return make_result("source", "MHA", 1.0, **nothing | {"made_by": []} | figures)


def make_report(*outs: Result, speed: bool = True, healed: bool = True, source: Result | None = None) -> Report:
    """A report of `outs`, three by default."""
    outs = outs or (make_result("heads"), make_result("one", "MQA", 7.5), make_result("latent", "MLA", 1.09))
    results, verdict = judge([source or make_source(), *outs], 1.1, tokens=20_440, scoring=["--text", "builtin"])
    said = {field.name: "said" for field in fields(Protocol)}
    return Report(
        title="tiny/model",
        model="models/source",
        kvfold_version="0.1.0",
        verdict=verdict,
        protocol=Protocol(**said | {"texts": ("builtin", "my.txt"), "window": 512, "stride": 512, "max_windows": None}),
        tokens=20_440,
        windows=40,
        cache_context=512,
        results=results,
        cache_growth=CacheGrowth(
            [256, 512, 1024],
            [Growth(row.name, [n * row.kv_bytes_per_token for n in (256, 512, 1024)]) for row in results],
        ),
        speed=_speed(results) if speed else None,
        uptraining=[_uptraining(results[1].name)] if healed else [],
        commands=["kvfold report models/source models/heads -o report", "kvfold eval compare models/source"],
        warnings=["a warning"],
    )


def _speed(results: list[Result]) -> SpeedReport:
    kinds = {"int": 4096, "float": 12.3456789, "str": "heads", "float | None": None, "int | None": None}
    usual = {field.name: kinds[str(field.type)] for field in fields(SpeedRow)}
    rows = []
    for context in (256, 512):
        for number, row in enumerate(results, 1):
            speed = 1e6 / context / number
            spread = {f"tokens_per_second{end}": part * speed for end, part in (("", 1), ("_min", 0.9), ("_max", 1.2))}
            rows.append(SpeedRow(**usual | spread | {"model": row.name, "context": context}))
    said = {"int": 5, "str": "cpu", "bool": False}
    return SpeedReport(
        results=rows,
        copy_bytes_per_second=1.23e10,
        matrix_flops_per_second=8.7e10,
        memory_budget_bytes=None,
        protocol=SpeedProtocol(**{field.name: said[str(field.type)] for field in fields(SpeedProtocol)}),
    )


def _uptraining(name: str) -> Uptraining:
    return Uptraining(
        model=name,
        run=f"models/{name}.run",
        steps_averaged=2,
        tokens=[256, 512, 768],
        training_loss=[4.0, 3.5, 3.25],
        held_out=[HeldOut("builtin", [0, 768], [4.1, 3.3], 3.0), HeldOut("my.txt", [0, 768], [None, 3.4], None)],
    )
