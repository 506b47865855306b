"""A few trials, the same each time, and what trials have found; all of them: python -m tests.faults."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from kvfold.common.atomic import output_directory
from kvfold.common.embedded import MODEL_DIR
from kvfold.common.errors import UserError
from kvfold.common.status import Stopped
from kvfold.convert.gqa import convert_gqa
from kvfold.convert.source import open_source
from kvfold.recipes.pipeline.record import Record

from .damage import flip

ROOT = Path(__file__).parents[2]
TRIALS = (
    "calibrate/kill/0",
    "gqa-mean/kill/0",
    "gqa-mean/term/0",
    "gqa-mean/no-space/0",
    "gqa-mean/truncated/0",
    "gqa-mean/second/0",
    "gqa-svd/flipped/0",
    "refine/denied/0",  # once it fell into an endless recursion, for want of the right to remove a temporary folder
    "uptrain/kill/0",
    "publish/int/0",
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks and capabilities as Linux has them")
def test_nothing_is_lost():
    words = [word for name in TRIALS for word in ("--trial", name)]
    done = subprocess.run([sys.executable, "-m", "tests.faults", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(TRIALS)}/{len(TRIALS)}/0" in done.stdout


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_who_reads_a_result_on_sees_that_a_bit_has_turned_over(tmp_path, name):
    convert_gqa(MODEL_DIR, tmp_path / "out", kv_heads=2, method="mean")
    with open_source(str(tmp_path / "out")) as source:
        source.digest()
        flip(tmp_path / "out" / name, Random(0))
        with pytest.raises(UserError, match=f"{name} is not as kvfold wrote it"):
            source.digest()


def test_a_signal_while_the_old_directory_goes_leaves_nothing_of_it(tmp_path, monkeypatch):
    remove = shutil.rmtree

    def stopped(folder, **knobs):
        monkeypatch.setattr(shutil, "rmtree", remove)
        next(folder.iterdir()).unlink()
        raise Stopped(15)

    for content in ("old", "new"):
        if content == "new":
            monkeypatch.setattr(shutil, "rmtree", stopped)
        with suppress(Stopped), output_directory(tmp_path / "out", overwrite=True) as staging:
            (staging / "config.json").write_text('{"model_type": "llama"}')
            (staging / "it").write_text(content)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/it").read_text() == "new"


def test_a_run_sees_what_has_changed_and_kept_its_time(tmp_path):
    (tmp_path / "made").write_bytes(bytes(1000))
    before = Record(tmp_path, "r")
    content = before.content(tmp_path / "made")
    before.save()
    flip(tmp_path / "made", Random(0), quietly=True)
    after = Record.open(tmp_path, "r")
    assert after.content(tmp_path / "made") == content
    assert after.content(tmp_path / "made", anew=True) != content


def test_the_record_of_a_run_that_was_cut_short_is_refused_with_a_way_out(tmp_path):
    Record(tmp_path, "r").save()
    (tmp_path / "run.json").write_bytes((tmp_path / "run.json").read_bytes()[:20])
    with pytest.raises(UserError, match=r"run\.json is broken; name another folder with -o"):
        Record.open(tmp_path, "r")
