"""MHA or GQA -> MLA: the plain form of a source, refined if asked for, and exported to the stock form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import UserError, did_you_mean
from ...common.kvcache import cached_tokens, kv_elements
from ...common.parallel import is_main_process
from ...common.progress import Stages, silent
from ..calibration.reader import tensor_reader
from ..calibration.text import NO_TEXT, CalibText
from ..checks import account, check_latent
from ..demands import check_engine
from ..directory import check_paths, lay_out, write_directory
from ..families import Promise, Sizes
from ..headers import FLOATS, ITEM_BYTES, TensorInfo, main_dtype
from ..latent_families import KNOWN, PREFIX
from ..request import Request, rehearse, request
from ..rotary import rotary_of
from ..source import Source, open_source
from ..stream import Output
from .budget import Choice, Room, choices
from .rotation import SELECTS

if TYPE_CHECKING:
    from ..calibration.store import Statistics
    from .layers import LayerFactors
    from .stock import Stock

FORMS = ("deepseek_v3", "plain")
FIRST_OF_MANY = "the sizes shown are the first of {count} that fit; which of them lose least is measured when it is run"
SHORT_TEXT = (
    "sizes were chosen on {found} windows beyond those calibrated on, not {asked}: the text is too short; add to "
    "--calib, or lower --calib-windows"
)
# Of refinement. A latent starts nearer to the source than merged heads do: at the rate of these, 2e-3, half the layers
# of SmolLM2-135M at a third of the cache are no nearer after 16 windows than before; at this one all are.
LEARNING_RATE = 4e-4
WEIGHTS_ONLY = "factored by weights alone, which loses far more than need be; leave --calib none out"


@dataclass(frozen=True)
class MlaReport:
    """What a conversion to MLA did, or would do.

    `kv_elements_per_token_per_layer` and `kv_bytes_per_token` (over all layers, in the checkpoint's dtype) are of the
    result, the `source_` ones of the source, the `unpadded_` one of the result without padding to an engine's shape.
    `bytes` counts the weights.

    `rope_select`, `qk_rope_head_dim` and `kv_lora_rank` are what was chosen; where it was searched for, `search_loss`
    is its loss in nats a token on `search_windows` windows not calibrated on, and `search` has every choice's. A dry
    run chooses the first that fits.

    `stats` is the file of statistics that was used, made of `calib_tokens` tokens; empty where none was. Where the
    result was refined, `layer_errors_before` and `layer_errors_after` say how far each layer was from the source, see
    `refine.Refined`.
    """

    model: str
    source: str
    family: str
    form: str
    readable_by: list[str]
    num_attention_heads: int
    source_num_key_value_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    rope_select: str
    source_kv_elements_per_token_per_layer: int
    unpadded_kv_elements_per_token_per_layer: int
    kv_elements_per_token_per_layer: int
    source_kv_bytes_per_token: int
    kv_bytes_per_token: int
    kv_ratio: float
    dtype: str
    shards: int
    bytes: int
    tensors_computed: int
    tensors_copied: int
    tensors_dropped: list[str]
    files_left_out: list[str]
    dry_run: bool
    stats: str = ""
    calib_tokens: int = 0
    calib_kinds: dict[str, int] = field(default_factory=dict)
    search_windows: int = 0
    search_loss: float | None = None
    search: list[dict[str, Any]] = field(default_factory=list)
    refine_windows: int = 0
    refine_passes: int = 0
    refine_text: str = ""
    refine_kinds: dict[str, int] = field(default_factory=dict)
    layer_errors_before: list[float] = field(default_factory=list)
    layer_errors_after: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def convert_mla(
    src: str | Path,
    out: str | Path,
    *,
    kv_rank: int | None = None,
    rope_dim: int | None = None,
    kv_elements: int | None = None,
    kv_ratio: float | None = None,
    rope_select: str = "auto",
    search_windows: int = 8,
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
    refine_passes: int = 3,
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
        refine, refine_passes: windows of text to refine on, and passes over them; see `refine.refine_layers`.
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
    asked = request(
        calib=calib,
        calib_windows=calib_windows,
        calib_window=calib_window,
        calib_builtin=calib_builtin,
        chat=chat,
        fisher=fisher,
        offload=offload,
        stats=stats,
        refine=refine,
        refine_passes=refine_passes,
        device=device,
        calib_dtype=calib_dtype,
        calib_batch_size=calib_batch_size,
        dtype=dtype,
        max_shard_size=max_shard_size,
        compares=True,
        method="convert mla",
        learning_rate=LEARNING_RATE,
    )
    exporting = partial(
        _export, form=form, readers=readers, pad=pad_to_engine, q_rank=q_rank, large_eps=large_eps, dtype=dtype
    )
    with ExitStack() as stack:
        source = stack.enter_context(open_source(src, revision=revision))
        describe = partial(_report, source, out, form, max_shard_size, dry_run)
        if source.config.model_type.startswith(PREFIX):
            sizes = (kv_rank, rope_dim, kv_elements, kv_ratio)
            sized = any(size is not None for size in sizes)
            made = _as_it_is(source, form, learning=bool(calib or stats or refine), sized=sized)
            if dry_run:
                return describe(made, exporting(source, made))
        else:
            check_latent(source, form)
            room = _room(source)
            candidates = choices(
                room,
                kv_rank=kv_rank,
                rope_dim=rope_dim,
                kv_elements=kv_elements,
                kv_ratio=kv_ratio,
                rope_select=rope_select,
            )
            promised = account(source.family, source.config, source.checkpoint.tensors)
            plan = partial(_plan, source, promised, room, dtype=dtype)
            candidates, made, written = _holdable(candidates, plan, partial(exporting, source))
            if asked.weights_only and len(candidates) > 1:
                raise UserError(
                    "--calib none leaves no text to choose sizes on; give --kv-rank, --rope-dim and --rope-select high"
                )
            report = describe(made, written)
            if asked.weights_only:
                report = replace(report, warnings=[*report.warnings, WEIGHTS_ONLY])
            if dry_run and len(candidates) > 1:
                report = replace(report, warnings=[*report.warnings, FIRST_OF_MANY.format(count=len(candidates))])
            if dry_run:
                return rehearse(report, source, asked)
            made = _learn(stack, source, asked, candidates, plan, search_windows, progress)
            if form != "plain" and asked.calibrates and not asked.refining:
                made = replace(made, latent_sizes=made.factors.latent_sizes())
            if not is_main_process():
                return replace(report, **made.said)
        written = exporting(source, made)
        report = describe(made, written)
        if asked.weights_only:
            report = replace(report, warnings=[*report.warnings, WEIGHTS_ONLY])
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
            )
    return replace(report, files_left_out=left_out)


@dataclass(frozen=True)
class _Made:
    """A plain form that is ready to be written, or exported.

    Attributes:
        choice: its sizes.
        outputs, config: its tensors and its config.json.
        factors: where its tensors come from, if they are computed.
        latent_sizes: see `stock.export`.
        said: what the report says of it.
        learnt: what the record says of how it was made.
        warnings: about that.
    """

    choice: Choice
    outputs: list[Output]
    config: dict[str, Any]
    factors: LayerFactors | None = None
    latent_sizes: Sequence[float] | None = None
    said: dict[str, Any] = field(default_factory=dict)
    learnt: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def _as_it_is(source: Source, form: str, *, learning: bool, sized: bool) -> _Made:
    """A plain checkpoint, to be exported."""
    from .stock import plain_model

    if form == "plain":
        raise UserError(f"{source.name} is in the plain form already; leave --form out to export it")
    if learning or sized:
        raise UserError(
            f"{source.name} is in the plain form already and is exported as it is; leave out sizes, --calib, --stats "
            "and --refine"
        )
    plain = plain_model(source)
    sizes = plain.config["qk_rope_head_dim"], plain.config["kv_lora_rank"]
    return _Made(Choice("as it is", *sizes), list(plain.outputs), dict(plain.config))


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
        about = statistics.about
        said |= {"stats": str(statistics.path), "calib_tokens": about.tokens, "calib_kinds": about.kinds}
        learnt["calibration"] = asdict(about)
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
        made = replace(made, outputs=outputs)
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
    return _Made(choice, plain_form.plan(source, promised, factors, config, dtype), config, factors)


def _export(source: Source, made: _Made, *, form: str, dtype: str | None, **options: Any) -> Stock:
    """What is to be written: the stock form, or the plain one as it is."""
    from .stock import PlainModel, Stock, export, plain_model

    if form == "plain":
        return Stock(made.config, made.outputs, ())
    if made.factors is None:
        plain = plain_model(source)
    else:
        plain = PlainModel(made.config, KNOWN[made.config["model_type"]], made.outputs, source.checkpoint)
        options["query_moment"] = made.factors.inputs
    return export(plain, **options, dtype=dtype, latent_sizes=made.latent_sizes)


def _report(
    source: Source,
    out: Path,
    form: str,
    max_shard_size: int | None,
    dry_run: bool,
    made: _Made,
    written: Stock,
) -> MlaReport:
    from ..config import from_raw

    sizes, config, choice = Sizes(source.config), from_raw(written.config), made.choice
    before, after = kv_elements(source.config), kv_elements(config)
    unpadded = choice.kv_rank + choice.rope_dim
    outputs, caching = written.outputs, sum(cached_tokens(source.config, 1))
    source_dtype = main_dtype(info for output in outputs for info in output.sources)
    dtype = main_dtype(TensorInfo(output.name, output.dtype, output.shape, "") for output in outputs)
    used = {info.name for output in outputs for info in output.sources}
    warnings = [*made.warnings, *written.warnings]
    if after > before:
        how = "padded to" if after > unpadded else "it caches"
        warnings.append(f"{how} {after} cached numbers a token and layer, more than the source's {before}")
    return MlaReport(
        model=str(out),
        source=source.name,
        family=source.family.name,
        form=form,
        readable_by=list(written.readable_by),
        num_attention_heads=sizes["H"],
        source_num_key_value_heads=sizes["G"],
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        qk_nope_head_dim=config.qk_nope_head_dim,
        v_head_dim=config.v_head_dim,
        q_lora_rank=getattr(config, "q_lora_rank", None),
        rope_select=choice.rope_select,
        source_kv_elements_per_token_per_layer=before,
        unpadded_kv_elements_per_token_per_layer=unpadded,
        kv_elements_per_token_per_layer=after,
        source_kv_bytes_per_token=before * caching * ITEM_BYTES[source_dtype],
        kv_bytes_per_token=after * caching * ITEM_BYTES[dtype],
        kv_ratio=after / before,
        dtype=FLOATS.get(dtype, dtype),
        shards=len(lay_out(source, outputs, max_shard_size)),
        bytes=sum(output.nbytes for output in outputs),
        tensors_computed=sum(output.make is not None for output in outputs),
        tensors_copied=sum(output.make is None for output in outputs),
        tensors_dropped=[name for name in source.checkpoint.tensors if name not in used],
        files_left_out=[],
        dry_run=dry_run,
        warnings=warnings,
        **made.said,
    )
