"""The readers by name: files that each takes, how they are made hostile, and how one is read.

A reader is given an empty folder. What it makes of a file must hold too: it is used as kvfold would use it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import torch
from accelerate import Accelerator

from kvfold.common.errors import EnvironmentFailure
from kvfold.common.protocol import Protocol
from kvfold.convert.calibration.recognise import is_statistics
from kvfold.convert.calibration.statistics import LayerStatistics
from kvfold.convert.calibration.store import About, Statistics, statistics_file
from kvfold.convert.checkpoint import Checkpoint
from kvfold.convert.config import StoredConfig
from kvfold.convert.gguf import read_gguf_config
from kvfold.convert.gguf_header import read_gguf_headers
from kvfold.convert.headers import ITEM_BYTES, pack_header, read_header
from kvfold.convert.inspect import inspect_model
from kvfold.eval.report.record import to_json
from kvfold.eval.report.runs import describe, recipes
from kvfold.eval.shape import read_any_config, shape_of
from kvfold.publish.facts import history, read_record, read_report
from kvfold.recipes.pipeline.catalogue import RECIPES
from kvfold.recipes.pipeline.read import read_pipeline, validate
from kvfold.recipes.pipeline.record import Record, Step
from kvfold.uptrain.data.store import open_store
from kvfold.uptrain.history import History, read_history
from kvfold.uptrain.recipe import read_recipe
from kvfold.uptrain.state import Checkpoints, check_recipe

from ..eval.report.made import make_report
from . import mutate
from .gguf_parts import gguf as mutate_gguf

MODEL = RECIPES.parent / "tiny/model"
INDEX = "model.safetensors.index.json"
_SHARD = pack_header([("a.weight", "F32", (2, 3)), ("b", "BF16", (4,))], {"format": "pt"}) + bytes(32)
_IDENTITY = {"model": "abc", "betas": [0.9, 0.95], "seed": 0}


@dataclass(frozen=True)
class Target:
    """One reader.

    Attributes:
        read: given a file's bytes and an empty folder to put it into.
        seeds: files that it takes.
        mutate: makes a hostile file of a good one.
    """

    read: Callable[[bytes, Path], object]
    seeds: Callable[[], list[bytes]]
    mutate: mutate.Mutate


def _put(folder: Path, name: str, file: bytes) -> Path:
    path = folder / name
    path.write_bytes(file)
    return path


def _as_json(*trees: Any) -> list[bytes]:
    return [json.dumps(tree).encode() for tree in trees]


# Checkpoints.


def _safetensors(file: bytes, folder: Path) -> None:
    tensors, metadata = read_header(_put(folder, "model.safetensors", file))
    assert all(isinstance(text, str) for text in metadata.values())
    at = tensors[0].start if tensors else len(file)
    for info in tensors:  # one behind the other, to the end
        assert (info.start, info.stop - info.start) == (at, info.numel * ITEM_BYTES[info.dtype])
        at = info.stop
    assert at == len(file)
    assert len(Checkpoint.open(folder).tensors) == len(tensors)


def _safetensors_seeds() -> list[bytes]:
    rows = [(f"model.layers.{n}.weight", dtype, (2, n)) for n, dtype in enumerate(("F64", "F32", "BF16", "U8", "BOOL"))]
    size = sum(2 * n * ITEM_BYTES[dtype] for n, (_, dtype, _) in enumerate(rows))
    return [_SHARD, pack_header(rows, {}) + bytes(size), pack_header([("a", "F16", ())], {"x": "é"}) + bytes(2)]


def _index(file: bytes, folder: Path) -> None:
    _put(folder, "a.safetensors", _SHARD)
    _put(folder, "c.safetensors", pack_header([("c", "F32", (1,))], {}) + bytes(4))
    _put(folder, INDEX, file)
    found = Checkpoint.open(folder)
    assert all((folder / shard).parent == folder for shard in found.shards)


def _index_seeds() -> list[bytes]:
    one = {"a.weight": "a.safetensors", "b": "a.safetensors"}
    return _as_json({"metadata": {"total_size": 32}, "weight_map": one}, {"weight_map": one | {"c": "c.safetensors"}})


def _gguf_headers(file: bytes, folder: Path) -> None:
    for info in read_gguf_headers(_put(folder, "model.gguf", file)):
        assert min(info.shape, default=1) >= 0
        assert info.stored_bytes <= len(file)


def _gguf_config(file: bytes, folder: Path) -> None:
    path = _put(folder, "model.gguf", file)
    config = read_gguf_config(path)
    shape_of(config, {})
    inspect_model(path)


@cache
def _gguf_seeds() -> list[bytes]:
    """Written by hand, so that no file is needed: a Llama of one layer, and the smallest file that there is."""

    def text(said: str) -> bytes:
        return struct.pack("<Q", len(said)) + said.encode()

    def pair(key: str, kind: int, value: bytes) -> bytes:
        return text(key) + struct.pack("<I", kind) + value

    def number(key: str, value: int) -> bytes:
        return pair(key, 4, struct.pack("<I", value))

    def listed(kind: int, *values: bytes) -> bytes:
        return struct.pack("<IQ", kind, len(values)) + b"".join(values)

    sizes = {"context_length": 64, "embedding_length": 8, "block_count": 1, "feed_forward_length": 16, "vocab_size": 3}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 4}
    pairs = [
        pair("general.architecture", 8, text("llama")),
        pair("general.name", 8, text("tiny")),
        *(number(f"llama.{key}", value) for key, value in sizes.items()),
        pair("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        pair("llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
        pair("general.flag", 7, b"\1"),
        number("general.alignment", 32),
        pair("tokenizer.ggml.model", 8, text("gpt2")),
        pair("tokenizer.ggml.tokens", 9, listed(8, text("<s>"), text("a"), text("b"))),
        pair("tokenizer.ggml.token_type", 9, listed(5, *(struct.pack("<i", kind) for kind in (3, 1, 1)))),
        number("tokenizer.ggml.bos_token_id", 0),
    ]
    rows = {"token_embd.weight": (8, 3), "blk.0.attn_k.weight": (8, 4), "output_norm.weight": (8,)}
    infos, at = b"", 0
    for name, dims in rows.items():
        infos += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, at)
        at += 4 * torch.Size(dims).numel()
    small = number("llama.block_count", 1) + number("llama.embedding_length", 8)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(pairs)) + b"".join(pairs) + infos
    return [head + bytes(-len(head) % 32 + at), b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + small]


# Configs.

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 5,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip
_OTHERS: tuple[dict[str, Any], ...] = (
    {"model_type": "gemma3_text", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
     "mlp_only_layers": [0]},
    {"model_type": "deepseek_v3", "kv_lora_rank": 6, "q_lora_rank": None, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4,
     "v_head_dim": 4, "first_k_dense_replace": 2, "n_routed_experts": 2,
     "kvfold": {"form": "deepseek_v3", "readers": ["vllm"], "rope_frequencies": [[0]]}},
    {"model_type": "phi3", "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0, 2.0],
     "short_factor": [1.0, 1.0]}},
    {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    {"model_type": "mistral", "quantization_config": {"quant_method": "gptq", "bits": 4}, "sliding_window": 4},
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 8}},
)  # fmt: skip


def _config_seeds() -> list[bytes]:
    gpt2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 5, "n_positions": 16}
    plain = {key: value for key, value in _LLAMA.items() if key not in ("architectures", "rope_parameters")}
    return _as_json(_LLAMA, *(plain | other for other in _OTHERS), gpt2)


def _raw_config(file: bytes, folder: Path) -> None:
    _put(folder, "config.json", file)
    config = StoredConfig(folder)
    assert isinstance(config.model_type, str)
    assert getattr(config, "no_such_name", None) is None or "no_such_name" in config.raw


def _config(file: bytes, folder: Path) -> None:
    _put(folder, "config.json", file)
    shape = shape_of(read_any_config(folder), {})
    assert shape.num_hidden_layers is not None


def _inspect(file: bytes, folder: Path) -> None:
    _put(folder, "config.json", file)
    _put(folder, "model.safetensors", _weights())
    json.dumps(asdict(inspect_model(folder)))


@cache
def _weights() -> bytes:
    """Those that the first config promises."""
    rows: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (5, 8)), ("model.norm.weight", (8,))]
    for layer in range(2):
        sizes = {"self_attn.q": (8, 8), "self_attn.k": (4, 8), "self_attn.v": (4, 8), "self_attn.o": (8, 8)}
        sizes |= {"mlp.gate": (16, 8), "mlp.up": (16, 8), "mlp.down": (8, 16)}
        rows += [(f"model.layers.{layer}.{name}_proj.weight", shape) for name, shape in sizes.items()]
        rows += [(f"model.layers.{layer}.{name}_layernorm.weight", (8,)) for name in ("input", "post_attention")]
    head = pack_header([(name, "BF16", shape) for name, shape in rows], {})
    return head + bytes(sum(2 * torch.Size(shape).numel() for _, shape in rows))


# Recipes.


def _pipeline(file: bytes, folder: Path) -> None:
    path = _put(folder, "recipe.yaml", file)
    validate(path)
    read = read_pipeline(path)
    json.dumps(read.sections)
    assert read.model


def _pipeline_seeds() -> list[bytes]:
    found = [RECIPES / f"{name}.yaml" for name in ("embedded-gqa", "embedded-mla", "llama-2-7b-mla")]
    short = b"source:\n  model: embedded\nconvert: {to: mla, kv_rank: 8}\n"
    lines = (path.read_bytes().split(b"\n") for path in found)
    return [short, *(b"\n".join(line for line in each if not line.startswith(b"#")) for each in lines)]


def _uptraining(file: bytes, folder: Path) -> None:
    json.dumps(read_recipe(_put(folder, "recipe.yaml", file)).identity())


def _uptraining_seeds() -> list[bytes]:
    flat = """model: embedded\nout: healed\nteacher: embedded\ntokens: 1e6\nwindow: 64\nlearning_rate: 1e-4
