"""The pipeline that a model is planned for where nobody says another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...common.errors import UserError
from ...convert.checks import channel_obstacle, kv_head_choices, latent_obstacle
from ...convert.families import FAMILIES, Sizes
from ...uptrain.recipe import SOURCE, Recipe
from ..pipeline.keys import NEEDED
from ..pipeline.read import Pipeline, assemble
from .models import source_of

_SHARE = 4  # of the cache one part in so many is kept
_TOKENS = 10**9  # of the uptraining


def usual_pipeline(
    model: str, config: Any, overrides: Sequence[str] = (), *, revision: str | None = None, devices: int | None = None
) -> Pipeline:
    """Heads to a quarter of them, or a latent of a quarter of the cache, healed by the source on 10^9 tokens.

    Args:
        model: what it begins with.
        config: its transformers config.
        overrides: ``section.key=value``, which win.
        revision: of a Hub id.
        devices: among which the windows of a step must divide.

    Raises:
        UserError: see `read_pipeline`; or there is but one head, and no word of a latent.
    """
    decoder = config.get_text_config(decoder=True)
    row = source_of(decoder).row
    said = {name.replace("-", "_"): value for name, _, value in (pair.partition("=") for pair in overrides)}
    to = said.get("convert.to", "gqa")
    table: dict[str, dict[str, str]] = {
        SOURCE: {"model": model, **({"revision": revision} if revision else {})},
        "convert": {"to": to},
        "uptrain": {"teacher": SOURCE, "batch_size": str(_multiple(Recipe.batch_size, devices or 1))},
    }
    if to in NEEDED and not any(f"convert.{key}" in said for key in NEEDED[to]):
        key, size = _SIZES[to]
        table["convert"][key] = str(size(decoder))
    if to == "gqa" and "convert.method" not in said and channel_obstacle(row, decoder):
        table["convert"]["method"] = "mean"
    if not any(f"uptrain.{key}" in said for key in ("tokens", "steps", "alpha")):
        table["uptrain"]["tokens"] = str(_TOKENS)
    return assemble(table, overrides, name=model)


def _multiple(count: int, of: int) -> int:
    """The least multiple that is no less."""
    return -(-count // of) * of


def _fewer(config: Any) -> int:
    """A divisor of the number of KV heads, a quarter of them at most, and at least one."""
    heads = Sizes(config)["G"]
    if heads == 1:
        row = FAMILIES[config.model_type]
        way = "" if latent_obstacle(row, config) else "; plan a latent with convert.to=mla"
        raise UserError(f"a {row.name} model with one KV head cannot have fewer{way}")
    choices = kv_head_choices(config, FAMILIES[config.model_type])
    return max(count for count in choices if count <= max(1, heads // _SHARE))


# By what a model is converted to: the key of the result's size, and what it is of a config.
_SIZES: Mapping[str, tuple[str, Callable[[Any], float]]] = {
    "gqa": ("kv_heads", _fewer),
    "mla": ("kv_ratio", lambda config: 1 / _SHARE),
}
