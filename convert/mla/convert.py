"""MHA or GQA -> MLA: the plain form of a source, refined if asked for, and exported to the stock form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import UserError, did_you_mean
from ...common.parallel import is_main_process
from ...common.progress import Stages, silent
from ...common.text import NO_TEXT
from ..calibration.reader import tensor_reader
from ..calibration.text import CalibText
from ..checks import account, check_latent
from ..demands import check_engine
from ..directory import check_paths, lay_out, write_directory
from ..families import Promise, Sizes
from ..latent_families import KNOWN, PREFIX
from ..request import Request, asked_for, doubts, rehearse, request, said_of
from ..rotary import rotary_of
from ..source import Source, open_source
from ..stream import Output
from .budget import Choice, Room, choices
from .report import FIRST_OF_MANY, SHORT_TEXT, WEIGHTS_ONLY, MlaReport, report_of
from .rotation import SELECTS

if TYPE_CHECKING:
    from ..calibration.store import Statistics
    from .layers import LayerFactors
    from .stock import PlainModel, Stock

FORMS = ("deepseek_v3", "plain")
# Of refinement. A latent starts nearer to the source than merged heads do, in directions that the loss minds least.
# What brings the state after attention nearer still, at the rate of heads, is undone by the MLP behind it: docs/mla.md.
REFINING = {"passes": 1, "learning_rate": 4e-4, "through_mlp": True}
# How a model is run, which decides no number: of no consequence where none is run.
_HOW_TO_RUN = ("calib_batch_size", "device", "offload")


def convert_mla(
    src: str | Path,
    out: str | Path,
    *,
    kv_rank: int | None = None,
    rope_dim: int | None = None,
    kv_elements: int | None = None,
    kv_ratio: float | None = None,
    rope_select: str = "auto",
    search_windows: int = 16,
    q_rank: int | None = None,
    form: str = "deepseek_v3",
    readers: Sequence[str] = ("transformers",),
    pad_to_engine: bool = False,
    large_eps: bool | None = None,
    calib: Sequence[str] = (),
    calib_windows: int = CalibText.windows,
    calib_window: int | None = None,
    calib_builtin: bool = True,
    chat: bool = False,
    fisher: bool = True,
    offload: bool = False,
    stats: str | Path | None = None,
    refine: int = 0,
    refine_passes: int | None = None,
    device: str = "auto",
    calib_dtype: str = "auto",
    calib_batch_size: int = 1,
    dtype: str | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    hash: bool = True,
    revision: str | None = None,
    progress: Stages = silent,
) -> MlaReport:
    """Convert a checkpoint to multi-head latent attention, which caches `kv_rank + rope_dim` numbers a token and layer.

    Args:
        src: a checkpoint directory, a GGUF file, or a Hub id; one in the plain form is exported as it is.
        out: the directory to create; it appears whole or not at all.
        kv_rank, rope_dim, kv_elements, kv_ratio: see `budget.choices`.
        rope_select: which frequencies keep their rotation, one of `rotation.SELECTS`; or `auto`: whatever loses least.
        search_windows: windows of text, not calibrated on, to choose on where several choices fit.
        q_rank: rank of the queries, for a smaller model; they stay as they are if None.
        form: one of `FORMS`: stock DeepSeek-V3, or kvfold's own class for training.
        readers: engines that must read the stock form right, of `demands.ENGINES`.
        pad_to_engine: with zeros to a shape that serving kernels take.
        large_eps: see `stock.export`.
        calib, calib_windows, calib_window, calib_builtin, chat: the text, see `calibration.text.CalibText`. `("none",)`
            factors by weights alone.
        fisher, offload, calib_dtype, calib_batch_size, device: see `calibration.knobs.Calibration`.
        stats: a file of `calibrate` to use; one in the cache if None, made at the first conversion.
        refine, refine_passes: windows of text to refine on, and passes over them (1); see `refine.refine_layers`.
        dtype: of the result's floating-point tensors; the source's own if None.
        max_shard_size: bytes a shard; the source's own sharding if None.
        overwrite: replace an existing checkpoint at `out`.
        dry_run: check and plan everything, write nothing.
        hash: record an xxh3 hash of every file written.
        revision: of a Hub repository.
        progress: opens a progress for each stage.

    Raises:
        UserError: the source cannot be converted, the form cannot hold it, or `out` may not be written. Nothing was
            written.
        EnvironmentFailure: no room on the disk, or the Hub cannot be reached.
    """
    asked_of_user = asked_for(convert_mla, locals())
    check_paths(str(src), str(out), overwrite=overwrite)
    src, out = str(src), Path(out)
    if form not in FORMS:
        raise UserError(f"unknown form {form!r}{did_you_mean(form, FORMS)}")
    if rope_select not in (allowed := ("auto", *SELECTS)):
        raise UserError(f"unknown rotary selection {rope_select!r}{did_you_mean(rope_select, allowed)}")
    for reader in readers:
        check_engine(reader)
    if form == "plain" and (pad_to_engine or q_rank or tuple(readers) != ("transformers",)):
        raise UserError(
            "the plain form is read by kvfold alone, as it is; leave --for, --pad-to-engine and --q-rank out"
        )
    if search_windows < 1:
        raise UserError(f"{search_windows} windows tell no choices apart; give 1 or more, or say all sizes")
    sizes: dict[str, Any] = {
        "kv_rank": kv_rank,
        "rope_dim": rope_dim,
        "kv_elements": kv_elements,
        "kv_ratio": kv_ratio,
        "rope_select": rope_select,
    }
    learning: dict[str, Any] = {
        "calib": calib,
        "calib_windows": calib_windows,
        "calib_window": calib_window,
        "calib_builtin": calib_builtin,
        "chat": chat,
        "fisher": fisher,
        "offload": offload,
        "stats": stats,
        "refine": refine,
        "refine_passes": refine_passes,
        "device": device,
        "calib_dtype": calib_dtype,
        "calib_batch_size": calib_batch_size,
    }
    asked = request(
        **learning,
        dtype=dtype,
        max_shard_size=max_shard_size,
        compares=True,
        method="convert mla",
        refining=REFINING,
    )
    exporting = partial(
        _export, form=form, readers=readers, pad=pad_to_engine, q_rank=q_rank, large_eps=large_eps, dtype=dtype
    )
    with ExitStack() as stack:
        source = stack.enter_context(open_source(src, revision=revision))

        def describe(made: _Made, written: Stock) -> MlaReport:
            return report_of(
                source,
                written,
                made.choice,
                out=out,
                form=form,
                max_shard_size=max_shard_size,
                dry_run=dry_run,
                said=made.said,
                warnings=[*made.warnings, *written.warnings, *([WEIGHTS_ONLY] if asked.weights_only else [])],
            )

        if source.config.model_type.startswith(PREFIX):
            made = _as_it_is(source, form, {**sizes, "search_windows": search_windows, **learning})
            if dry_run or not is_main_process():
                return describe(made, exporting(made))
        else:
            check_latent(source, form)
            room = _room(source)
            candidates = choices(room, **sizes)
            promised = account(source.family, source.config, source.checkpoint.tensors)
            plan = partial(_plan, source, promised, room, dtype=dtype)
            candidates, made, written = _holdable(candidates, plan, exporting)
            if asked.weights_only and len(candidates) > 1:
                raise UserError(
                    "--calib none leaves no text to choose sizes on; give --kv-rank, --rope-dim and --rope-select high"
                )
            if dry_run:
                if len(candidates) > 1:
                    made = replace(made, warnings=[FIRST_OF_MANY.format(count=len(candidates))])
                return rehearse(describe(made, written), source, asked)
            report = describe(made, written)
            made = _learn(stack, source, asked, candidates, plan, search_windows, progress)
            if form != "plain" and asked.calibrates and not asked.refining:
                made = replace(made, latent_sizes=made.factors.latent_sizes())
            if not is_main_process():
                return replace(report, **made.said)
        written = exporting(made)
        report = describe(made, written)
        with progress("writing") as advance:
            left_out = write_directory(
                source,
                out,
                lay_out(source, written.outputs, max_shard_size),
                config=written.config,
                recipe={
                    "command": "convert mla",
                    **asdict(made.choice),
                    "form": form,
                    "readers": list(readers) if form != "plain" else [],
                    "pad_to_engine": pad_to_engine,
                    "q_rank": q_rank,
                    **made.learnt,
                    "dtype": dtype,
                    "max_shard_size": max_shard_size,
                },
                dropped=report.tensors_dropped,
                overwrite=overwrite,
                hashing=hash,
                progress=advance,
                asked=asked_of_user,
            )
    return replace(report, files_left_out=left_out)


@dataclass(frozen=True)
class _Made:
    """A plain form that is ready to be written, or exported.

    Attributes:
        choice: its sizes.
        plain: its tensors and its config.json.
        factors: where its tensors come from, if they are computed.
        latent_sizes: see `stock.export`.
        said: what the report says of it.
        learnt: what the record says of how it was made.
        warnings: about that.
    """

    choice: Choice
    plain: PlainModel
    factors: LayerFactors | None = None
    latent_sizes: Sequence[float] | None = None
    said: dict[str, Any] = field(default_factory=dict)
    learnt: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def outputs(self) -> list[Output]:
        return list(self.plain.outputs)

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.plain.config)


def _as_it_is(source: Source, form: str, choosing: Mapping[str, Any]) -> _Made:
    """A plain checkpoint, to be exported.

    Args:
        choosing: the options of `convert_mla` by which sizes and factors are found, of which there is nothing to find.

    Raises:
        UserError: it is to be made plain, or one of these options was given.
    """
    from .stock import plain_model

    if form == "plain":
        raise UserError(f"{source.name} is in the plain form already; leave --form out to export it")
    if given := _given(choosing):
        raise UserError(
            f"{source.name} is in the plain form already and is exported as it is; leave out {', '.join(given)}"
        )
    plain = plain_model(source)
    return _Made(Choice("as it is", plain.config["qk_rope_head_dim"], plain.config["kv_lora_rank"]), plain)


def _given(options: Mapping[str, Any]) -> list[str]:
    """Those of some options of `convert_mla` that are not as they are by default, and matter, as flags."""
    keywords, flags = inspect.signature(convert_mla).parameters, []
    for name, value in options.items():
        default = keywords[name].default
        if value not in (default, []) and name not in _HOW_TO_RUN:  # a list without texts names none either
            flags.append(f"--{'no-' if default is True else ''}{name.replace('_', '-')}")
    return flags


def _holdable(
    candidates: list[Choice], plan: Callable[[Choice], _Made], exporting: Callable[[_Made], Stock]
) -> tuple[list[Choice], _Made, Stock]:
    """The choices that the form and its readers can hold, and the first of them as it would be written.

    Raises:
        UserError: there is none; what is in the way of the first.
    """
    held, first, refused = [], None, None
    for choice in candidates:
        made = plan(choice)
        made = replace(made, latent_sizes=[1.0] * made.factors.sizes["L"])  # nothing is computed yet
        try:
            written = exporting(made)
        except UserError as error:
            refused = refused or error
            continue
        held.append(choice)
        first = first or (made, written)
    if first is None:
        assert refused is not None
        raise refused
    return held, *first


def _learn(
    stack: ExitStack,
    source: Source,
    asked: Request,
    candidates: list[Choice],
    plan: Callable[..., _Made],
    search_windows: int,
    progress: Stages,
) -> _Made:
    """Calibrate, choose, factor and refine."""
    from ..calibration.calibrate import Runner, find_statistics

    runner, said, learnt = Runner(source, asked.how), {}, {"calibration": NO_TEXT, "search": None, "refine": None}
    statistics, choice, warnings = None, candidates[0], list[str]()
    if asked.calibrates:
        statistics = find_statistics(runner, asked.stats, progress)
        said |= said_of(statistics)
        learnt["calibration"] = asdict(statistics.about)
        warnings += doubts(asked, statistics)
    plan = partial(plan, statistics=statistics, device=runner.device)
    if len(candidates) > 1:
        from .search import search

        found, measured_on = search(runner, candidates, plan, search_windows, progress)
        choice = found[0].choice
        if measured_on < search_windows:
            warnings.append(SHORT_TEXT.format(asked=search_windows, found=measured_on))
        learnt["search"] = [asdict(one.choice) | {"loss": one.loss} for one in found]
        said |= {"search_windows": measured_on, "search_loss": found[0].loss, "search": learnt["search"]}
    made = plan(choice)
    if asked.refining:
        from ..refine import refine_layers

        outputs, refined = stack.enter_context(
            refine_layers(runner, made.outputs, made.config, asked.refining, progress)
        )
        made = replace(made, plain=replace(made.plain, outputs=outputs))
        said |= asdict(refined)
        learnt["refine"] = asdict(asked.refining) | {"text": refined.refine_text, "kinds": refined.refine_kinds}
    return replace(made, said=said, learnt=learnt, warnings=warnings)


def _room(source: Source) -> Room:
    config, sizes = source.config.full, Sizes(source.config)
    turning = [2 * len(rotary_of(source.family, config, layer).re) for layer in range(config.num_hidden_layers)]
    return Room(max(turning), sizes["K"], sizes["D"], still_layers=0 in turning)


def _plan(
    source: Source,
    promised: dict[str, Promise],
    room: Room,
    choice: Choice,
    *,
    dtype: str | None,
    statistics: Statistics | None = None,
    device: str = "cpu",
) -> _Made:
    """The plain form of a choice."""
    from . import plain_form
    from .layers import LayerFactors
    from .stock import PlainModel

    kept = choice.channels(room)
    biased = plain_form.has_attention_bias(source.checkpoint.tensors)
    factors = LayerFactors(
        source,
        tensor_reader(source.checkpoint, promised),
        channels=kept,
        rank=choice.kv_rank,
        biased=biased,
        statistics=statistics,
        device=device,
    )
    config = plain_form.config_of(source, kept, choice.kv_rank, biased=biased, dtype=dtype)
    outputs = plain_form.plan(source, promised, factors, config, dtype)
    return _Made(choice, PlainModel(config, KNOWN[config["model_type"]], outputs, source.checkpoint), factors)


def _export(made: _Made, *, form: str, **options: Any) -> Stock:
    """What is to be written: the stock form, or the plain one as it is."""
    from .stock import Stock, export

    if form == "plain":
        return Stock(made.config, made.outputs, ())
    moment = made.factors.inputs if made.factors else None
    return export(made.plain, **options, query_moment=moment, latent_sizes=made.latent_sizes)
