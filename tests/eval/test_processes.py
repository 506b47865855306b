"""Two processes give the figures of one, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvfold.convert.gqa import convert_gqa

from .conftest import make_model

SCRIPT = """
import json, sys
from dataclasses import asdict
from kvfold.common.parallel import is_main_process, promised_size
from kvfold.eval.compare import compare
from kvfold.eval.long import long
from kvfold.eval.ppl import perplexity

folder, src, out, text = sys.argv[1:]
text = [text]
reports = [
    perplexity(src, text=text, window=24, batch_size=2),
    perplexity(src, text=text, window=24, protocol="lm-eval"),
    compare(src, [out], text=text, window=24, batch_size=2),
    long(src, [out], text=text, window=64, length=[190], keys=3),
]
if is_main_process():
    with open(f"{folder}/{promised_size()}", "w") as file:
        json.dump(list(map(asdict, reports)), file)
"""
BROKEN = """
import sys
from kvfold.common.errors import CheckFailed
from kvfold.common.parallel import Workers
from kvfold.common.status import leave, prepare_process, status_of

def work(item):
    if item == 3:  # the second process's
        raise CheckFailed("the loss of item 3 is nan")
    return item

prepare_process()
leave(status_of(lambda: Workers("cpu").spread(work, range(5)) and 0))
"""


def launch(processes: int, script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / f"script{processes}.py"
    path.write_text(script)
    command = [sys.executable, path, *arguments]
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [sys.executable, *torchrun, *command[1:]]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)


@pytest.mark.xdist_group("processes")
def test_equal_figures(save, text_file, tmp_path):
    src = save(make_model("llama", max_position_embeddings=192))
    convert_gqa(src, tmp_path / "out", kv_heads=1, method="mean")
    for processes in (1, 2):
        done = launch(processes, SCRIPT, str(tmp_path), src, str(tmp_path / "out"), text_file, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    one, two = ((tmp_path / name).read_text() for name in ("1", "2"))
    assert one == two


@pytest.mark.xdist_group("processes")
def test_what_one_process_finds_wrong_is_said_by_the_first(tmp_path):
    done = launch(2, BROKEN, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("kvfold: the loss of item 3 is nan") == 1
