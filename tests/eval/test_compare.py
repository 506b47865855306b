"""Several results held against one source."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from kvfold.common.errors import UserError
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.verify import verify
from kvfold.eval.compare import compare
from kvfold.eval.ppl import perplexity

from .conftest import make_model


@pytest.fixture
def models(save, tmp_path):
    """A source, a copy of it, and one whose KV heads were averaged into one."""
    source = save(make_model("llama"))
    copy = save(make_model("llama"), "copy")
    convert_gqa(source, tmp_path / "mqa", kv_heads=1, method="mean")
    return source, copy, str(tmp_path / "mqa")


def test_each_row_is_what_verify_says(models, text_file):
    source, *outs = models
    report = compare(source, outs, text=[text_file], window=32, max_windows=3)
    for out, row in zip(outs, report.results, strict=True):
        alone = verify(source, out, text=[text_file], window=32, max_windows=3)
        assert asdict(row) == {key: value for key, value in asdict(alone).items() if key in asdict(row)}
        assert (report.source, report.source_perplexity) == (alone.source, alone.source_perplexity)
        assert (report.source_loss, report.tokens) == (alone.source_loss, 93)
        assert report.protocol == alone.protocol


def test_a_copy_is_its_source_and_a_merge_is_not(models, text_file):
    report = compare(models[0], models[1:], text=[text_file], window=32)
    copy, merged = report.results
    assert (copy.kl, copy.top1_agreement, copy.perplexity_ratio) == (pytest.approx(0, abs=1e-9), 1, 1)
    assert copy.layer_errors == [0, 0]
    assert report.source_loss > report.max_loss and copy.passed  # no worse than a source that guesses better than it
    assert merged.kl > 0.01 and merged.top1_agreement < 1 and min(merged.layer_errors) > 0
    # The same text, windows and rules as perplexity's.
    assert merged.perplexity == pytest.approx(perplexity(models[2], text=[text_file], window=32).perplexity)


def test_a_broken_result_is_said_to_be_one(models, save, text_file):
    broken = make_model("llama")
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = torch.nan
    report = compare(models[0], [models[1], save(broken, "broken")], text=[text_file])
    whole, row = report.results
    assert whole.kl is not None and (row.kl, row.loss, row.perplexity_ratio, row.passed) == (None, None, None, False)
    assert row.reason.startswith("the loss is nan")
    json.dumps(asdict(report), allow_nan=False)


def test_progress_runs_over_all_results(models, text_file):
    seen = []
    compare(models[0], models[1:], text=[text_file], window=64, progress=lambda *at: seen.append(at))
    assert seen == [(n, 8) for n in range(1, 9)]


def test_what_cannot_be_compared(models, save, text_file):
    with pytest.raises(UserError, match="name at least one"):
        compare(models[0], [], text=[text_file])
    short = save(make_model("llama", max_position_embeddings=32), "short")
    with pytest.raises(UserError, match="window 64 is longer than the model's context 32"):
        compare(models[0], [models[1], short], text=[text_file])
