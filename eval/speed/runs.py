"""One model's turn on the clock: a block of decoding steps from a full cache, or one prompt.

The cache is transformers' `StaticCache`, of just the size that context and steps need, and full of random numbers: how
long a step takes does not depend on them. Before every block it is put back to its context.

Legend: B sequences, S tokens of the context, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache

from ...attention.absorb import absorb
from ...attention.plain import LatentAttention
from ...common.errors import UserError
from ...common.kvcache import attention_kind
from ...common.scoring import evaluating, head_logits
from .floors import ABSORBED, EXPANDED, HEADS, timed

STOCK = ("deepseek_v2", "deepseek_v3")  # what `absorb` absorbs
_ALIAS = "kvfold_expanded_sdpa"  # sdpa by a name under which a plain model does not absorb


class Decoder:
    """Greedy decoding of B sequences from S cached tokens.

    Args:
        model: a loaded transformers model, prepared by `decoding` here and whenever it is asked for something.
        context: S.
        steps: of a block.
        graph: record a step as a CUDA graph and replay it, so that the host launches one thing a step.

    Raises:
        UserError: the cache cannot be recorded in a graph.
    """

    def __init__(self, model: Any, *, batch_size: int, context: int, steps: int, graph: bool = False):
        self._model, self._steps = model, steps
        self._argument = _cache_argument(model)
        self.cache = full_cache(model, batch_size=batch_size, context=context, room=steps)
        self._lengths = _lengths(self.cache)
        self._token = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
        self._advance = self._step
        if graph:
            self._advance = self._record()

    def block(self) -> float:
        """Seconds that a block of steps takes."""
        self._rewind()
        with evaluating(self._model):
            return timed(self._model.device, lambda: [self._advance() for _ in range(self._steps)])

    def logits(self) -> Tensor:
        """What the model says after the context, [B, V]."""
        self._rewind()
        with evaluating(self._model):
            return self._step()

    def _step(self) -> Tensor:
        given = {self._argument: self.cache}
        logits = self._model(input_ids=self._token, use_cache=True, return_dict=True, **given).logits[:, -1]
        self._token.copy_(logits.argmax(-1, keepdim=True))
        return logits

    def _rewind(self) -> None:
        self._token.zero_()
        for layer, name, length in self._lengths:
            if isinstance(length, Tensor):
                getattr(layer, name).copy_(length)  # in place, where a graph knows it
            else:
                setattr(layer, name, length)

    def _record(self) -> Any:
        """A step as a CUDA graph. It has never been run."""
        if any(not isinstance(length, Tensor) for _, _, length in self._lengths):
            raise UserError("layers with a window count their tokens on the host, which no graph records; go without")
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with evaluating(self._model):
            with torch.cuda.stream(aside):  # libraries make their workspaces at first use, which must not be recorded
                self._step()
            torch.cuda.current_stream().wait_stream(aside)
            self._rewind()
            with torch.cuda.graph(graph):
                self._step()
        return graph.replay


def full_cache(model: Any, *, batch_size: int, context: int, room: int) -> StaticCache:
    """A cache that holds `context` tokens of B sequences, random and the same every time, with room for more."""
    sample = DynamicCache(config=model.config)
    with evaluating(model):
        given = {_cache_argument(model): sample}
        model.base_model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True, **given)
    cache = StaticCache(config=model.config, max_cache_len=context + room)
    generator = torch.Generator(model.device).manual_seed(0)
    for number, layer in enumerate(sample.layers):
        if getattr(layer, "keys", None) is None:  # a layer with another kind of state, or none
            continue
        keys, values = (
            torch.randn(
                *(batch_size, like.shape[1], context, like.shape[3]),
                dtype=like.dtype,
                device=like.device,
                generator=generator,
            )
            for like in (layer.keys, layer.values)
        )
        cache.update(keys, values, number)
    return cache


def prompt_seconds(model: Any, ids: Tensor) -> float:
    """Seconds from a prompt `ids` [B, S] to the logits of its last position, with the cache that it fills."""

    def read() -> None:
        output = model.base_model(input_ids=ids, use_cache=True, return_dict=True)
        head_logits(model, output.last_hidden_state[:, -1:])

    with evaluating(model):
        return timed(model.device, read)


def decoding_of(model: Any, *, expand: bool = False) -> str:
    """How a model decodes inside `decoding`: `HEADS`, `ABSORBED` or `EXPANDED`."""
    if attention_kind(model.config) != "MLA":
        return HEADS
    plain = _plain_configs(model)
    absorbs = all(each._attn_implementation == "sdpa" for each in plain) if plain else _is_stock(model)
    return ABSORBED if absorbs and not expand else EXPANDED


@contextmanager
def decoding(model: Any, *, expand: bool = False) -> Iterator[None]:
    """Inside, a model with latents decodes without expanding them, or with; the model is put back afterwards.

    Raises:
        UserError: see `attention.absorb.absorb`.
    """
    if not expand and _is_stock(model):
        with absorb(model):
            yield
        return
    aliased = [each for each in _plain_configs(model) if expand and each._attn_implementation == "sdpa"]
    if aliased:
        AttentionInterface.register(_ALIAS, AttentionInterface()["sdpa"])
        AttentionMaskInterface.register(_ALIAS, AttentionMaskInterface()["sdpa"])
    for each in aliased:
        each._attn_implementation = _ALIAS
    try:
        yield
    finally:
        for each in aliased:
            each._attn_implementation = "sdpa"


def _is_stock(model: Any) -> bool:
    return model.config.get_text_config(decoder=True).model_type in STOCK


def _plain_configs(model: Any) -> list[Any]:
    layers = (module for module in model.modules() if isinstance(module, LatentAttention))
    return list({id(layer.config): layer.config for layer in layers}.values())


def _cache_argument(model: Any) -> str:
    """What the release of transformers calls the cache that a model is given."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _lengths(cache: StaticCache) -> list[tuple[Any, str, Any]]:
    """What every layer counts its tokens by, and how many they are."""
    found = []
    for layer in cache.layers:
        for name in ("cumulative_length", "cumulative_length_int"):
            if (length := getattr(layer, name, None)) is not None:
                found.append((layer, name, length.clone() if isinstance(length, Tensor) else length))
    return found
