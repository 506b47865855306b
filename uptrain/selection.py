"""Which parameters of a model are trained, and where its attention is: read off the tables of the families."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..attention.plain import LatentAttention
from ..common.errors import UserError, did_you_mean
from ..convert.latent_families import KNOWN

# Terms of the families' tables that count heads; an attention module is one that holds a weight with such an axis.
HEAD_TERMS = frozenset("QKVOSTU")


@dataclass(frozen=True)
class Selection:
    """What is trained of a model.

    Attributes:
        parameters: names of the trained parameters, in the model's order.
        attention: names of the attention modules, one a layer, such as `model.layers.0.self_attn`.
        layer: class name of the decoder layer.
    """

    parameters: tuple[str, ...]
    attention: tuple[str, ...]
    layer: str


def _in_attention(name: str, module: nn.Module, attention: tuple[str, ...]) -> bool:
    return name.startswith(tuple(f"{prefix}." for prefix in attention))


def _in_attention_or_norm(name: str, module: nn.Module, attention: tuple[str, ...]) -> bool:
    return "norm" in f"{type(module).__name__} {name}".lower() or _in_attention(name, module, attention)


# What `train` can say -> whether it means a parameter, given its name, the module that holds it, and the attention.
TRAINED: dict[str, Callable[[str, nn.Module, tuple[str, ...]], bool]] = {
    "attention": _in_attention,
    "attention+norms": _in_attention_or_norm,
    "all": lambda name, module, attention: True,
}


def select(model: Any, train: str = "attention", lora_rank: int = 0, lora_alpha: float | None = None) -> Selection:
    """Say which parameters of `model` require gradients, and freeze the others.

    Args:
        train: a key of `TRAINED`.
        lora_rank: if not 0, freeze the attention too and add adapters of this rank to its linear modules (Hu et al.,
            arXiv 2106.09685), which are trained in its place; see `merge_adapters`.
        lora_alpha: what adapters are multiplied by, times their rank; by default twice the rank.

    Raises:
        UserError: unknown `train` or family, adapters together with `all`, or peft is not installed.
    """
    if train not in TRAINED:
        raise UserError(f"unknown train {train!r}{did_you_mean(train, TRAINED)}")
    attention = attention_modules(model)
    layer = type(model.get_submodule(attention[0].rpartition(".")[0])).__name__
    means = TRAINED[train]
    if lora_rank:
        if train == "all":
            raise UserError(f"lora_rank={lora_rank} goes with train=attention or attention+norms, not with all")
        _add_adapters(model, attention, lora_rank, 2 * lora_rank if lora_alpha is None else lora_alpha)
        means = _only_adapters(means)
    trained = []
    for name, module, parameter in _parameters(model):
        parameter.requires_grad_(means(name, module, attention))
        if parameter.requires_grad:
            trained.append(name)
    return Selection(tuple(trained), attention, layer)


def attention_modules(model: Any) -> tuple[str, ...]:
    """Names of a model's attention modules, one a layer.

    Raises:
        UserError: the family is unknown.
    """
    kind = model.config.model_type
    if kind not in KNOWN:
        raise UserError(f"uptraining does not know model type {kind!r}{did_you_mean(kind, KNOWN)}")
    family = KNOWN[kind]
    inside = [
        weight.template.partition("{layer}.")[2].partition(".")[0]
        for weight in family.weights
        if weight.template.startswith(family.layers) and any(HEAD_TERMS.intersection(axis) for axis in weight.shape)
    ]
    (module,) = set(inside)
    return tuple(f"{family.layers}{number}.{module}" for number in range(model.config.num_hidden_layers))


def merge_adapters(model: Any) -> None:
    """Fold the adapters into the weights that they are added to, and give these their names back."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in adapted:
        module.merge()
        model.set_submodule(name, module.get_base_layer())
    if adapted:
        del model.peft_config


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Every parameter once, under the name that `named_parameters` gives it, with the module that holds it."""
    for name, parameter in model.named_parameters():
        yield name, model.get_submodule(name.rpartition(".")[0]), parameter


def _only_adapters(means: Callable[..., bool]) -> Callable[..., bool]:
    def says(name: str, module: nn.Module, attention: tuple[str, ...]) -> bool:
        return ".lora_" in name or (means(name, module, attention) and not _in_attention(name, module, attention))

    return says


def _add_adapters(model: Any, attention: tuple[str, ...], rank: int, alpha: float) -> None:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("adapters need peft, which is not installed: pip install 'kvfold[lora]'") from None
    targets = {name: module for prefix in attention for name, module in _linear_modules(model, prefix)}
    inject_adapter_in_model(
        LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=list(targets),
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in targets.values()),
        ),
        model,
    )


def _linear_modules(model: Any, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    attention = model.get_submodule(prefix)
    for name, module in attention.named_modules():
        # The plain latent form reads this weight instead of calling its module, where an adapter would be passed by.
        read = isinstance(attention, LatentAttention) and name == "kv_b_proj"
        if isinstance(module, nn.Linear | Conv1D) and not read:
            yield f"{prefix}.{name}", module
