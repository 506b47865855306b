"""A report of three conversions of the embedded model, measured as a user would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from kvfold.cli.report import report as command
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.mla.convert import convert_mla
from kvfold.eval.report.charts import canvas
from kvfold.recipes.tiny import MODEL_DIR


class Made(NamedTuple):
    """A report's folder, its figures, the conversions, the text, and what the command printed."""

    folder: Path
    figures: dict[str, Any]
    outs: list[str]
    text: str
    printed: str


@pytest.fixture(scope="session", autouse=True)
def small_pictures():
    """Pictures take half of the time that a report takes to be drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "PNG_DPI", 40)
        yield


@pytest.fixture(scope="session")
def real(tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("report")
    outs = [str(folder / name) for name in ("heads", "one", "latent")]
    for out, heads in zip(outs, (4, 1), strict=False):
        convert_gqa(MODEL_DIR, out, kv_heads=heads, method="mean")
    convert_mla(MODEL_DIR, outs[2], kv_rank=104, rope_dim=24, rope_select="high", calib=["none"])
    text = Path(json.__file__)  # reading what is built in takes a second each time
    options = ["--text", str(text), "--window", "64", "--max-windows", "4", "--context", "16"]
    result = CliRunner().invoke(command, [str(MODEL_DIR), *outs, "-o", str(folder / "page"), *options])
    assert result.exit_code == 0, result.output
    figures = json.loads((folder / "page" / "report.json").read_text())
    return Made(folder / "page", figures, outs, str(text), result.stdout)
