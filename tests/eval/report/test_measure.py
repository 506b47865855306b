from __future__ import annotations

import json
import math
import random
import shlex
import shutil

import pytest
from click.testing import CliRunner

from kvfold.cli.report import report as command
from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.common.status import Stopped
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.verify import verify
from kvfold.eval.cache import cache_size
from kvfold.eval.report import measure
from kvfold.eval.report.measure import report
from kvfold.eval.report.record import leaves
from kvfold.recipes.tiny import MODEL_DIR

SOURCE = str(MODEL_DIR)


def test_figures_are_those_of_the_other_commands(real):
    rows = real.figures["results"]
    checked = verify(SOURCE, real.outs[2], text=[real.text], window=64, max_windows=4)
    sized = cache_size(real.outs[2])
    row = rows[3]
    for name in ("perplexity", "perplexity_ratio", "loss", "kl", "top1_agreement"):
        assert row[name] == pytest.approx(getattr(checked, name), rel=1e-6), name
    assert row["layer_errors"] == pytest.approx(checked.layer_errors, rel=1e-6)
    assert rows[0]["perplexity"] == pytest.approx(checked.source_perplexity, rel=1e-6)
    for name in ("kv_bytes_per_token", "kv_bytes", "measured_kv_bytes"):
        assert row[name] == getattr(sized, name), name
    assert real.figures["cache_context"] == sized.context
    assert real.figures["tokens"] == checked.tokens == 4 * 63


def test_what_is_said_of_each_model(real):
    rows = real.figures["results"]
    assert [row["name"] for row in rows] == ["model", "heads", "one", "latent"]
    assert [row["attention_kind"] for row in rows] == ["MHA", "GQA", "MQA", "MLA"]
    assert [row["kv_ratio"] for row in rows] == [1, 0.5, 0.125, 0.25]
    assert (rows[3]["num_key_value_heads"], rows[3]["kv_lora_rank"], rows[3]["qk_rope_head_dim"]) == (None, 104, 24)
    assert rows[1]["made_by"][0].startswith("convert gqa: kv_heads 4, method mean")
    assert [row["kv_bytes"] for row in rows] == [row["measured_kv_bytes"] for row in rows]
    assert all(math.isclose(row["perplexity_ratio"], row["perplexity"] / rows[0]["perplexity"]) for row in rows)


def test_caches_grow_to_the_models_context(real):
    growth = real.figures["cache_growth"]
    assert growth["contexts"] == [256, 512]
    assert growth["results"][0] == {"model": "model", "kv_bytes": [256 * 4096, 512 * 4096]}


def test_every_model_was_timed_where_it_was_asked(real):
    rows = real.figures["speed"]["results"]
    assert [(row["model"], row["context"]) for row in rows] == [
        (name, 16) for name in ("model", "heads", "one", "latent")
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_few_tokens_are_warned_of(real):
    assert real.figures["warnings"] == ["only 252 tokens were scored, of which a perplexity says little; score more"]


def test_the_command_prints_the_verdict_and_where_the_page_is(real):
    assert real.figures["verdict"]["text"] in real.printed
    assert str(real.folder / "index.html") in real.printed


def test_the_commands_are_ones_that_there_are(real, tmp_path):
    """The first gives the same figures again, but for speed; --json prints them."""
    words = shlex.split(real.figures["commands"][0])[2:]
    words = [str(tmp_path / "again") if word == str(real.folder) else word for word in words]
    words = [word for word, before in zip(words, ["", *words], strict=False) if "--context" not in (word, before)]
    result = CliRunner().invoke(command, [*words, "--no-speed", "--json"])
    again = json.loads(result.stdout)
    assert again["results"] == real.figures["results"]
    assert again["speed"] is None
    assert again == json.loads((tmp_path / "again" / "report.json").read_text())
    parts = [command.split()[:3] for command in real.figures["commands"][1:]]
    assert parts == [["kvfold", "eval", name] for name in ("compare", "cache", "cache", "cache", "cache", "speed")]


def test_a_report_does_not_fail_for_want_of_speed(real, tmp_path):
    knobs = {"text": [real.text], "window": 16, "max_windows": 1, "context": [10_000]}
    made = report(SOURCE, real.outs[:1], out=tmp_path / "r", **knobs)
    assert made.speed is None
    assert any(warning.startswith("decode speed was not measured: context 10000") for warning in made.warnings)


@pytest.fixture
def hostile(tmp_path):
    """A result in float32 whose name, record and run hold what others may have written."""
    out = tmp_path / "he\x1b[31m\nads"
    convert_gqa(SOURCE, str(out), kv_heads=8, method="mean", dtype="float32")
    record = {"recipe": {"command": "uptrain", "model": "\ud800\x1b[2J", "held_out": {"a": 1.0}, "steps": [1]}}
    (out / "kvfold.json").write_text(json.dumps(record))
    run = out.with_name(f"{out.name}.run")
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "cross_entropy": NaN, "held_out": {"a": "1"}}\n')
    return out


