"""Every bad input of the catalogue, through the command line: one line that names it and the way out, nothing written.

What the config, the headers, paths, flags and recipes say wrong is told before torch or transformers are imported, and
everything else before weights are read; pickles are, which tell nothing before.
"""

from __future__ import annotations

import shutil

import pytest

from .case import GQA, INSPECT, Case
from .catalogue import CASES, LIGHT
from .client import Server
from .world import build, link, state_of, whole

HEAVY = {"torch", "transformers", "numpy", "datasets", "accelerate", "matplotlib"}
MOST_MEGABYTES = 100
LONGEST = 400  # letters of a message

pytestmark = pytest.mark.xdist_group("bad_inputs")  # the processes that serve them start once


@pytest.fixture(scope="session")
def light():
    """Nothing is imported but the command line."""
    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def heavy():
    """All is imported that takes long."""
    server = Server("torch", "transformers", "datasets", "kvfold.convert.calibration.calibrate")
    yield server
    server.stop()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bad_input(case, tmp_path, request, record_property):
    folder = tmp_path / "here"
    build(folder)
    case.spoil(folder)
    before = state_of(folder)
    server = request.getfixturevalue("light" if case.section in LIGHT else "heavy")
    done = server.run(case, folder)
    line = done.stderr.removesuffix("\n")
    told = {"bad_input": str(case), "section": case.section, "line": line}
    for name, value in (told | {"ratio": done.ratio, "megabytes": done.megabytes}).items():
        record_property(name, value)
    assert done.status == case.status, done.stderr
    assert done.stdout == ""
    assert line.startswith("kvfold: ") and line.isprintable(), repr(done.stderr)
    assert case.culprit in line
    assert case.way_out in line
    assert len(line.removeprefix("kvfold: ")) <= LONGEST
    assert state_of(folder) == before
    if case.section in LIGHT:
        assert not HEAVY & done.packages
        assert done.megabytes < MOST_MEGABYTES
    if case.section != "pickle":
        assert not done.read


def test_every_case_names_a_culprit_and_a_way_out():
    assert len(CASES) > 80
    assert all(case.culprit and case.way_out for case in CASES)
    assert len({str(case) for case in CASES}) == len(CASES)


def test_the_folder_is_whole_before_it_is_spoilt(tmp_path, light, heavy):
    """Or every case could be refused for something else."""
    build(tmp_path / "here")
    assert light.run(Case("", whole, "check src --engine transformers", "", ""), tmp_path / "here").status == 0
    done = heavy.run(Case("", whole, f"{GQA} --method mean", "", ""), tmp_path / "here")
    assert (done.status, done.stderr) == (0, "")
    assert done.read, "what watches for weights that are read sees them"


def test_links_of_the_hub_cache_and_links_to_weights_are_followed(tmp_path, heavy):
    """A snapshot is made of links; and large weights may lie on another disk, whatever else may not."""
    folder = tmp_path / "here"
    build(folder)
    repository = folder / "models--me--it"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    snapshot = (folder / "src").rename(repository / "snapshots" / "0123")
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(repository / "blobs" / str(number))
        path.symlink_to(f"../../blobs/{number}")
    for command in (f"convert gqa {snapshot} out --kv-heads 1 --method mean", f"inspect {snapshot}"):
        done = heavy.run(Case("", whole, command, "", ""), folder)
        assert (done.status, done.stderr) == (0, "")
    assert not [path for path in (folder / "out").iterdir() if path.is_symlink()]
    shutil.copytree(snapshot, folder / "src")
    for name in ("model.safetensors", "config.json"):
        link(f"src/{name}", f"../other/{name}")(folder)
    for command in (f"{GQA} --method mean --overwrite", INSPECT):
        assert heavy.run(Case("", whole, command, "", ""), folder).status == 0
