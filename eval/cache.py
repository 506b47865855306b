"""The size of a model's key/value cache: by its config, and as found in the cache after a forward pass.

Both are reported because they may differ: a class may cache more than its architecture needs, such as heads
it has already repeated, or full keys and values where a latent would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..common.kvcache import ELEMENT_BYTES, fit_context, kv_bytes, kv_bytes_per_token, kv_elements
from ..common.loading import load_model

DEFAULT_CONTEXT = 512


@dataclass(frozen=True)
class CacheReport:
    """The cache of one sequence of `context` tokens.

    Attributes:
        context: tokens of the sequence.
        num_hidden_layers: layers of the model.
        kv_elements_per_token_per_layer: by the config.
        kv_bytes_per_token: by the config, over all layers.
        kv_bytes: by the config, at `context`; a windowed layer holds its window less one.
        measured_kv_elements_per_token_per_layer: elements found, over the tokens that the layers hold.
        measured_kv_bytes: bytes of the tensors found.
        measured_storage_bytes: bytes of memory that these keep alive; more, where one is a view of a larger.
        dtype: of the model, hence of the cache by the config.
    """

    model: str
    context: int
    num_hidden_layers: int
    kv_elements_per_token_per_layer: int
    kv_bytes_per_token: int
    kv_bytes: int
    measured_kv_elements_per_token_per_layer: float
    measured_kv_bytes: int
    measured_storage_bytes: int
    dtype: str


def cache_size(
    model: str | Path,
    *,
    context: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
) -> CacheReport:
    """Size the cache of a checkpoint.

    Args:
        model: directory, GGUF file or Hub id.
        context: tokens of the sequence; 512 by default, or the model's context if that is smaller.
        dtype: `auto` is the checkpoint's own on every device, for the answer is about bytes.
        device, revision: see `common.loading.load_model`.

    Raises:
        UserError: the model has no key/value cache, or `context` does not fit it.
        EnvironmentFailure: see `load_model`.
    """
    loaded = load_model(
        model,
        dtype="checkpoint" if dtype == "auto" else dtype,
        device=device,
        revision=revision,
        fits=lambda config: _fit(config, context),
    )
    return measure_cache(loaded, model=str(model), context=context)


def measure_cache(loaded, *, model: str, context: int | None = None) -> CacheReport:
    """Size the cache of a loaded model, which the report calls `model`. See `cache_size`."""
    config = loaded.config.get_text_config(decoder=True)
    context = _fit(config, context)
    dtype = str(loaded.dtype).removeprefix("torch.")
    elements = kv_elements(config)

    layers = list(_cached_layers(loaded, context))
    if not layers:
        raise UserError(f"{type(loaded).__name__} returned no key/value cache; there is nothing to size")
    found = [tensor for tensors in layers for tensor in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return CacheReport(
        model=model,
        context=context,
        num_hidden_layers=config.num_hidden_layers,
        kv_elements_per_token_per_layer=elements,
        kv_bytes_per_token=kv_bytes_per_token(config, ELEMENT_BYTES[dtype]),
        kv_bytes=kv_bytes(config, context, ELEMENT_BYTES[dtype]),
        measured_kv_elements_per_token_per_layer=sum(t.numel() for t in found)
        / sum(tensors[0].shape[-2] for tensors in layers),
        measured_kv_bytes=sum(t.numel() * t.element_size() for t in found),
        measured_storage_bytes=sum(storages.values()),
        dtype=dtype,
    )


def _fit(config: Any, context: int | None) -> int:
    context = fit_context(config, "context", context, DEFAULT_CONTEXT)
    if context < 1:
        raise UserError(f"a context of {context} caches nothing; give 1 or more")
    return context


def _cached_layers(model, context: int) -> Iterator[list]:
    """Each caching layer's tensors [1, heads, tokens, size] after `context` random tokens, keys first."""
    import torch
    from transformers import Cache

    from ..common.scoring import evaluating

    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(rows, (1, context), generator=torch.Generator().manual_seed(0))
    with evaluating(model):
        output = model.base_model(input_ids=ids.to(model.device), use_cache=True, return_dict=True)
    # The field is `past_key_values` or `cache`, by the version of transformers.
    caches = (value for value in output.values() if isinstance(value, Cache))
    for layer in (layer for cache in caches for layer in getattr(cache, "layers", ())):
        # Integer tensors are bookkeeping (a window's length, positions), not what the model remembers.
        held = {k: v for k, v in vars(layer).items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
        if (keys := held.pop("keys", None)) is not None:
            yield [keys, *held.values()]