def test_nothing_foreign_stops_a_report_or_reaches_a_terminal(real, hostile, tmp_path, monkeypatch):
    """Nor does a failure of the timing; and caches in two dtypes are compared by their bytes."""
    monkeypatch.setattr(measure, "measure_speed", lambda *_, **__: 1 // 0)
    folder = tmp_path / "caf\udce9"
    options = ["--text", real.text, "--window", "16", "--max-windows", "1", "--title", "t\udce9\x1b[2J"]
    result = CliRunner().invoke(command, [SOURCE, str(hostile), "-o", str(folder), *options])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output and "\udce9" not in result.output
    figures = json.loads((folder / "report.json").read_text())
    assert all(text.isprintable() for _, text in leaves(figures) if isinstance(text, str))
    assert figures["title"] == "t\ufffd\ufffd[2J"
    assert figures["warnings"][0].startswith("he\ufffd[31m\ufffdads was healed, but no run in")
    assert figures["warnings"][1].startswith("decode speed was not measured: ZeroDivisionError: ")
    row = figures["results"][1]
    assert row["made_by"] == ["uptrain: model \ufffd\ufffd[2J"]
    assert (row["kv_ratio"], row["kv_elements_ratio"]) == (2.0, 1.0)
    assert row["kv_ratio"] == row["kv_bytes_per_token"] / figures["results"][0]["kv_bytes_per_token"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Stopped(15)])
def test_whoever_stops_it_while_it_times_stops_it(real, tmp_path, monkeypatch, stop):
    def timing(*_, **__):
        raise stop

    monkeypatch.setattr(measure, "_time", timing)
    with pytest.raises((KeyboardInterrupt, Stopped)):
        report(SOURCE, real.outs[:1], out=tmp_path / "r", text=[real.text], window=16, max_windows=1)
    assert not list(tmp_path.iterdir())


def test_a_copy_of_a_source_that_is_worse_than_guessing_is_not_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "write_report", lambda *_, **__: None)  # which takes the longest
    copy = shutil.copytree(SOURCE, tmp_path / "copy")
    noise = tmp_path / "noise.txt"
    noise.write_text("".join(random.Random(0).choices("qxzjkvwQXZJ#~^", k=400)))
    made = report(SOURCE, [copy], out=tmp_path / "r", text=[str(noise)], window=32, max_windows=2, speed=False)
    source, result = made.results
    assert not source.passed and "above ln(vocabulary)" in source.reason
    assert result.verdict == "as good" and source.pareto and result.pareto
    assert "worse than guessing on this text" in made.verdict.text and made.verdict.best == "copy"


@pytest.mark.parametrize(
    ("outs", "knobs", "message"),
    [
        ([SOURCE], {}, "named twice"),
        ([f"{SOURCE}/../{MODEL_DIR.name}"], {}, "named twice, also as"),
        (["./nowhere"], {}, "nowhere does not exist"),
        (["/usr/bin"], {}, "/usr/bin has no config.json"),
        (["nowhere/x"], {"context": [0]}, "context 0 leaves nothing to time"),
        (["nowhere/x"], {"context": [16], "speed": False}, "leave one out"),
        (["nowhere/x"], {"window": 1}, "a window of 1"),
        (["nowhere/x"], {"max_windows": 0}, "0 windows"),
        (["nowhere/x"], {"batch_size": 0}, "batch size 0"),
        (["nowhere/x"], {"dtype": "float31"}, "unknown dtype"),
        (["nowhere/x"], {"out": "/proc/report"}, "cannot create /proc/report in /proc"),
        (["nowhere/x", "nowhere/x"], {}, "named twice"),
        (["nowhere/x"], {"max_ratio": 0.0}, "bounds nothing"),
        (["nowhere/x"], {"out": "."}, "exists"),
        ([], {}, "nothing to compare"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(outs, knobs, message, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "load_model", None)
    monkeypatch.setattr(measure, "compare", None)
    with pytest.raises(UserError, match=message):
        report(SOURCE, outs, **{"out": tmp_path / "r"} | knobs)
    assert not list(tmp_path.iterdir())


def test_models_that_do_not_fit_together_are_not_timed(tmp_path, monkeypatch):
    """Or the system would end the process, and the comparison with it."""
    free = tmp_path / "meminfo"
    free.write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    monkeypatch.setattr(measure, "_MEMORY", free)
    sizes = [measure._Size(None, 2**20, None)] * 2  # of a million parameters each
    measure._check_memory(sizes, "bfloat16")
    with pytest.raises(EnvironmentFailure, match=r"4 models take 16,777,216 bytes .* 8,192,000 are free"):
        measure._check_memory([*sizes, *sizes], "float32")
