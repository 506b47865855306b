"""Every command of the README is run as it stands, in order, in one folder; its make targets are a lane's."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold.common.text import builtin_documents
from kvfold.recipes.tiny import MODEL_DIR

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
JUDGING = (ROOT / "docs" / "judging.md").read_text()
TEST_COMMAND = "make test"


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def workplace(tmp_path):
    """A folder with what the README says the reader has: a model, a text and a task, which a document shows."""
    shutil.copytree(MODEL_DIR, tmp_path / "my-model")
    (tmp_path / "my-text.txt").write_text("\n\n".join(builtin_documents(held_out=True, kinds=["topics"]))[:20_000])
    (tmp_path / "my-task.yaml").write_text(*blocks("yaml", JUDGING))
    (tmp_path / "my-task.jsonl").write_text(*blocks("json", JUDGING))
    return tmp_path


def environment():
    """The reader's shell after `. .venv/bin/activate`: this interpreter's commands come first.

    One thread, as other tests run beside, and two that share a core wait for each other.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def run(command, folder):
    result = subprocess.run(["bash", "-ec", command], cwd=folder, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_commands_and_code(workplace):
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert TEST_COMMAND in commands
    for command in commands:
        if not command.startswith("make "):
            assert run(command, workplace).strip(), command
    (code,) = blocks("python")
    (workplace / "use.py").write_text(code)
    said = run(f"{sys.executable} use.py", workplace)
    assert len(said) > len("The import statement")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
