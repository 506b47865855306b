"""What a conversion writes: complete, in the source's form, hashed, and only what changes is decoded."""

import json
from contextlib import contextmanager

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvfold.common import atomic
from kvfold.common.errors import EnvironmentFailure, UserError
from kvfold.convert.checkpoint import Checkpoint
from kvfold.convert.gqa import convert_gqa

from .tiny import make_config, make_model


@pytest.fixture(scope="module")
def model():
    return make_model(make_config("llama")).to(torch.bfloat16)


@pytest.fixture
def src(model, tmp_path):
    """A sharded bf16 checkpoint with every kind of side file."""
    folder = tmp_path / "src"
    model.save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer.json").write_bytes(b'{"x": "\xc3\xa9"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}\r\n")
    (folder / "README.md").write_text("# card")
    (folder / "extra").mkdir()
    (folder / "extra/notes.txt").write_text("notes")
    (folder / "optimizer.pt").write_bytes(b"state")
    (folder / "linked").symlink_to("/etc")
    (folder / "extra/run.sh").write_text("#!/bin/sh")
    (folder / "extra/run.sh").chmod(0o755)
    (folder / ".git").mkdir()
    (folder / ".git/HEAD").write_text("ref")
    return folder


def data(path):
    """Tensor name -> bytes, over all shards."""
    checkpoint = Checkpoint.open(path)
    return {name: b"".join(map(bytes, checkpoint.pieces(info))) for name, info in checkpoint.tensors.items()}


