"""The file of statistics: what is written is read, and what is no such file is refused in one line."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.convert.calibration.recognise import is_statistics
from kvfold.convert.calibration.statistics import LayerStatistics
from kvfold.convert.calibration.store import (
    FORMAT_VERSION,
    About,
    Statistics,
    effective_rank,
    statistics_file,
)
from kvfold.convert.headers import read_header

D, K, L = 6, 4, 3
ABOUT = About("a1", "b2", 100, 5, {"builtin:code": 3, "x.txt": 2}, True, False, "float32", D, K, L)
STILL = replace(ABOUT, still=True)
NONE = replace(ABOUT, fisher=False)


def moment(size, rank, seed):
    rows = torch.randn(rank, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows.T @ rows


def layers(about=ABOUT):
    sizes = {name: D + 1 if name == "inputs" else K for name in about.names}
    return [
        LayerStatistics(**{name: moment(size, n + 2, 10 * n + i) for i, (name, size) in enumerate(sizes.items())})
        for n in range(L)
    ]


def write(path, about=ABOUT, **options):
    with statistics_file(path, about, **options) as writer:
        for number in (2, 0, 1):  # as segments may come
            writer(number, layers(about)[number])
    return path


@pytest.mark.parametrize("about", [ABOUT, STILL, NONE], ids=["", "still", "none"])
def test_round_trip(about, tmp_path):
    path = write(tmp_path / "deep/s.safetensors", about)
    read = Statistics.open(path)
    assert (read.about, read.path) == (about, path)
    assert read.effective_ranks() == [2, 3, 4]
    for number, layer in enumerate(layers(about)):
        for name in (field.name for field in fields(LayerStatistics)):
            kept, given = getattr(read.layer(number), name), getattr(layer, name)
            assert (kept is None) == (given is None)
            if kept is not None:
                assert kept.dtype == torch.float64
                assert torch.equal(kept, given.float().double())
    assert {name.rpartition(".")[2] for name in load_file(path)} == {*about.names, "hashes", "effective_ranks"}


def test_any_reader_of_safetensors_reads_it(tmp_path):
    tensors = load_file(write(tmp_path / "s.safetensors"))
    assert sorted(tensors) == sorted(name for name, _, _ in ABOUT.tensors())
    assert torch.equal(tensors["layers.1.key_fisher"], layers()[1].key_fisher.float())
    assert sum(tensor.nbytes for tensor in tensors.values()) == ABOUT.nbytes


def test_key_is_of_all_that_decides():
    changes = [{"source": "a2"}, {"text": "b3"}, {"fisher": False}, {"still": True}, {"dtype": "bfloat16"}]
    changes.append({"format_version": 9})
    keys = {ABOUT.key, *(replace(ABOUT, **change).key for change in changes)}
    assert len(keys) == 1 + len(changes)
    assert replace(ABOUT, kinds={"y.txt": 5}).key == ABOUT.key


def missing(path):
    pass


def directory(path):
    path.mkdir()


def empty(path):
    path.touch()


def truncated(path):
    write(path).write_bytes(path.read_bytes()[:-1])


def header_only(path):
    write(path).write_bytes(path.read_bytes()[:20])


def checkpoint(path):
    save_file({"model.norm.weight": torch.ones(4)}, path, {"format": "pt"})


def text(path):
    path.write_text("no statistics\n" * 100)


def foreign_metadata(path):
    save_file({"x": torch.ones(4)}, path, {"kvfold": "[1]"})


def other_tensors(path):
    about = ABOUT.__dict__ | {"num_hidden_layers": 1}
    save_file({"x": torch.ones(4)}, path, {"kvfold": json.dumps(about)})


def next_version(path):
    write(path, replace(ABOUT, format_version=FORMAT_VERSION + 1))


def first_version(path):
    """Which knew nothing of still keys."""
    about = {key: value for key, value in ABOUT.__dict__.items() if key != "still"} | {"format_version": 1}
    save_file({"x": torch.ones(4)}, path, {"kvfold": json.dumps(about)})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (missing, "do not exist; make them with kvfold calibrate"),
        (directory, "is no file"),
        (empty, "holds no statistics"),
        (truncated, "holds no statistics"),
        (header_only, "holds no statistics"),
        (checkpoint, "holds no statistics"),
        (text, "holds no statistics"),
        (foreign_metadata, "holds no statistics"),
        (other_tensors, "written by another version"),
        (next_version, "written by another version"),
        (first_version, "make them again"),
    ],
)
def test_what_is_no_statistics_is_refused_in_one_line(spoil, message, tmp_path):
    path = tmp_path / "s.safetensors"
    spoil(path)
    with pytest.raises(UserError, match=message) as refused:
        Statistics.open(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("make", "yes"), [(write, True), (next_version, True), (checkpoint, False), (text, False)])
def test_what_overwrite_may_replace(make, yes, tmp_path):
    make(tmp_path / "s.safetensors")
    assert is_statistics(tmp_path / "s.safetensors") is yes


def test_an_existing_file_is_replaced_only_on_request(tmp_path):
    path = write(tmp_path / "s.safetensors")
    other = replace(ABOUT, tokens=7)
    with pytest.raises(UserError, match="exists"):
        write(path, other)
    assert Statistics.open(path).about == ABOUT
    write(path, other, overwrite=True)
    assert Statistics.open(path).about == other


@pytest.mark.parametrize("name", STILL.names)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e39])  # the last one is beyond fp32
def test_a_number_that_is_none_is_refused_and_nothing_left(name, bad, tmp_path):
    layer = layers(STILL)[1]
    spoilt = replace(layer, **{name: getattr(layer, name).clone().fill_(bad)})
    refused = pytest.raises(UserError, match=rf"layer 1 has NaN or Inf .*\({name}\)")
    with refused, statistics_file(tmp_path / "s.safetensors", STILL) as writer:
        writer(1, spoilt)
    assert not list(tmp_path.iterdir())


def test_no_room(tmp_path):
    with pytest.raises(EnvironmentFailure, match="bytes free"):
        write(tmp_path / "s.safetensors", replace(ABOUT, hidden_size=1 << 28))
    assert not list(tmp_path.iterdir())


def test_second_writer_is_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    with statistics_file(path, ABOUT) as writer:
        for number, layer in enumerate(layers()):
            writer(number, layer)
        with pytest.raises(UserError, match="another kvfold is writing"):
            write(path, overwrite=True)
    assert Statistics.open(path).about == ABOUT
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_killed_writer_leaves_nothing_that_counts(tmp_path):
    """Its leftover is longer than what the next one writes, and full of garbage."""
    path = tmp_path / "s.safetensors"
    code = (
        "import sys, time, pathlib, kvfold.common.atomic as atomic\n"
        "with atomic.output_file(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'garbage' * 100_000); print('writing', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not path.exists()
    assert list(tmp_path.iterdir())
    write(path)
    assert Statistics.open(path).about == ABOUT
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("rank", [0, 1, 3, 7])
def test_effective_rank(rank):
    assert effective_rank(moment(7, rank, 1)) == rank
    assert effective_rank(moment(7, rank, 1) * 1e9) == rank


@pytest.mark.parametrize("name", STILL.names)
def test_one_flipped_bit_is_found(name, tmp_path):
    path = write(tmp_path / "s.safetensors", STILL)
    assert Statistics.open(path).is_whole()
    tensors, _ = read_header(path)
    info = next(info for info in tensors if info.name == f"layers.1.{name}")
    data = bytearray(path.read_bytes())
    data[info.start + 7] ^= 0x40
    path.write_bytes(data)
    statistics = Statistics.open(path)
    statistics.layer(0)
    with pytest.raises(UserError, match=rf"s.safetensors is damaged \(layers.1.{name} is not what was written\)"):
        statistics.layer(1)
    assert not statistics.is_whole()


def test_a_second_writer_can_wait_for_the_first(tmp_path):
    path = tmp_path / "s.safetensors"
    with ThreadPoolExecutor(1) as pool:
        with statistics_file(path, ABOUT) as writer:
            other = pool.submit(write, path, overwrite=True, wait=True)
            with pytest.raises(TimeoutError):
                other.result(0.2)
            for number in range(L):
                writer(number, layers()[number])
        assert other.result(30) == path
    assert Statistics.open(path).is_whole()
