"""Every command of the documents, as it stands there, on the embedded model; the README's are a test of their own.

What a machine without GPUs cannot do, or not in a lifetime, is made smaller by the table below, and nothing else is.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold.convert.gqa import convert_gqa
from kvfold.convert.mla.convert import convert_mla
from kvfold.recipes.pipeline.catalogue import recipe_names
from kvfold.recipes.tiny import MODEL_DIR

from ..hub import environment, hub_server
from ..test_readme import JUDGING, TEST_COMMAND, blocks
from ..test_readme import run as shell

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
COMMAND = re.compile(r"^    ((?:kvfold|accelerate|torchrun) .*?)(?:   *#.*)?$", re.MULTILINE)
# What stands in the documents, and what is run in its place.
SMALLER = {
    "ME/": "me/",
    " OUT ": " my-mla ",
    "--refine 64": "--refine 2",
    "tokens: 1_000_000_000": "tokens: 4096\nwindow: 64",
    "batch_size: 128": "batch_size: 8",
    "recipe.yaml tokens=2e9": "recipe.yaml tokens=8192 out=other",
    "recipe.yaml --accelerate fsdp2 --num-processes 8": "recipe.yaml out=sharded --accelerate fsdp2 --num-processes 2",
    "--num_processes 8 -m kvfold.cli": "--num_processes 2 -m kvfold.cli",
}
# Commands for GPUs alone: that what they name is there is all that can be known here.
ON_GPUS = {"accelerate launch --config_file recipes/accelerate/fsdp2.yaml --num_processes 8 -m kvfold.uptrain"}


@pytest.fixture
def workplace(tmp_path):
    shutil.copytree(MODEL_DIR, tmp_path / "my-model")
    text = "\n\n".join(f"Sentence {number} of a text that a reader has." for number in range(900))
    (tmp_path / "my-text.txt").write_text(text)
    (tmp_path / "my-text.jsonl").write_text('{"text": "' + text[:9000].replace("\n", " ") + '"}\n')
    (tmp_path / "my-task.yaml").write_text(*blocks("yaml", JUDGING))
    (tmp_path / "my-task.jsonl").write_text(*blocks("json", JUDGING))
    convert_gqa(tmp_path / "my-model", tmp_path / "my-gqa", kv_heads=2, method="mean")
    sizes = {"kv_rank": 104, "rope_dim": 24, "rope_select": "high"}
    padded = {"readers": ["vllm"], "pad_to_engine": True}
    convert_mla(tmp_path / "my-model", tmp_path / "my-mla", calib=["none"], **sizes, **padded)
    convert_mla(tmp_path / "my-model", tmp_path / "my-plain", calib=["none"], form="plain", **sizes)
    return tmp_path


def smaller(text):
    for wish, need in SMALLER.items():
        text = text.replace(wish, need)
    return text


def run(line, folder, env):
    words = shlex.split(line)
    if words[:2] == ["kvfold", "convert"]:  # a page may show how what the workplace begins with is made
        shutil.rmtree(folder / words[4], ignore_errors=True)
    result = subprocess.run(["bash", "-ec", line], cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, f"{line}\n{result.stderr}"
    assert result.stdout.strip(), line


def commands(page):
    return [match[1].strip() for match in COMMAND.finditer(page)]


def reader(hub, home):
    """The environment of a reader after `. .venv/bin/activate`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**environment(hub, home), "PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if commands(page)])
def test_every_command_of_a_page(name, workplace):
    page = PAGES[name]
    for text in blocks("yaml", page)[:1]:
        (workplace / "recipe.yaml").write_text(smaller(text))
    with hub_server() as hub:
        env = reader(hub, workplace / "home")
        for line in commands(smaller(page)):
            if any(line.startswith(start) for start in ON_GPUS):
                assert (ROOT / line.split()[3]).is_file()
                continue
            run(line, workplace, env)


@pytest.mark.parametrize("name", recipe_names())
def test_the_launch_commands_of_a_recipe(name, workplace):
    """What stands in its head; of models that are not here the commands are parsed, and say what they would do."""
    head = (ROOT / f"recipes/models/{name}.yaml").read_text().partition("\nsource:")[0]
    lines = [line.lstrip("# ").strip() for line in head.splitlines() if re.match(r"#   +kvfold run ", line)]
    assert lines
    with hub_server() as hub:
        for line in lines:
            elsewhere = "" if name.startswith("embedded") else " source.model=embedded"
            run(f"{smaller(line)}{elsewhere} --dry-run", workplace, reader(hub, workplace / "home"))


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_targets(tmp_path):
    """`make demo` runs on the environment at hand: setting up another is what CI does before this test."""
    targets = [c for block in blocks("bash") for c in block.splitlines() if c.startswith("make ") and c != TEST_COMMAND]
    assert targets == ["make demo"]
    stamp = f"{sys.prefix}/.kvfold-installed"
    said = shell(f"{targets[0]} --old-file={stamp} VENV={sys.prefix}", ROOT)
    assert "perplexity" in said
    shown = blocks("text")[0].splitlines()  # figures move with the Python version, headings and names do not
    printed = [line.rstrip() for line in said.splitlines()]
    assert shown[0] in printed
    assert [line.split()[0] for line in shown] == [
        line.split()[0] for line in printed[printed.index(shown[0]) :][: len(shown)]
    ]
