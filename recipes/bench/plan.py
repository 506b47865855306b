"""What `kvfold plan` says of memory against what commands take, on synthetic checkpoints.

    python -m kvfold.recipes.bench.plan --dir DIR [--gigabytes 1 --gigabytes 4 --gigabytes 12] [--only NAME]

Conversion, offloaded calibration and uptraining of Llama-2-7B's layers in bf16, as many as the size asks for; random
weights, the built-in text, the embedded model's tokenizer. Every command is a process of its own on the CPU. Compared
is its peak of anonymous memory: pages of mapped files may go whenever memory is short. Checkpoints and figures stay in
DIR, so a run that was stopped goes on; 12 GB take 26 GB of disk and an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...common.atomic import output_directory
from ...common.embedded import MODEL_DIR
from ...convert.checkpoint import Checkpoint
from ...eval.shape import read_any_config
from ..plan.plan import plan
from ..plan.usual import usual_pipeline
from .peak import peak_of
from .synthetic import make_checkpoint

_PYTHON = (sys.executable, "-m")
_STATS = "statistics.safetensors"
_ONE = b"\x80\x3f"  # in bf16
_ANY = 1e15  # bytes: it is to plan what would be, whether it fits or not


@dataclass(frozen=True)
class Case:
    """A command, and how it is planned for.

    Attributes:
        stage: of the plan.
        words: of the command, after python -m; SRC, OUT and STATS stand for paths.
        overrides: of the plan.
        largest: GB of a checkpoint for which it is run.
    """

    stage: str
    words: str
    overrides: tuple[str, ...] = ()
    largest: float = 1e9


_LATENT = ("convert.to=mla", "convert.kv_rank=512", "convert.rope_dim=64")
_WINDOWS = 1  # of calibration and refinement; their sums do not grow with the text
CASES = {
    "convert gqa, mean": Case(
        "convert", "kvfold.cli convert gqa SRC OUT --kv-heads 8 --method mean --no-hash", ("convert.method=mean",)
    ),
    "calibrate --offload": Case(
        "calibrate",
        f"kvfold.cli calibrate SRC -o STATS --offload --calib-windows {_WINDOWS} --overwrite",
        ("convert.offload=true", f"convert.calib_windows={_WINDOWS}"),
    ),
    "convert gqa, svd": Case("convert", "kvfold.cli convert gqa SRC OUT --kv-heads 8 --stats STATS", largest=4),
    "convert mla, 512 + 64": Case(
        "convert",
        "kvfold.cli convert mla SRC OUT --kv-rank 512 --rope-dim 64 --rope-select high --stats STATS",
        _LATENT,
        largest=1,
    ),
    "convert gqa, mean, refined": Case(
        "refine",
        f"kvfold.cli convert gqa SRC OUT --kv-heads 8 --method mean --refine {_WINDOWS} --refine-passes 1",
        ("convert.method=mean", f"convert.refine={_WINDOWS}"),
        largest=1,
    ),
    "uptrain": Case(
        "uptrain",
        "kvfold.uptrain model=SRC out=OUT data=TEXT window=256 steps=2 batch_size=2 save_every=0 device=cpu",
        ("uptrain.teacher=", "uptrain.window=256", "uptrain.batch_size=2", "uptrain.steps=2"),
        largest=1,
    ),
    "uptrain, with a teacher, recomputed": Case(
        "uptrain",
        "kvfold.uptrain model=SRC out=OUT data=TEXT teacher=SRC window=256 steps=2 batch_size=2 save_every=0 device=cpu"
        " gradient_checkpointing=true",
        ("uptrain.window=256", "uptrain.batch_size=2", "uptrain.steps=2", "uptrain.gradient_checkpointing=true"),
        largest=1,
    ),
}


def source(folder: Path, gigabytes: float) -> Path:
    """A checkpoint of this size, made unless it is there, with a tokenizer."""
    path = folder / f"source-{gigabytes:g}"
    if not path.exists():
        make_checkpoint(path, gigabytes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL_DIR / name, path / name)
    return path


def trainable(folder: Path, gigabytes: float) -> Path:
    """The same sizes, in a model that expects every token once more: what is worse than a guess is not trained.

    Layers add nothing, and the head is the embedding.
    """
    path, whole = folder / f"trainable-{gigabytes:g}", source(folder, gigabytes)
    if path.exists():
        return path
    with output_directory(path) as staging:
        shutil.copytree(whole, staging, dirs_exist_ok=True)
        weights = Checkpoint.open(staging)
        tensors = weights.tensors
        embedding = b"".join(bytes(piece) for piece in weights.pieces(tensors["model.embed_tokens.weight"]))
        for name, info in tensors.items():
            data = {
                "lm_head.weight": embedding,
                "model.norm.weight": _ONE * info.numel,
                "o_proj.weight": bytes(info.nbytes),
                "down_proj.weight": bytes(info.nbytes),
            }
            if found := next((value for end, value in data.items() if name.endswith(end)), None):
                with (staging / info.shard).open("r+b") as file:
                    file.seek(info.start)
                    file.write(found)
    return path


def predicted(model: Path, case: Case) -> int:
    """Bytes of the process, as planned."""
    config = read_any_config(model)
    unchanged = ("convert.kv_heads=32",) if case.stage == "uptrain" else ()  # it is the source that is trained here
    pipeline = usual_pipeline(str(model), config, ["uptrain.device=cpu", *unchanged, *case.overrides])
    made = plan(pipeline.sections, config, memory=_ANY)
    return next(stage.device_bytes for stage in made.results if stage.stage == case.stage)


def measured(model: Path, case: Case, folder: Path) -> int:
    """Bytes of the process at its peak."""
    out, text = folder / "out", folder / "text.txt"
    text.write_text("\n\n".join(f" {letter}" * 500 for letter in string.ascii_letters))
    paths = {"SRC": model, "OUT": out, "STATS": model.with_suffix(f".{_STATS}"), "TEXT": text}
    if case.stage == "calibrate":
        paths["STATS"].unlink(missing_ok=True)  # or those that are there are used as they are
    words = []
    for word in case.words.split():
        key, equals, value = word.partition("=")
        name = value if equals else word
        words.append(f"{key}=" * bool(equals) + str(paths.get(name, name)))
    try:
        return peak_of([*_PYTHON, *words]).anonymous
    finally:
        for path in (out, out.with_name("out.run")):
            shutil.rmtree(path, ignore_errors=True)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where to work, and to keep what was found")
    parser.add_argument("--gigabytes", type=float, action="append", help="of a checkpoint; 1, 4 and 12 by default")
    parser.add_argument("--only", action="append", choices=CASES, help="of the commands")
    options = parser.parse_args(args)
    options.dir.mkdir(parents=True, exist_ok=True)
    notes = options.dir / "measured.json"
    known = json.loads(notes.read_text()) if notes.exists() else {}
    print("| checkpoint | command | predicted MB | measured MB | error |")
    print("|---|---|---|---|---|")
    for gigabytes in options.gigabytes or (1, 4, 12):
        for name, case in CASES.items():
            if gigabytes > case.largest or (options.only and name not in options.only):
                continue
            model = (trainable if case.stage == "uptrain" else source)(options.dir, gigabytes)
            key = f"{gigabytes:g} GB, {name}"
            if key not in known:
                known[key] = measured(model, case, options.dir)
                notes.write_text(json.dumps(known, indent=2))
            foreseen, found = predicted(model, case), known[key]
            cells = [
                f"{gigabytes:g} GB",
                name,
                f"{foreseen / 1e6:.0f}",
                f"{found / 1e6:.0f}",
                f"{foreseen / found - 1:+.0%}",
            ]
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
