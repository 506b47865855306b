"""The demo: every way to fold, in one table. A short form here; the whole runs with the README's commands."""

import json
from contextlib import contextmanager
from dataclasses import asdict

import pytest

from kvfold.common.errors import UserError
from kvfold.common.output import print_table
from kvfold.convert.checkpoint import Checkpoint
from kvfold.recipes import demo


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Report, folder and progress of a demo with one row of every kind."""
    out, seen = tmp_path_factory.mktemp("demo") / "out", []
    with pytest.MonkeyPatch.context() as patch:
        small = {
            "KV_HEADS": (2,), "KV_ELEMENTS": (64,), "REFINE_WINDOWS": 1, "SEARCH_WINDOWS": 1, "MAX_WINDOWS": 1,
            "WAYS": (("mean", "mean", 0),), "LATENT_WAYS": (("mla", 0), ("mla --refine 1", 1)),
        }  # fmt: skip
        for name, value in small.items():
            patch.setattr(demo, name, value)

        @contextmanager
        def stage(name):
            yield lambda *at: seen.append((name, *at))

        report = demo.run_demo(out=out, progress=stage)
    return report, out, seen


def test_heads_and_latents_stand_in_one_table(short, capsys):
    report, _, seen = short
    assert [row.name for row in report.results] == ["source", "mean", "mla", "mla --refine 1"]
    assert [row.attention_kind for row in report.results] == ["MHA", "GQA", "MLA", "MLA"]
    assert [at for name, *at in seen if name == "converting"] == [[1, 3], [2, 3], [3, 3]]
    print_table(report.rows(), demo.COLUMNS)
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "rank + rope" in heading
    latent = report.results[2]
    assert lines[0].split()[2:4] == ["8", "-"]
    assert lines[2].split()[2:6] == ["-", str(latent.kv_lora_rank), "+", str(latent.qk_rope_head_dim)]
    json.dumps(asdict(report))


def test_latents_are_what_was_asked_for_and_measured(short):
    report, *_ = short
    source, _, plain, refined = report.results
    assert (source.num_key_value_heads, source.kv_lora_rank) == (8, None)
    for row in (plain, refined):
        assert row.num_key_value_heads is None
        assert row.kv_lora_rank + row.qk_rope_head_dim == row.kv_elements_per_token_per_layer == 64
        assert row.measured_kv_bytes * 512 == source.measured_kv_bytes * 64
    assert (plain.refine_windows, refined.refine_windows) == (0, 1)


def test_refinement_is_of_what_was_chosen_without_it(short):
    """So that the two rows differ in refinement alone, and the search is not paid for twice."""
    _, out, _ = short
    plain, refined = (
        json.loads((out / f"mla64{end}" / "kvfold.json").read_text())["recipe"] for end in ("", "-refined")
    )
    assert len(plain["search"]) > 1 and refined["search"] is None
    assert {name: plain[name] for name in ("rope_select", "rope_dim", "kv_rank")} == {
        name: refined[name] for name in ("rope_select", "rope_dim", "kv_rank")
    }
    assert refined["refine"]["windows"] == 1 and plain["refine"] is None


def test_what_is_kept_is_in_stock_form(short):
    report, out, _ = short
    assert sorted(path.name for path in out.iterdir()) == ["kv2-mean", "mla64", "mla64-refined", "report"]
    assert [row.model for row in report.results[1:]] == [str(out / n) for n in ("kv2-mean", "mla64", "mla64-refined")]
    config = json.loads((out / "mla64" / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    names = Checkpoint.open(out / "mla64").tensors
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in names


def test_next_steps_name_what_is_there():
    said = demo.NEXT_STEPS.format(model="MODEL", report="PAGE", windows=demo.REFINE_WINDOWS)
    for command in ("inspect MODEL", "convert gqa MODEL", "convert mla MODEL", "verify MODEL my-mla", "check my-mla"):
        assert f"kvfold {command}" in said


def test_a_folder_that_is_there_is_not_overwritten(tmp_path):
    with pytest.raises(UserError):
        demo.run_demo(out=tmp_path)


def test_the_page_shows_the_same_figures(short):
    report, out, _ = short
    shown = json.loads((out / "report" / "report.json").read_text())
    assert report.report == str(out / "report" / "index.html") and (out / "report" / "index.html").is_file()
    for row, theirs in zip(report.results, shown["results"], strict=True):
        for name in ("model", "perplexity", "perplexity_ratio", "measured_kv_bytes"):
            assert getattr(row, name) == theirs[name]
    assert shown["speed"]["results"]
