"""What a conversion to MLA says of its result, and what it warns of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.kvcache import cached_tokens, kv_elements
from ..demands import source_elements
from ..directory import written_figures
from ..families import Sizes
from ..headers import ITEM_BYTES, main_dtype
from ..source import Source
from .budget import Choice

if TYPE_CHECKING:
    from .stock import Stock

WEIGHTS_ONLY = "factored by weights alone, which loses far more than need be; leave --calib none out"
FIRST_OF_MANY = "the sizes shown are the first of {count} that fit; which of them lose least is measured when it is run"
SHORT_TEXT = (
    "sizes were chosen on {found} windows beyond those calibrated on, not {asked}: the text is too short; add to "
    "--calib, or lower --calib-windows"
)


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


def report_of(
    source: Source,
    written: Stock,
    choice: Choice,
    *,
    out: Path,
    form: str,
    max_shard_size: int | None,
    dry_run: bool,
    said: Mapping[str, Any],
    warnings: Sequence[str],
) -> MlaReport:
    """The report of a result that is planned.

    Args:
        written: the result, as it will be written.
        choice: the sizes of its plain form.
        out, form, max_shard_size, dry_run: as they were asked for.
        said: what else the report has, by its fields.
        warnings: of how it was made; what it caches is added to them.
    """
    from ..config import from_raw

    sizes, config = Sizes(source.config), from_raw(written.config)
    before, after = kv_elements(source.config), kv_elements(config)
    unpadded = choice.kv_rank + choice.rope_dim
    outputs, caching = written.outputs, sum(cached_tokens(source.config, 1))
    source_dtype = main_dtype(info for output in outputs for info in output.sources)
    used = {info.name for output in outputs for info in output.sources}
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
        kv_bytes_per_token=after * caching * ITEM_BYTES[main_dtype(outputs)],
        kv_ratio=after / before,
        **written_figures(source, outputs, max_shard_size),
        tensors_computed=sum(output.make is not None for output in outputs),
        tensors_dropped=[name for name in source.checkpoint.tensors if name not in used],
        files_left_out=[],
        dry_run=dry_run,
        warnings=[*warnings, *_growth(before, unpadded, after, written.config)],
        **said,
    )


def _growth(before: int, unpadded: int, after: int, config: Mapping[str, Any]) -> list[str]:
    """A warning where the result caches more than the source, or than the model that a plain source was made from."""
    origin = source_elements(config)
    if after > before:
        fewer, mend = f"the source's {before}", "choose smaller sizes"
    elif origin is not None and after > origin:
        fewer, mend = f"the {origin} of the model that the source was made from", "convert that one to smaller sizes"
    else:
        return []
    how = "it caches"
    if after > unpadded:
        how, mend = "padded to", "leave --pad-to-engine out unless vLLM is to read it"
    return [f"{how} {after} cached numbers a token and layer, more than {fewer}; {mend}"]
