"""What ships: every folder, and nothing that was not meant to."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ["common", "attention", "convert", "uptrain", "eval", "publish", "recipes", "cli"]


def copy_tracked(folder):
    """The checkout as git knows it: setuptools leaves a build folder behind, from which stale modules would ship."""
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    copy_tracked(folder / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    command = [*pip, "--wheel-dir", folder, folder / "source"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def sources():
    return [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] in FLOORS]


def test_wheel_holds_every_module(wheel):
    for path in sources():
        assert f"kvfold/{path.relative_to(ROOT).as_posix()}" in wheel


def test_wheel_holds_model_and_marker_but_no_tests(wheel):
    assert {"kvfold/py.typed", "kvfold/recipes/tiny/model/config.json"} <= wheel
    assert "kvfold/recipes/tiny/model/model.safetensors" in wheel
    assert {"kvfold/eval/report/page.css", "kvfold/eval/report/page.html.j2"} <= wheel
    assert not [name for name in wheel if "tests" in name or name.endswith("setup.py")]


def test_root_holds_one_module():
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down_and_are_relative(path):
    """cli -> recipes -> publish -> eval -> uptrain -> convert -> attention -> common."""
    floor = FLOORS.index(path.relative_to(ROOT).parts[0])
    depth = len(path.relative_to(ROOT).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(name.name.split(".")[0] == "kvfold" for name in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level or (node.module or "").split(".")[0] != "kvfold"
            if node.level == depth and node.module:
                assert FLOORS.index(node.module.split(".")[0]) <= floor, f"{path} imports {node.module}"
