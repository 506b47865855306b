"""Will an engine read this checkpoint, and if not, what to change: from config and headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..common.raw_config import read_raw_config
from ..common.sources import one_line_errors, quiet, source_kind
from .checkpoint import Checkpoint
from .demands import (
    Violation,
    architecture_of,
    cached,
    check_engine,
    checked,
    form_of,
    read_from,
    source_elements,
    unpadded,
    violations,
)
from .headers import TensorInfo
from .latent_form import BLOCK


@dataclass(frozen=True)
class CheckReport:
    """What an engine will say to a checkpoint.

    Attributes:
        model: what was checked.
        engine: by whose demands.
        read_from: the release whose sources they were read from.
        architecture: the class that config.json names.
        checked: how much it means that it passed: of what is not MLA, little is known that an engine demands.
        kv_elements_per_token_per_layer: what an MLA checkpoint caches; None for other architectures, as for the rest.
        unpadded_kv_elements_per_token_per_layer: what it would without padding to an engine's shape.
        source_kv_elements_per_token_per_layer: what the model that it was made from caches.
        passed: whether no demand refuses it; warnings do not.
        reason: why it has not.
        violations: refusals, then warnings.
    """

    model: str
    engine: str
    read_from: str
    architecture: str | None
    checked: str
    kv_elements_per_token_per_layer: int | None
    unpadded_kv_elements_per_token_per_layer: int | None
    source_kv_elements_per_token_per_layer: int | None
    passed: bool
    reason: str
    violations: list[Violation]


def check(out: str | Path, *, engine: str, revision: str | None = None) -> CheckReport:
    """Hold a checkpoint against an engine's demands; no weight is read, and the engine need not be installed.

    Args:
        out: a checkpoint directory, or a Hub id (whose headers are fetched by range requests).
        engine: one of `demands.ENGINES`.
        revision: of a Hub repository.

    Raises:
        UserError: nothing is there, it is not a checkpoint, or there is no such engine.
        EnvironmentFailure: the Hub cannot be reached.
    """
    check_engine(engine)
    config, tensors = _read(str(out), revision)
    found = violations(config, tensors, engine)
    refusals = [violation for violation in found if violation.severity == "refuse"]
    more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
    latent = config if form_of(config, engine) in ("deepseek_v3", "plain") else {}
    return CheckReport(
        model=str(out),
        engine=engine,
        read_from=read_from(engine),
        architecture=architecture_of(config),
        checked=checked(config, engine),
        kv_elements_per_token_per_layer=cached(latent),
        unpadded_kv_elements_per_token_per_layer=cached(unpadded(latent)),
        source_kv_elements_per_token_per_layer=source_elements(latent),
        passed=not refusals,
        reason=f"{engine} would not read {out} right: {refusals[0].wrong}{more}" if refusals else "",
        violations=found,
    )


def _read(out: str, revision: str | None) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """config.json as it stands, and every tensor by name."""
    kind = source_kind(out, revision)
    if kind == "folder":
        return read_raw_config(Path(out)), Checkpoint.open(Path(out)).tensors
    if kind == "gguf":
        raise UserError(f"{out} is a GGUF file; check the directory that it was made from, with --engine llama.cpp")
    from huggingface_hub import HfApi, hf_hub_download

    with one_line_errors(out), quiet():
        folder = Path(hf_hub_download(out, "config.json", revision=revision)).parent
        remote = HfApi().get_safetensors_metadata(out, revision=revision)
    return read_raw_config(folder), {
        name: TensorInfo(name, row.dtype, tuple(row.shape), shard, *row.data_offsets)
        for shard, file in remote.files_metadata.items()
        for name, row in file.tensors.items()
    }


def check_readable(folder: str | Path, config: Any) -> None:
    """Refuse an export that was made for other readers: transformers would run it, and be wrong.

    Args:
        folder: the checkpoint; anything but a directory passes.
        config: its transformers config.

    Raises:
        UserError: names what is in the way.
    """
    if isinstance(getattr(config, BLOCK, None), Mapping) and form_of(config.to_dict(), "transformers") != "plain":
        if not Path(folder).is_dir():
            return
        report = check(folder, engine="transformers")
        if not report.passed:
            raise UserError(
                f"{report.reason}; judge an export for transformers, or what kvfold convert plain makes of this one"
            )
