"""The commands under attack: their words, what they read and make, and who reads what they made."""

from __future__ import annotations

from dataclasses import dataclass

TEXT = "--calib text.txt --no-calib-builtin --calib-windows 2 --calib-window 32"
_TRAINING = "data=[text.txt] window=32 batch_size=2 micro_batch_size=2 save_every=1 keep=3 eval_windows=2 device=cpu"
_PUBLISH = "--license apache-2.0"

RECIPE = """
source: {model: src}
calibrate: {calib: [text.txt], no_calib_builtin: true, calib_windows: 2, calib_window: 32}
convert: {to: gqa, kv_heads: 4}
uptrain: {teacher: source, data: [text.txt], window: 32, steps: 2, batch_size: 2, micro_batch_size: 2, save_every: 1,
  eval_windows: 2, device: cpu, processes: 1}
eval: {text: [text.txt], window: 32, max_windows: 2}
report: {no_speed: true}
publish: {repo_id: me/model, license: apache-2.0}
"""


@dataclass(frozen=True)
class Command:
    """A command, in a folder that holds what it reads.

    Attributes:
        words: what stands behind `kvfold`.
        makes: the files and folders that appear whole or not at all.
        reads: of `world.World`, by name: copied to the folder before.
        source: the one of them whose bytes are tampered with.
        hashed: whether the command can know every byte of the source; else a flipped bit may be what it works with.
        replacing: the words that let it replace what an earlier command made; none if that is not tried.
        earlier: the words of that command.
        beside: what else may stay in the folder.
        on_hub: whether the Hub is part of what it makes.
        reader: words of a command that reads on, and writes `read`; none if it is the command itself.
        first: words of what is run before something is tampered with; the command itself, if none.
        damaged: what is tampered with in between, by glob.
        mended: words after which all is well again; the command itself, if none.
    """

    words: str
    makes: tuple[str, ...] = ("out",)
    reads: tuple[str, ...] = ("src",)
    source: str = "src"
    hashed: bool = False
    replacing: str = ""
    earlier: str = ""
    beside: tuple[str, ...] = ()
    on_hub: bool = False
    reader: str = ""
    first: str = ""
    damaged: tuple[str, ...] = ("out/**/*",)
    mended: str = ""


_READ_BY_PUBLISH = f"publish out me/model --dry-run --folder read {_PUBLISH}"

COMMANDS = {
    "calibrate": Command(
        f"calibrate src -o out {TEXT}",
        reads=("src", "text.txt"),
        replacing="--overwrite",
        earlier=f"calibrate src -o out {TEXT} --no-fisher",
        reader="convert gqa src read --kv-heads 2 --stats out",
        damaged=("out",),
        mended=f"calibrate src -o out {TEXT} --overwrite",
    ),
    "gqa-mean": Command(
        "convert gqa src out --kv-heads 2 --method mean",
        replacing="--overwrite",
        earlier="convert gqa src out --kv-heads 4 --method mean",
        reader=_READ_BY_PUBLISH,
        mended="convert gqa src out --kv-heads 2 --method mean --overwrite",
    ),
    "gqa-svd": Command(
        "convert gqa src out --kv-heads 2 --stats stats",
        reads=("src", "stats"),
        hashed=True,
        replacing="--overwrite",
        earlier="convert gqa src out --kv-heads 4 --method mean",
        reader=_READ_BY_PUBLISH,
        mended="convert gqa src out --kv-heads 2 --stats stats --overwrite",
    ),
    "refine": Command(
        f"convert gqa src out --kv-heads 4 --stats stats --refine 2 --refine-passes 1 {TEXT}",
        reads=("src", "stats", "text.txt"),
        hashed=True,
        replacing="--overwrite",
        earlier="convert gqa src out --kv-heads 4 --method mean",
        reader=_READ_BY_PUBLISH,
        mended=f"convert gqa src out --kv-heads 4 --stats stats --refine 2 --refine-passes 1 {TEXT} --overwrite",
    ),
    "mla": Command(
        "convert mla src out --kv-rank 64 --rope-dim 16 --rope-select high --stats stats",
        reads=("src", "stats"),
        hashed=True,
        replacing="--overwrite",
        earlier="convert gqa src out --kv-heads 4 --method mean",
        reader=_READ_BY_PUBLISH,
        mended="convert mla src out --kv-rank 64 --rope-dim 16 --rope-select high --stats stats --overwrite",
    ),
    "uptrain": Command(
        f"uptrain model=narrow out=out teacher=src steps=3 {_TRAINING}",
        reads=("src", "narrow", "text.txt"),
        beside=("out.run",),
        damaged=("out.run/checkpoints/step-*/*", "out.run/*", "narrow/*.safetensors", "narrow/config.json"),
    ),
    "run": Command(
        "run recipe.yaml -o run",
        makes=("run/stats.safetensors", "run/converted", "run/healed"),
        reads=("src", "text.txt", "recipe.yaml"),
        beside=("run",),
        on_hub=True,
        first="run recipe.yaml -o run --until uptrain",
        damaged=("run/stats.safetensors", "run/converted/*", "run/healed/*", "run/run.json"),
        mended="run recipe.yaml -o run --overwrite",
    ),
    "publish": Command(
        f"publish narrow me/model {_PUBLISH}",
        makes=(),
        reads=("narrow",),
        source="narrow",
        hashed=True,
        on_hub=True,
        damaged=("narrow/*",),
    ),
}
