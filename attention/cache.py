"""What one attention layer remembers of the tokens it has seen: keys and values, or latents and rotary keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.errors import UserError


class LayerCache:
    """Two tensors [..., T, size] that grow along T: keys and values [B, G, T, d], or latents [B, T, R] and rotary
    keys [B, T, d_r].

    Appending makes new tensors instead of writing into a buffer, so that gradients through earlier steps stay right.
    """

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None

    def append(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens, and get all that is held, oldest first.

        Raises:
            UserError: what comes differs from what is held in more than its number of tokens.
        """
        if self._held is None:
            self._held = first, second
        else:
            for held, new in zip(self._held, (first, second), strict=True):
                if held.shape[:-2] + held.shape[-1:] != new.shape[:-2] + new.shape[-1:]:
                    raise UserError(
                        f"the cache holds {list(held.shape)} and cannot take {list(new.shape)}; "
                        "use one cache for each layer and batch"
                    )
            old_first, old_second = self._held
            self._held = torch.cat([old_first, first], -2), torch.cat([old_second, second], -2)
        return self._held

    @property
    def length(self) -> int:
        """Tokens held of each sequence."""
        return 0 if self._held is None else self._held[0].shape[-2]

    @property
    def elements(self) -> int:
        """Numbers held, over all sequences and tokens."""
        return sum(tensor.numel() for tensor in self._held or ())

    @property
    def bytes(self) -> int:
        """Bytes held, over all sequences and tokens."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held or ())
