"""Stock latent form -> plain form: an export of `convert mla --form deepseek_v3`, ready for training again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..common.errors import UserError
from ..common.parallel import is_main_process
from ..common.progress import Stages, silent
from .checks import account
from .directory import check_paths, lay_out, write_directory, written_figures
from .families import FAMILIES
from .latent_families import DEEPSEEK, PREFIX
from .latent_form import Form
from .request import asked_for, check_writing
from .source import Source, open_source

RECIPE = "convert plain"


@dataclass(frozen=True)
class PlainReport:
    """What was turned back, or would be.

    `kv_elements_per_token_per_layer` is of the result, the `source_` one of the export, padding included. `bytes`
    counts the weights.
    """

    model: str
    source: str
    family: str
    kv_lora_rank: int
    qk_rope_head_dim: int
    source_kv_elements_per_token_per_layer: int
    kv_elements_per_token_per_layer: int
    dtype: str
    shards: int
    bytes: int
    tensors_computed: int
    tensors_copied: int
    tensors_dropped: list[str]
    files_left_out: list[str]
    dry_run: bool


def convert_plain(
    src: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    hash: bool = True,
    revision: str | None = None,
    progress: Stages = silent,
) -> PlainReport:
    """Turn an export in stock form back into the plain model it was made from: the exact inverse, to rounding.

    Args:
        src: a checkpoint directory, or a Hub id.
        out: the directory to create; it appears whole or not at all.
        dtype: of the result's tensors; what the plain model had if None.
        max_shard_size: bytes a shard; the source's own sharding if None.
        overwrite: replace an existing checkpoint at `out`.
        dry_run: check and plan everything, write nothing.
        hash: record an xxh3 hash of every file written.
        revision: of a Hub repository.
        progress: opens a progress for each stage.

    Raises:
        UserError: the source is not an export of kvfold, or `out` may not be written. Nothing was written.
        EnvironmentFailure: no room on the disk, or the Hub cannot be reached.
    """
    asked_of_user = asked_for(convert_plain, locals())
    check_paths(str(src), str(out), overwrite=overwrite)
    src, out = str(src), Path(out)
    check_writing(dtype, max_shard_size)
    with open_source(src, revision=revision) as source:
        form = _form(source)
        promised = account(source.family, source.config, source.checkpoint.tensors)
        from .mla.inverse import invert

        plain = invert(source.config.raw, source.checkpoint.tensors, dtype=dtype)
        layout = lay_out(source, plain.outputs, max_shard_size)
        dropped = [name for name, promise in promised.items() if promise.weight.rule == "drop"]
        report = PlainReport(
            model=str(out),
            source=source.name,
            family=plain.family.name,
            kv_lora_rank=form.plain.rank,
            qk_rope_head_dim=form.plain.rope,
            source_kv_elements_per_token_per_layer=form.stock.rank + form.stock.rope,
            kv_elements_per_token_per_layer=form.plain.rank + form.plain.rope,
            **written_figures(source, plain.outputs, max_shard_size),
            tensors_computed=sum(output.make is not None for output in plain.outputs),
            tensors_dropped=dropped,
            files_left_out=[],
            dry_run=dry_run,
        )
        if dry_run or not is_main_process():
            return report
        with progress("writing") as advance:
            left_out = write_directory(
                source,
                out,
                layout,
                config=plain.config,
                recipe={"command": RECIPE, "dtype": dtype, "max_shard_size": max_shard_size},
                dropped=dropped,
                overwrite=overwrite,
                hashing=hash,
                progress=advance,
                asked=asked_of_user,
            )
    return replace(report, files_left_out=left_out)


def _form(source: Source) -> Form:
    """How the source was exported.

    Raises:
        UserError: it was not.
    """
    kind = source.config.model_type
    if kind.startswith(PREFIX):
        raise UserError(f"{source.name} is in the plain form already")
    if kind != DEEPSEEK.name:
        hint = "; kvfold convert mla makes it one" if kind in FAMILIES else ""
        raise UserError(f"{source.name} is a {kind} model, not an export in stock MLA form{hint}")
    return Form.read(source.config.raw)