betas: [0.9, 0.95]\ndata: [builtin, 'hub:a/b']\nweights: [1, 2]\ntrain: all\nprecision: bf16\nclip: 1.0
reset_positions: yes\ntrack: []\n"""
    section = "source: {model: a}\nuptrain:\n  model: embedded\n  out: there\n  alpha: 0.05\n  pretrain_tokens: 1e9\n"
    return [flat.encode(), section.encode()]


def _pairs(file: bytes, folder: Path) -> None:
    """Both kinds of recipe; a command line holds no NUL, and what no shell can encode comes as surrogates."""
    pairs = file.decode(errors="surrogateescape").split("\n")
    path = _put(folder, "recipe.yaml", _pipeline_seeds()[0])
    if pairs[0].startswith("convert") or "." in pairs[0].partition("=")[0]:
        json.dumps(read_pipeline(path, pairs).sections)
    else:
        json.dumps(read_recipe(None, pairs).identity())


def _pairs_seeds() -> list[bytes]:
    flat = "model=embedded\nout=healed\nsteps=3\nbetas=[0.9, 0.95]\ndata=[builtin]\nteacher=embedded\nclip=1"
    sections = 'convert.kv_rank=9\nsource.model="embedded"\nconvert.for=[vllm]\nuptrain.steps=3\neval.text=builtin'
    return [flat.encode(), sections.encode()]


# What kvfold itself wrote.


def _statistics(file: bytes, folder: Path) -> None:
    path = _put(folder, "stats.safetensors", file)
    is_statistics(path)
    found = Statistics.open(path)
    found.effective_ranks()
    found.is_whole()
    assert found.about.key


@cache
def _statistics_seeds() -> list[bytes]:
    import tempfile

    about = About("a", "b", 64, 2, {"builtin": 2}, True, False, "float32", 3, 2, 2)
    moments = LayerStatistics(*(torch.eye(size, dtype=torch.float64) for size in (4, 2, 2)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stats"
        with statistics_file(path, about) as writer:
            for layer in range(2):
                writer(layer, moments)
        return [path.read_bytes()]


def _record(file: bytes, folder: Path) -> None:
    path = _put(folder, "kvfold.json", file)
    recipes(str(folder))
    for step in history(read_record(folder), path):
        describe(step.recipe)


def _record_seeds() -> list[bytes]:
    refine = {"windows": 8, "kinds": {"builtin": 8}}
    first = {
        "format_version": 1,
        "recipe": {"command": "convert gqa", "kv_heads": 2, "method": "svd", "refine": refine},
        "asked": {"kv_heads": 2, "calib": ["builtin"]},
        "versions": {"kvfold": "0.1.0", "torch": "2.13.0"},
        "source": {"name": "a/b", "revision": "0" * 40, "cache": {"attention_kind": "MHA", "kv_bytes_per_token": 64}},
        "files": {"config.json": {"xxh3_128": "0" * 32}},
    }
    second = {"recipe": {"command": "uptrain", "data": ["builtin"]}, "source": {"name": "x", "record": first}}
    return _as_json(first, first | second)


def _run(file: bytes, folder: Path) -> None:
    _put(folder, "run.json", file)
    record = Record.open(folder, "recipe")
    record.content(folder)
    assert all(isinstance(step, Step) and step.seconds + step.attempts >= 0 for step in record.steps.values())
    record.save()
    Record.open(folder, "recipe")


def _run_seeds() -> list[bytes]:
    step = asdict(Step("convert", "done", "kvfold convert", {"kv_heads": 2}, "", "abc", 1, 2.5, 0, 77))
    said = {"format_version": 1, "kvfold_version": "0.1.0", "recipe": "x", "seconds": 2.5, "commits": {"a/b": "0" * 40}}
    return _as_json({**said, "steps": {"convert": step}, "files": {"/a/b": [1, 2, 3, "abc"]}})


def _report(file: bytes, folder: Path) -> None:
    _put(folder, "report.json", file)
    report = read_report(folder)
    to_json(report)
    assert report.source.name == report.results[0].name


def _report_seeds() -> list[bytes]:
    """One with all kinds of figures; its protocol holds no text where numbers belong."""
    report = to_json(make_report())
    hints = get_type_hints(Protocol)
    usual = {int: 5, str: "said", bool: False, float: 0.5}
    report["protocol"] |= {name: usual[hints[name]] for name in report["protocol"] if hints[name] in usual}
    return _as_json(report)


def _metrics(file: bytes, folder: Path) -> None:
    _put(folder, "metrics.jsonl", file)
    lines = read_history(folder)
    kept = History(folder, 2).lines
    assert kept == [line for line in lines if line["step"] <= 2]
    assert read_history(folder) == kept


def _metrics_seeds() -> list[bytes]:
    look = {"step": 0, "tokens": 0, "held_out": {"builtin": 3.5}, "reference": {"builtin": 3.1}}
    step = {"step": 1, "tokens": 64, "loss": 3.0, "cross_entropy": 3.25, "learning_rate": 1e-4, "seconds": 0.5}
    return [b"\n".join(_as_json(look, step, step | {"step": 2, "tokens": 128}, look | {"step": 2, "tokens": 128}))]


def _marker(file: bytes, folder: Path) -> None:
    saved = folder / "step-00000002"
    saved.mkdir()
    _put(saved, "kvfold_state.json", file)
    _put(saved, "model.safetensors", b"weights")
    check_recipe(folder, {"seed": 0})
    found = Checkpoints(folder, _IDENTITY, _accelerator(), [], 2).latest(lambda text: None)
    assert found is None or (found.step, found.identity) == (2, _IDENTITY)


@cache
def _accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def _marker_seeds() -> list[bytes]:
    import xxhash

    files = {"model.safetensors": xxhash.xxh3_128(b"weights").hexdigest()}
    marker = {"format_version": 2, "step": 2, "processes": 1, "kind": "whole", "identity": _IDENTITY, "files": files}
    return [signed(json.dumps(marker).encode())]


def signed(file: bytes) -> bytes:
    """A marker with the hash of what it says."""
    try:
        marker = json.loads(file)
        marker.pop("hash", None)
        said = hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()
        return json.dumps(marker | {"hash": said}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return file


def _mutate_marker(file: bytes, random: Any) -> bytes:
    file = mutate.json_text(file, random)
    return signed(file) if random.randint(0, 7) else file


def _tokens(file: bytes, folder: Path) -> None:
    _put(folder, "tokens.json", file)
    _put(folder, "train-0.ids", bytes(2 * 4 * 2))
    try:
        store = open_store(folder, verify=True)
    except EnvironmentFailure:
        return
    assert all(part.stored * part.window * 2 == 16 for part in store.train)


def _tokens_seeds() -> list[bytes]:
    import xxhash

    part = {"name": "builtin", "file": "train-0", "window": 4, "windows": 2, "stored": 2, "last": 4}
    part |= {"dtype": "uint16", "flagged": False, "reset_positions": False}
    hashes = {"train-0.ids": xxhash.xxh3_128(bytes(16)).hexdigest()}
    digests = {"digest": "a", "train_digest": "b"}
    return _as_json({"request": {}, "hashes": hashes, "train": [part], "held_out": [], **digests})


TARGETS: Mapping[str, Target] = {
    "safetensors": Target(_safetensors, _safetensors_seeds, mutate.safetensors),
    "index": Target(_index, _index_seeds, mutate.json_text),
    "gguf-headers": Target(_gguf_headers, _gguf_seeds, mutate_gguf),
    "gguf-config": Target(_gguf_config, lambda: _gguf_seeds()[:1], mutate_gguf),
    "raw-config": Target(_raw_config, _config_seeds, mutate.json_text),
    "config": Target(_config, _config_seeds, mutate.json_text),
    "inspect": Target(_inspect, _config_seeds, mutate.json_text),
    "pipeline": Target(_pipeline, _pipeline_seeds, mutate.yaml_text),
    "uptraining": Target(_uptraining, _uptraining_seeds, mutate.yaml_text),
    "pairs": Target(_pairs, _pairs_seeds, mutate.pairs_text),
    "statistics": Target(_statistics, _statistics_seeds, mutate.safetensors),
    "record": Target(_record, _record_seeds, mutate.json_text),
    "run": Target(_run, _run_seeds, mutate.json_text),
    "report": Target(_report, _report_seeds, mutate.json_text),
    "metrics": Target(_metrics, _metrics_seeds, mutate.lines_text),
    "marker": Target(_marker, _marker_seeds, _mutate_marker),
    "tokens": Target(_tokens, _tokens_seeds, mutate.json_text),
}


def read_in(target: Target, file: bytes, folder: Path) -> None:
    """Read one file in a folder, which is emptied before."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    target.read(file, folder)
