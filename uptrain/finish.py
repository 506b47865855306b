"""The healed checkpoint: the one that came in, with the trained tensors in the places of theirs.

Form, dtype, sharding, side files and every frozen byte stay as they were. What came in as a stock latent export was
trained in the plain form, and is exported anew as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.errors import UserError
from ..common.parallel import Workers
from ..common.progress import Stages
from ..convert.checks import account
from ..convert.directory import lay_out, write_directory
from ..convert.families import Sizes
from ..convert.headers import FLOATS, main_dtype
from ..convert.latent_families import DEEPSEEK
from ..convert.latent_form import BLOCK, LARGE_EPS, Form
from ..convert.mla.convert import convert_mla
from ..convert.plain import convert_plain
from ..convert.source import Source, open_source
from ..convert.stream import Output
from .recipe import Recipe

PLAIN = "plain"  # of a stock export, in the folder of the run
_TRAINED = "trained"
_EXACT = "F32"  # of what is between training and export, so that nothing is rounded twice


@contextmanager
def trainable(
    model: str, revision: str | None, folder: Path, *, workers: Workers, progress: Stages
) -> Iterator[Source]:
    """Open what is to be trained: the checkpoint itself, or the plain form of a stock latent export.

    Args:
        model: a directory, a GGUF file or a Hub id.
        folder: of the run, where the plain form is kept.
        workers: all processes of the run, of which the first makes it.

    Raises:
        UserError: it cannot be read, or turned back.
        EnvironmentFailure: the Hub cannot be reached, or the disk is full.
    """
    with open_source(model, revision=revision) as source:
        if source.config.model_type != DEEPSEEK.name:
            yield source
            return
        check_export(source)
        plain = folder / f"{PLAIN}-{source.digest()[:16]}"  # of this export, whatever the folder was used for before
    if workers.rank == 0 and not plain.exists():
        convert_plain(model, plain, revision=revision, progress=progress)
    workers.wait()
    with open_source(str(plain)) as source:
        yield source


def check_export(source: Source) -> None:
    """Refuse a stock latent model that cannot be trained in the plain form and exported again.

    Raises:
        UserError: it is no export of kvfold, or its queries were compressed, which would lose some once more.
    """
    form, exact = Form.read(source.config.raw), source.config.hidden_size
    if form.query_rank not in (None, exact, exact + 1):
        raise UserError(
            f"{source.name} has compressed queries, of which an export after training would lose more; convert it to "
            "the plain form with kvfold convert plain, train that, and export it with --q-rank"
        )


def write_result(
    recipe: Recipe,
    source: Source,
    state: Mapping[str, Tensor],
    trained: Collection[str],
    *,
    record: dict[str, Any],
    progress: Stages,
) -> None:
    """Write the healed checkpoint; it appears whole or not at all. For the main process alone.

    Args:
        recipe: of the run.
        source: what was trained, see `trainable`.
        state: the model's tensors by their names in memory.
        trained: names of those that were trained.
        record: how, for `kvfold.json`.

    Raises:
        UserError: a trained tensor has no place in the source, or overflows its dtype, or `out` may not be written.
        EnvironmentFailure: no room on the disk.
    """
    writing = partial(_write, source, state, trained, record=record, progress=progress)
    out = Path(recipe.out)
    if source.name == recipe.model:
        writing(out, overwrite=recipe.overwrite)
        return
    kept = recipe.run_folder / _TRAINED
    writing(kept, overwrite=True, dtype=_EXACT)
    with open_source(recipe.model, revision=recipe.revision) as stock:
        form, dtype = Form.read(stock.config.raw), main_dtype(stock.checkpoint.tensors.values())
        convert_mla(
            kept,
            out,
            readers=stock.config.raw[BLOCK]["readers"],
            pad_to_engine=form.stock != form.plain,
            large_eps=form.eps == LARGE_EPS.eps,
            dtype=None if dtype == _EXACT else FLOATS[dtype],
            overwrite=recipe.overwrite,
            progress=progress,
        )


def _write(
    source: Source,
    state: Mapping[str, Tensor],
    trained: Collection[str],
    out: Path,
    *,
    record: dict[str, Any],
    overwrite: bool,
    progress: Stages,
    dtype: str | None = None,
) -> None:
    replaced = stored_tensors(source, state, trained)
    outputs = []
    for name, info in source.checkpoint.tensors.items():
        output = Output(name, dtype if dtype and info.dtype in FLOATS else info.dtype, info.shape, (info,))
        if name in replaced:
            output = replace(output, make=partial(_take, replaced[name]))
        outputs.append(output)
    with progress("writing") as advance:
        write_directory(
            source,
            out,
            lay_out(source, outputs, None),
            config=dict(source.config.raw),  # of the dtype that it says, the result is exported in the end
            recipe=record,
            dropped=[],
            overwrite=overwrite,
            hashing=True,
            progress=advance,
        )


def _take(tensor: Tensor, _: list[Tensor]) -> Tensor:
    return tensor.detach().cpu()


def stored_tensors(source: Source, state: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, Tensor]:
    """Trained tensors by the names that the source has for them: fused experts apart, a tied head with its embedding.

    Raises:
        UserError: the source has no place for one.
    """
    family, sizes = source.family, Sizes(source.config)
    promised = account(family, source.config, source.checkpoint.tensors)
    changed = {state[name].data_ptr() for name in trained} - {0}
    names = {name for name in state if name in trained or state[name].data_ptr() in changed}
    replaced, used = {}, set()
    for stored, promise in promised.items():
        name = promise.weight.template.format(**promise.slots)
        if name in names:
            replaced[stored] = state[name]
            used.add(name)
    parts = {promise.weight.template.format(**promise.slots): stored for stored, promise in promised.items()}
    for name in names - used:
        number, _, end = name.removeprefix(family.layers).partition(".")
        if not (templates := family.in_memory.get(end)):
            if name not in trained:  # a tied head that the source does not store
                continue
            raise UserError(f"{source.name} has no tensor for the trained {name}; train=attention does not touch it")
        prefix, tensor = f"{family.layers}{number}.", state[name]
        experts = range(sizes["E"]) if "{expert}" in templates[0] else [None]
        for expert in experts:
            rows = tensor if expert is None else tensor[expert]
            stored = [parts[prefix + template.format(expert=expert)] for template in templates]
            lengths = [source.checkpoint.tensors[one].shape[0] for one in stored]
            replaced |= dict(zip(stored, torch.split(rows, lengths), strict=True))
    return replaced
