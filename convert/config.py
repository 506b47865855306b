"""A config that answers from config.json, and asks transformers only for what config.json leaves unsaid.

Importing transformers takes longer than copying gigabytes of weights, and a checkpoint that a recent release
saved says everything that conversion needs to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..common.raw_config import read_raw_config
from ..common.sources import add_own_types, quiet, read_config
from .latent_families import KNOWN

# The attributes that decide which tensors there are and how large they are. Any other one that config.json does
# not name counts as absent, though transformers might have a default for it.
_ASKED = frozenset(
    {"num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
    | {"intermediate_size", "moe_intermediate_size", "num_local_experts", "num_experts", "max_position_embeddings"}
    | {"tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "initializer_range"}
    | {"qk_layernorm", "use_qk_norm", "use_parallel_residual", "mlp_only_layers", "decoder_sparse_step", "n_inner"}
)


class StoredConfig:
    """The config of a local checkpoint, with the attributes of transformers' own.

    Attributes:
        raw: config.json as it stands.

    Raises:
        UserError: there is no config.json, or what it says cannot be.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.raw = read_raw_config(folder)
        row = KNOWN.get(self.raw["model_type"])
        self._spelling: Mapping[str, str] = row.spelling if row else {}

    @cached_property
    def full(self) -> Any:
        """The transformers config, defaults filled in."""
        return read_config(self.folder)

    def __getattr__(self, name: str) -> Any:
        value = self.raw.get(self._spelling.get(name, name))
        if value is None and name in _ASKED:
            return getattr(self.full, name)
        if value is None:
            raise AttributeError(name)
        return value

    def get_text_config(self, decoder: bool = True) -> StoredConfig:
        return self


def from_raw(raw: dict[str, Any]) -> Any:
    """The transformers config that a config.json describes."""
    from transformers import CONFIG_MAPPING

    with quiet():
        add_own_types(raw["model_type"])
        return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
