"""Stock DeepSeek-V2 and -V3 models of transformers, made to decode in latent space.

transformers caches latents, but expands all of them into the keys and values of every head at every step. Here
`expand_kv` hands latents and rotary keys through as they are, and an attention function of our own either attends to
them as they are (`latent`) or expands them then and calls the attention function that the model had before. The
latter it does where it is less work, which is what a prompt wants, and where absorbing cannot be done right.

Shapes: B sequences, T queries, S cached tokens, H heads; R numbers of a latent, d_r of a rotary key, n coordinates of
a head's query without position, v of its value.
"""

from __future__ import annotations

import sys
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from ..common.errors import UserError
from .latent import absorbed_with_weights, absorbing_pays
from .sdpa import same_width

# Classes whose attention is the one of `latent`: same cache, same split of `kv_b_proj`, no indexer or gate besides.
LAYERS = {
    "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention",
    "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention",
}
# Attention implementations that take a mask [B, 1, T, S], by the name that transformers knows ours under.
NAMES = {inner: f"kvfold_latent_{inner}" for inner in ("eager", "sdpa")}


class Absorbed:
    """What `absorb` changed in a model, to be undone by `undo` or at the end of a `with` block."""

    def __init__(self, model: nn.Module, changed: bool) -> None:
        self._model = model
        self._changed = changed

    def undo(self) -> None:
        """Put the model back, unless it was absorbed before already; a second call does nothing."""
        if self._changed:
            restore(self._model)
        self._changed = False

    def __enter__(self) -> Absorbed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def absorb(model: nn.Module) -> Absorbed:
    """Make a loaded DeepSeek-V2 or -V3 model of transformers decode without expanding its cache.

    Logits stay what they were up to rounding, with `generate()`, batches and padding, in dynamic and static caches.
    Weights are read when they are needed, so that the model may be trained, moved or loaded anew. Nothing of this is
    saved with the model. Absorbing twice does nothing the second time.

    Raises:
        UserError: the model has no such layers, its attention implementation takes another kind of mask, or a
            projection is quantised or carries an adapter.
    """
    layers = _layers(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no DeepSeek-V2 or -V3 attention to absorb; convert it to MLA first, "
            "or leave it as it is"
        )
    for name, layer in layers.items():
        if not hasattr(type(layer), "expand_kv"):
            raise UserError(f"this release of transformers caches expanded keys ({name}); update it to absorb them")
        if _up_projections(layer) is None:
            kind = type(layer.kv_b_proj).__name__
            raise UserError(
                f"{name}.kv_b_proj is a {kind} whose weight cannot be read as it is; "
                "merge adapters, and load the model unquantised and on its device"
            )
    configs = {id(layer.config): layer.config for layer in layers.values()}.values()
    for config in configs:
        if config._attn_implementation not in (*NAMES, *NAMES.values()):
            raise UserError(
                f"attention implementation {config._attn_implementation!r} cannot be absorbed; "
                f"load the model with attn_implementation as one of {', '.join(NAMES)}"
            )
    _register()
    changed = [layer for layer in layers.values() if "expand_kv" not in vars(layer)]
    for layer in changed:
        layer.expand_kv = partial(_expand_later, layer)  # which can be pickled with its layer, as a method cannot
    for config in configs:
        config._attn_implementation = NAMES.get(config._attn_implementation, config._attn_implementation)
    return Absorbed(model, bool(changed))


def restore(model: nn.Module) -> None:
    """Undo `absorb`; a model that was not absorbed stays as it is."""
    inner = {ours: name for name, ours in NAMES.items()}
    for layer in _layers(model).values():
        vars(layer).pop("expand_kv", None)
        config = layer.config
        config._attn_implementation = inner.get(config._attn_implementation, config._attn_implementation)


def _layers(model: nn.Module) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if any(f"{kind.__module__}.{kind.__qualname__}" in LAYERS for kind in type(module).__mro__)
    }


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    masks = AttentionMaskInterface()
    for inner, name in NAMES.items():
        AttentionInterface.register(name, partial(_attend, inner=inner))
        AttentionMaskInterface.register(name, masks[inner])


def _expand_later(self: Any, latent: Tensor, key_rope: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv` of an absorbed layer: [B, 1, S, R] and [B, 1, S, d_r] as "value" and "key"."""
    if self.config._attn_implementation in NAMES.values():
        return key_rope, latent
    return type(self).expand_kv(self, latent, key_rope)  # someone has set another implementation since


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    inner: str,
    scaling: float,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: from `query` [B, H, T, n + d_r] to [B, T, H, v], and the weights if `inner` gives them.

    `key` and `value` are rotary keys and latents where `_expand_later` made them, and expanded in any other layer.
    """
    if "expand_kv" in vars(module):
        maps = _up_projections(module)
        queries, cached = query.shape[2], key.shape[2]
        sizes = module.kv_lora_rank, module.qk_nope_head_dim, module.v_head_dim
        # Without a mask one query sees everything. Of several, the stock functions know what it means.
        masked = queries == 1 or attention_mask is not None
        if maps is not None and masked and absorbing_pays(queries, cached, *sizes):
            q_nope, q_rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
            output, weights = absorbed_with_weights(
                q_nope,
                q_rope,
                value[:, 0],
                key[:, 0],
                *maps,
                scale=scaling,
                mask=attention_mask,
                dropout=dropout,
            )
            return output.transpose(1, 2), weights if inner == "eager" else None
        key, value = type(module).expand_kv(module, value, key)
    width = value.shape[-1]
    if inner == "sdpa":
        query, key, value = same_width(query, key, value)
    output, weights = _stock(module, inner)(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
    )
    return output[..., :width], weights


def _up_projections(module: Any) -> tuple[Tensor, Tensor] | None:
    """The maps [H, n, R] and [H, v, R] in `kv_b_proj`, as views; `None` where its weight alone does not say them."""
    linear = module.kv_b_proj
    if type(linear) is not nn.Linear or linear.bias is not None or linear.weight.is_meta:
        return None
    # The heads that are there, which may be one device's share of all.
    maps = linear.weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))  # [H, n + v, R]
    up_key, up_value = maps.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    return up_key, up_value


def _stock(module: Any, inner: str) -> Any:
    """The attention function `inner`; the eager one stands in the model's own file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    eager = next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
    return ALL_ATTENTION_FUNCTIONS.get_interface(inner, eager)
