"""Checkpoints of a run: all that the next step needs, whole or not there.

A checkpoint is a folder `step-00000120` with what accelerate saves for the kind of training at hand, and a marker that
is written last: the step, what the run is made of, and a hash of every file. Frozen weights are not saved, since the
run's model still has them; random draws and the order of the data are functions of the step (see `loop`), and the
learning rate too.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..common.atomic import output_directory, real_path, siblings
from ..common.errors import EnvironmentFailure, UserError
from ..common.typed import quoted
from ..convert.sidefiles import hash_files, is_there
from .tables import check_tables

MARKER = "kvfold_state.json"
FORMAT_VERSION = 2
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
_KINDS = {"whole": "not sharded", "fsdp": "sharded by FSDP", "deepspeed": "sharded by DeepSpeed"}
_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}\d{{8}}")  # what else lies there is the user's
_DAMAGED = ".damaged"

HASHED = ("model", "teacher", "data")  # of an identity, known by what they hold

Say = Callable[[str], None]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole.

    Attributes:
        folder: where it lies.
        step: how many steps it has behind it.
        identity: what its run was made of, see `recipe.Recipe.identity`.
    """

    folder: Path
    step: int
    identity: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they lie; created at the first.
        identity: what the run is made of: a checkpoint of anything else is refused.
        trained: names of the parameters that are trained; others are not saved where that is possible.
        keep: how many of the last ones stay.
    """

    def __init__(
        self, folder: Path, identity: dict[str, Any], accelerator: Accelerator, trained: Collection[str], keep: int
    ):
        self.folder, self.accelerator, self.keep = folder, accelerator, keep
        self.identity = json.loads(json.dumps(identity))  # as it is read back
        self._partial = accelerator.distributed_type not in SHARDED
        self._kind = "whole" if self._partial else accelerator.distributed_type.value.lower()  # of the files
        trained = frozenset(trained)

        def leave_frozen_out(models: list[Any], weights: list[dict[str, Any]], folder: str) -> None:
            for state in weights:
                for name in [name for name in state if name.removeprefix("module.") not in trained]:
                    del state[name]

        accelerator.register_save_state_pre_hook(leave_frozen_out)

    def save(self, step: int) -> None:
        """Save the training as it is after `step` steps; older checkpoints go, but for the last ones.

        Raises:
            OSError: the disk failed; the earlier checkpoints are still there.
        """
        out = self.folder / _name(step)
        if out.exists():
            return
        accelerator = self.accelerator
        with _written_by_main(out, accelerator.is_main_process) as staging:
            accelerator.wait_for_everyone()
            accelerator.save_state(str(staging))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                names = sorted(str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file())
                marker = {
                    "format_version": FORMAT_VERSION,
                    "step": step,
                    "processes": accelerator.num_processes,
                    "kind": self._kind,
                    "identity": self.identity,
                    "files": hash_files(staging, names, hashing=True),
                }
                (staging / MARKER).write_text(json.dumps(marker | {"hash": _hash(marker)}, indent=2) + "\n")
        if accelerator.is_main_process:
            for old in _folders(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()

    def latest(self, say: Say) -> Saved | None:
        """The last checkpoint that is whole, if there is any; damaged ones are named and put aside.

        The main process looks for all: it reads every byte, and may rename.

        Raises:
            UserError: it is of another run, of another number of processes or kind of sharding, or has lost its
                optimizer.
            EnvironmentFailure: another process does not see it.
        """
        found: list[Saved | UserError | None] = [None]
        if self.accelerator.is_main_process:
            try:
                found = [self._latest(say)]
            except UserError as error:  # or the others would wait for an answer
                found = [error]
        (answer,) = broadcast_object_list(found)
        if isinstance(answer, UserError):
            raise answer
        sees = torch.tensor(int(answer is None or answer.folder.is_dir()), device=self.accelerator.device)
        if answer and int(self.accelerator.reduce(sees, "sum")) < self.accelerator.num_processes:
            raise EnvironmentFailure(f"not all processes see {answer.folder}; give them a run_dir on a disk they share")
        return answer

    def _latest(self, say: Say) -> Saved | None:
        for folder in reversed(_folders(self.folder)):
            marker, trouble = _read(folder)
            if trouble:
                say(f"{folder} is damaged ({trouble}); an earlier checkpoint is used")
                aside = folder.with_name(folder.name + _DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)  # the step may have been damaged before
                folder.rename(aside)
                continue
            self._check(folder, marker)
            return Saved(folder, marker["step"], marker["identity"])
        return None

    def restore(self, saved: Saved) -> None:
        """Load a checkpoint into what accelerate has prepared."""
        self.accelerator.load_state(str(saved.folder), **({"strict": False} if self._partial else {}))

    def _check(self, folder: Path, marker: dict[str, Any]) -> None:
        compare(folder, marker["identity"], self.identity)
        if marker["processes"] != (now := self.accelerator.num_processes):
            raise UserError(
                f"{folder} was saved by {marker['processes']} processes and there are {now} now; launch as many again"
            )
        if marker["kind"] != self._kind:
            raise UserError(
                f"{folder} was saved by a run that is {_KINDS[marker['kind']]}, and this one is {_KINDS[self._kind]}; "
                "launch it with the same accelerate config"
            )
        check_tables(folder)


def load_weights(trainee: nn.Module, folder: Path, names: Sequence[str]) -> None:
    """Take the trained weights of another run's checkpoint, and nothing else of it.

    Raises:
        UserError: it has no such weights, or other parameters were trained.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise UserError(f"init_from {folder} has no {path.name}; give a checkpoint of a run that was not sharded")
    try:
        weights = {name.removeprefix("module."): tensor for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise UserError(f"init_from {folder} is damaged ({error}); give a checkpoint that is whole") from None
    if missing := [name for name in names if name not in weights] or sorted(weights.keys() - set(names)):
        raise UserError(f"init_from {folder} was trained with other parameters, such as {missing[0]}; use its recipe")
    with torch.no_grad():
        for name in names:
            parameter = trainee.get_parameter(name)
            if parameter.shape != weights[name].shape:
                raise UserError(
                    f"init_from {folder} holds {name} as {list(weights[name].shape)}, the model as "
                    f"{list(parameter.shape)}; it is of another model"
                )
            parameter.copy_(weights[name])


def check_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    """Refuse a recipe that the last checkpoint in `folder` is not of, before anything is read or loaded.

    Args:
        recipe: what the recipe itself says of `Checkpoints.identity`; what is not in it is not compared.

    Raises:
        UserError: it is of another recipe; the message names the keys that differ.
    """
    for saved in reversed(_folders(folder)):
        try:
            theirs = json.loads((saved / MARKER).read_bytes())["identity"]
            theirs = {key: theirs[key] for key in recipe}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # `latest` says what is wrong with it
            continue
        compare(saved, theirs, json.loads(json.dumps(recipe)))
        return


def compare(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuse a checkpoint of another recipe.

    Raises:
        UserError: so it is.
    """
    changed = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
    if not changed:
        return
    key = changed[0]
    how = "is another" if key in HASHED else f"was {quoted(theirs.get(key))} and is {quoted(ours.get(key))}"
    also = f" (and {', '.join(changed[1:])})" if changed[1:] else ""
    raise UserError(
        f"{folder} is of another recipe: {key} {how}{also}; take the recipe back, or choose another run_dir (and "
        f"init_from={folder} to begin with its weights)"
    )


def _read(folder: Path) -> tuple[dict[str, Any], str]:
    """A checkpoint's marker, and what is wrong with the checkpoint.

    Raises:
        UserError: its optimizer was removed: not an accident of a disk, and not to be passed over.
    """
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        version, said = marker["format_version"], marker.pop("hash", None)
        own = _hash(marker)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, f"its {MARKER} cannot be read"
    if version != FORMAT_VERSION:
        raise UserError(
            f"{folder} has format {quoted(version)}, which this kvfold does not know; choose another run_dir"
        )
    if said != own:
        return {}, f"its {MARKER} has changed"
    if not _is_ours(marker):
        return {}, f"its {MARKER} says what no run does"
    files, step = marker["files"], marker["step"]
    if folder.name != _name(step):
        return {}, f"it is that of step {step}"
    if gone := [name for name in files if not is_there(folder / name)]:
        if any("optim" in name for name in gone):
            raise UserError(
                f"{folder} has no optimizer state ({gone[0]} is missing), so step {step} cannot be gone on from; "
                f"start anew from its weights with init_from={folder} and another run_dir"
            )
        return marker, f"{gone[0]} is missing"
    found = hash_files(folder, files, hashing=True)
    broken = [name for name in files if found.get(name) != files[name]]
    return marker, f"{broken[0]} has changed" if broken else ""


def _is_ours(marker: dict[str, Any]) -> bool:
    """Whether a marker holds what `Checkpoints.save` writes, by its types."""
    types = {"step": int, "processes": int, "kind": str, "identity": dict, "files": dict}
    if any(type(marker.get(name)) is not of for name, of in types.items()):
        return False
    return marker["kind"] in _KINDS and all(isinstance(digest, str) for digest in marker["files"].values())


@contextmanager
def _written_by_main(out: Path, is_main: bool) -> Iterator[Path]:
    """A folder that all processes write into, and that the main one creates and, at the end, puts in its place."""
    if is_main:
        with output_directory(out) as staging:
            yield staging
    else:
        yield siblings(real_path(out))[0]


def _folders(folder: Path) -> list[Path]:
    """All checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name) and path.is_dir())


def _name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def _hash(marker: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()


def clear(folder: Path) -> None:
    """Remove what writers that were killed left behind; only while nobody else can be writing."""
    for path in folder.glob(f".{_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