@pytest.mark.parametrize("hash", [True, False])
def test_untouched_tensors_are_byte_equal_and_sharding_stays(src, tmp_path, hash, monkeypatch):
    decoded = []
    original = Checkpoint.tensor
    monkeypatch.setattr(
        Checkpoint, "tensor", lambda self, info, *buffer: decoded.append(info.name) or original(self, info, *buffer)
    )
    report = convert_gqa(src, tmp_path / "out", kv_heads=2, method="mean", hash=hash)
    before, after = data(src), data(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == set(decoded) == {name for name in before if "k_proj" in name or "v_proj" in name}
    assert report.tensors_merged == len(changed)
    assert report.tensors_copied == len(before) - len(changed)
    assert Checkpoint.open(src).shards == Checkpoint.open(tmp_path / "out").shards
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(len, after.values())) == report.bytes
    assert set(index["weight_map"].values()) == set(Checkpoint.open(src).shards)
    for shard in Checkpoint.open(src).shards:  # the library agrees with our reading and writing of headers
        with safe_open(tmp_path / "out" / shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                assert file.get_tensor(name).view(torch.uint8).numpy().tobytes() == after[name]


def test_side_files_are_byte_equal_and_stale_ones_named(src, tmp_path):
    report = convert_gqa(src, tmp_path / "out", kv_heads=2, method="mean")
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "README.md",
        "extra/notes.txt",
        "generation_config.json",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (src / name).read_bytes()
    assert report.files_left_out == [".git", "linked", "optimizer.pt"]
    assert (tmp_path / "out/extra/run.sh").stat().st_mode & 0o111
    assert not (tmp_path / "out/.git").exists()
    assert not (tmp_path / "out/optimizer.pt").exists()


def test_config_changes_in_one_key(src, tmp_path):
    raw = json.loads((src / "config.json").read_text()) | {"my_own_key": {"kept": True}}
    (src / "config.json").write_text(json.dumps(raw))
    convert_gqa(src, tmp_path / "out", kv_heads=1, method="mean")
    assert json.loads((tmp_path / "out/config.json").read_text()) == raw | {"num_key_value_heads": 1}


def test_record_tells_recipe_and_true_hashes(src, tmp_path):
    convert_gqa(src, tmp_path / "a", kv_heads=2, method="first", seed=7)
    record = json.loads((tmp_path / "a/kvfold.json").read_text())
    assert record["format_version"] == 1
    assert record["recipe"] == {
        "command": "convert gqa", "kv_heads": 2, "method": "first", "grouping": "contiguous", "calibration": None,
        "refine": None, "seed": 7, "dtype": None, "max_shard_size": None,
    }  # fmt: skip
    assert record["source"]["name"] == "src"  # not the whole path
    assert "model.layers.0.self_attn.k_proj.weight" in record["computed"]
    written = {p.relative_to(tmp_path / "a").as_posix() for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert set(record["files"]) == written - {"kvfold.json"}
    for name, entry in record["files"].items():
        assert entry["xxh3_128"] == xxhash.xxh3_128_hexdigest((tmp_path / "a" / name).read_bytes()), name
    convert_gqa(tmp_path / "a", tmp_path / "b", kv_heads=1, method="mean", hash=False)
    second = json.loads((tmp_path / "b/kvfold.json").read_text())
    assert second["source"]["record"] == record  # the history stays
    assert not any(second["files"].values())


def test_same_input_gives_same_bytes(src, tmp_path):
    for name in "ab":
        convert_gqa(src, tmp_path / name, kv_heads=2, method="random")
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()


def test_max_shard_size(src, tmp_path):
    convert_gqa(src, tmp_path / "one", kv_heads=2, method="mean", max_shard_size=10**9)
    assert Checkpoint.open(tmp_path / "one").shards == ("model.safetensors",)
    convert_gqa(src, tmp_path / "many", kv_heads=2, method="mean", max_shard_size=20_000)
    shards = Checkpoint.open(tmp_path / "many").shards
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert data(tmp_path / "one") == data(tmp_path / "many")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtype(src, tmp_path, dtype):
    convert_gqa(src, tmp_path / "plain", kv_heads=2, method="mean")
    convert_gqa(src, tmp_path / "cast", kv_heads=2, method="mean", dtype=dtype)
    plain, cast = Checkpoint.open(tmp_path / "plain"), Checkpoint.open(tmp_path / "cast")
    for name, info in cast.tensors.items():
        tensor = cast.tensor(info)
        assert str(tensor.dtype) == f"torch.{dtype}"
        if "k_proj" not in name and "v_proj" not in name:
            assert torch.equal(tensor, plain.tensor(plain.tensors[name]).to(tensor.dtype))
    assert json.loads((tmp_path / "cast/config.json").read_text())["dtype"] == dtype


def test_dtype_that_overflows_is_refused(src, tmp_path):
    shard = next(path for path in src.glob("*.safetensors") if any("norm" in name for name in load_file(path)))
    state = load_file(shard)
    name = next(name for name in state if "norm" in name)
    state[name][0] = 1e6
    save_file(state, shard, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{name} overflows float16"):
        convert_gqa(src, tmp_path / "out", kv_heads=2, method="mean", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_integer_tensors_and_mixed_widths_stay_aligned(tmp_path):
    model = make_model(make_config("llama")).to(torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path / "src")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")
    tensors = Checkpoint.open(tmp_path / "out").tensors
    assert tensors["model.norm.weight"].dtype == "F32"
    assert all(info.start % 8 == 0 for info in tensors.values() if info.dtype == "F32")


def test_dry_run_checks_and_writes_nothing(src, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    report = convert_gqa(src, tmp_path / "deep/out", kv_heads=2, method="mean", dry_run=True)
    assert report.dry_run
    assert sorted(tmp_path.rglob("*")) == before
    real = convert_gqa(src, tmp_path / "deep/out", kv_heads=2, method="mean")
    assert (real.bytes, real.tensors_merged, real.shards) == (
        report.bytes,
        report.tensors_merged,
        report.shards,
    )


def test_report_figures(src, tmp_path):
    report = convert_gqa(src, tmp_path / "out", kv_heads=1, method="mean")
    assert (report.source_kv_elements_per_token_per_layer, report.kv_elements_per_token_per_layer) == (
        128,
        32,
    )
    assert (report.source_kv_bytes_per_token, report.kv_bytes_per_token) == (128 * 2 * 2, 32 * 2 * 2)
    assert report.kv_ratio == 0.25
    assert report.dtype == "bfloat16"


@pytest.mark.parametrize("sharded", [True, False])
def test_bin_sources(model, tmp_path, sharded):
    (tmp_path / "src").mkdir()
    model.config.save_pretrained(tmp_path / "src")
    state = model.state_dict()
    if sharded:
        names = sorted(state)
        files = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
        for file, part in files.items():
            torch.save({name: state[name] for name in part}, tmp_path / "src" / file)
        weight_map = {name: file for file, part in files.items() for name in part}
        (tmp_path / "src/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        torch.save(state, tmp_path / "src/pytorch_model.bin", _use_new_zipfile_serialization=False)
    model.save_pretrained(tmp_path / "same")
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")
    convert_gqa(tmp_path / "same", tmp_path / "same-out", kv_heads=2, method="mean")
    assert data(tmp_path / "out") == data(tmp_path / "same-out")
    assert not list((tmp_path / "out").glob("*.bin*"))
    assert len(list((tmp_path / "out").glob("model*.safetensors"))) == 1 + sharded


def test_bin_written_anew_is_read_anew(model, tmp_path):
    (tmp_path / "src").mkdir()
    model.config.save_pretrained(tmp_path / "src")
    for name, factor in (("one", 1), ("two", 2)):
        torch.save({k: v * factor for k, v in model.state_dict().items()}, tmp_path / "src/new.bin")
        (tmp_path / "src/new.bin").replace(tmp_path / "src/pytorch_model.bin")
        convert_gqa(tmp_path / "src", tmp_path / name, kv_heads=2, method="mean")
    assert data(tmp_path / "one") != data(tmp_path / "two")


@pytest.mark.parametrize(
    "state",
    [{3: torch.ones(2)}, {"x": torch.eye(3).to_sparse()}, {"x": torch.ones(2, device="meta")}, {"x": 3}, [1]],
    ids=["number for a name", "sparse", "meta", "no tensor", "no table"],
)
def test_odd_bins_are_refused(tmp_path, state):
    make_config("llama").save_pretrained(tmp_path / "src")
    torch.save(state, tmp_path / "src/pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")


@pytest.mark.parametrize("content", [b"", b"\x80\x02.", b"PK\x03\x04", b"\x80\x05K\x03.", b"text"])
def test_damaged_bins_are_refused(tmp_path, content):
    make_config("llama").save_pretrained(tmp_path / "src")
    (tmp_path / "src/pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"pytorch_model\.bin") as caught:
        convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("file", ["model-00001-of-00001.safetensors", "weights.safetensors"])
def test_one_shard_under_another_name(model, tmp_path, file):
    """Indexed in the source, it gets the name under which it is found without an index."""
    model.save_pretrained(tmp_path / "src")
    (tmp_path / "src/model.safetensors").rename(tmp_path / "src" / file)
    names = Checkpoint._read(tmp_path / "src", (file,), None, frozenset()).tensors
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
    (tmp_path / "src/model.safetensors.index.json").write_text(json.dumps(index))
    convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")
    assert Checkpoint.open(tmp_path / "out").shards == ("model.safetensors",)


def test_shard_that_holds_nothing_but_dropped_tensors(model, tmp_path):
    model.save_pretrained(tmp_path / "src")
    state = load_file(tmp_path / "src/model.safetensors")
    dropped = "model.layers.0.self_attn.rotary_emb.inv_freq"
    (tmp_path / "src/model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": state, "model-00002-of-00002.safetensors": {dropped: torch.ones(8)}}
    for file, part in files.items():
        save_file(part, tmp_path / "src" / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "src/model.safetensors.index.json").write_text(json.dumps(index))
    report = convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")
    assert report.tensors_dropped == [dropped]
    assert Checkpoint.open(tmp_path / "out").shards == ("model.safetensors",)


def test_every_dtype_key_is_set(src, tmp_path):
    raw = json.loads((src / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (src / "config.json").write_text(json.dumps(raw))
    convert_gqa(src, tmp_path / "out", kv_heads=2, method="mean", dtype="float32")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("float32", "float32")


def test_config_that_leaves_things_unsaid(src, tmp_path):
    """Then transformers is asked, and the result is the same."""
    convert_gqa(src, tmp_path / "a", kv_heads=2, method="mean")
    raw = json.loads((src / "config.json").read_text())
    for key in ("head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", "num_key_value_heads"):
        del raw[key]
    (src / "config.json").write_text(json.dumps(raw))
    convert_gqa(src, tmp_path / "b", kv_heads=2, method="mean")
    assert data(tmp_path / "a") == data(tmp_path / "b")


def test_bin_with_code_inside_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("pwned",))

    make_config("llama").save_pretrained(tmp_path / "src")
    torch.save({"x": Evil()}, tmp_path / "src/pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin cannot be read as plain weights"):
        convert_gqa(tmp_path / "src", tmp_path / "out", kv_heads=2, method="mean")


def test_full_disk_is_told_before_the_work(src, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(EnvironmentFailure, match="1,000 bytes free"):
        convert_gqa(src, tmp_path / "out", kv_heads=2, method="mean")
    assert not (tmp_path / "out").exists()


def test_progress_reaches_its_total(src, tmp_path):
    seen = []

    @contextmanager
    def progress(label):
        assert label == "writing"
        yield lambda done, total: seen.append((done, total))

    report = convert_gqa(src, tmp_path / "out", kv_heads=2, method="mean", progress=progress)
    assert seen[-1] == (report.bytes, report.bytes)
    assert seen == sorted(seen)
