"""A causal language model whose decoder layers come from a checkpoint one by one, and go again.

The model is built without weights. Its own forward pass still does all that happens before and after the layers
(embedding, positions, masks, the final norm): in the place of each layer stands a stub that notes what the layer
would have been called with. So no family needs code of its own here.

Legend: B sequences, T positions, D hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ...common.loading import allow_dtype
from ...common.sources import quiet
from .reader import Read


def _give_back() -> None:
    """Hand freed memory back to the system: what a layer computed leaves holes that the next one's tensors do not fit,
    and layer by layer they would add up (44 MB each with Llama-2-7B's, of 29 layers more than a gigabyte)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        trim(0)


class _Stub(nn.Module):
    """Stands for a decoder layer: hands its input on, and remembers the rest of the call."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule, or its weights would count as the model's
        self.output: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)  # models ask a layer for its kind

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.call = args, kwargs
        return hidden if self.output is None else self.output


class LayeredModel:
    """Embedding, decoder layers and head of a model, each loaded when it is needed.

    Args:
        config: a transformers config.
        layers: where the layers are: the module's name without the number, such as `model.layers.`.
        read: gives the weights by the names that they have in memory.
        dtype, device: to compute in, and where.
    """

    def __init__(self, config: Any, layers: str, read: Read, *, dtype: torch.dtype, device: str):
        with quiet(), init_empty_weights(include_buffers=False):
            # Made with the process's default dtype, its tables would be rounded to a narrow one.
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        allow_dtype(self.model, dtype)
        self.config, self.prefix, self.dtype, self.device = config, layers, dtype, device
        self._read = read
        stack = self.model.get_submodule(layers.rstrip("."))
        assert isinstance(stack, nn.ModuleList)
        self.layers: list[nn.Module] = list(stack)
        self._stubs = nn.ModuleList(_Stub(layer) for layer in self.layers)
        self.model.set_submodule(layers.rstrip("."), self._stubs)
        self._calls: dict[tuple[int, int], list[tuple[tuple, dict]]] = {}
        for module in [self.model, *self.layers]:
            module.requires_grad_(False)
            for owner in module.modules():
                for name, buffer in owner.named_buffers(recurse=False):
                    setattr(owner, name, buffer.to(device))
        self.model.tie_weights()
        self._load(self.model, "")
        self.model.tie_weights()

    def attend(self, implementation: str) -> None:
        """Run with another attention function of transformers."""
        self.model.set_attn_implementation(implementation)
        for layer in self.layers:  # no submodules of the model
            for module in layer.modules():
                if isinstance(config := getattr(module, "config", None), type(self.config)):
                    config._attn_implementation = implementation

    def _load(self, module: nn.Module, prefix: str) -> None:
        for name, _ in list(module.named_parameters()):
            value = self._read(prefix + name)
            set_module_tensor_to_device(module, name, self.device, value=value, dtype=self.dtype)
        module.requires_grad_(False)

    @contextmanager
    def loaded(self, numbers: Sequence[int]) -> Iterator[list[nn.Module]]:
        """The decoder layers of these numbers, with their weights for as long as the block lasts."""
        layers = [self.layers[number] for number in numbers]
        for number, layer in zip(numbers, layers, strict=True):
            self._load(layer, f"{self.prefix}{number}.")
        try:
            yield layers
        finally:
            for layer in layers:
                for name, _ in list(layer.named_parameters()):
                    set_module_tensor_to_device(layer, name, "meta")
            _give_back()

    @property
    def base(self) -> nn.Module:
        return self.model.base_model

    def embed(self, ids: Tensor) -> Tensor:
        """What the first layer reads, [B, T, D], for ids [B, T]; also prepares `call` for this shape."""
        ids = ids.to(self.device)
        seen: list[Tensor] = []
        first = self._stubs[0]
        handle = first.register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0]), with_kwargs=True)
        try:
            with quiet():  # some classes warn of ids that could be padding
                self.base(input_ids=ids, use_cache=False)
        finally:
            handle.remove()
        self._calls[tuple(ids.shape)] = [stub.call for stub in self._stubs]
        return seen[0]

    def call(self, number: int, hidden: Tensor) -> Tensor:
        """Run a loaded layer on [B, T, D]; `embed` must have seen that shape."""
        args, kwargs = self._calls[tuple(hidden.shape[:2])][number]
        output = self.layers[number](hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def finish(self, hidden: Tensor) -> Tensor:
        """The last hidden state as the head takes it, [B, T, D], from the last layer's output."""
        last = self._stubs[-1]
        last.output = hidden
        try:  # anything of this shape goes in, and no further than the last stub
            return self.base(inputs_embeds=hidden.detach(), use_cache=False).last_hidden_state
        finally:
            last.output = None
