"""What is released: both archives build and say one version, and the wheel passes the demo in a venv of its own."""

import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from kvfold import __version__

from ..test_package import copy_tracked

ROOT = Path(__file__).parents[2]
TORCH = os.environ.get("TORCH", "torch==2.13.0")  # as the Makefile has it


def call(*command, cwd):
    result = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """The source archive, and the wheel that is built of it."""
    folder = tmp_path_factory.mktemp("release")
    copy_tracked(folder / "source")
    call(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "source", cwd=folder)
    (source,), (wheel,) = (list((folder / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    return source, wheel


def test_both_say_the_version_that_the_changelog_begins_with(archives):
    source, wheel = archives
    assert source.name == f"kvfold-{__version__}.tar.gz"
    assert wheel.name == f"kvfold-{__version__}-py3-none-any.whl"
    first = re.search(r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first and first[1] == __version__


def test_the_index_would_take_them(archives):
    call(sys.executable, "-m", "twine", "check", "--strict", *archives, cwd=ROOT)


def test_the_source_archive_holds_what_a_packager_needs(archives):
    with tarfile.open(archives[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "docs/recipes.md", "tests/test_readme.py"):
        assert name in names


def test_the_wheel_passes_the_demo_in_an_environment_of_its_own(archives, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    for what in (TORCH, archives[1]):
        call(python, "-m", "pip", "install", "--quiet", what, cwd=tmp_path)
    where = call(python, "-c", "import kvfold; print(kvfold.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    assert __version__ in call(tmp_path / "venv/bin/kvfold", "--version", cwd=tmp_path)
    said = call(tmp_path / "venv/bin/kvfold", "demo", "--out", tmp_path / "shown", cwd=tmp_path)
    assert "svd --refine 32" in said
    assert (tmp_path / "shown").is_dir()
