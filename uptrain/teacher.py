"""The model that a student learns from: frozen, and outside of what is trained.

Legend: B sequences, S tokens, D hidden size, V vocabulary, L layers, n positions of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.errors import UserError
from ..common.kvcache import context_length
from ..common.scoring import head_logits, hidden_states

MOST_APART = 0.01  # of a tokenizer's entries, in a teacher's


@dataclass(frozen=True)
class TeacherView:
    """What a teacher makes of one batch.

    Attributes:
        hidden: last hidden states, [B, S, D].
        attention: the output of every layer's attention, L times [B, S, D]; empty if not asked for.
        model: the teacher, for its head. (Opaque to DDP and FSDP, which move and cast only what they know.)
    """

    hidden: Tensor
    attention: tuple[Tensor, ...]
    model: Any

    def logits(self, positions: slice) -> Tensor:
        """Logits [B, n, V] of these positions, in the teacher's own precision."""
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            return head_logits(self.model, self.hidden[:, positions])


class Teacher:
    """Freezes a model and puts it in evaluation mode.

    Args:
        model: a causal language model, whole on this process's device.
        modules: names of its attention modules, one a layer; see `selection.attention_modules`.
    """

    def __init__(self, model: Any, modules: Sequence[str] = ()):
        self.model = model.requires_grad_(False).eval()
        self.modules = tuple(modules)

    def view(self, ids: Tensor, positions: Tensor | None = None, *, layers: bool = False) -> TeacherView:
        """What the teacher makes of `ids` [B, S] at `positions` [B, S].

        Args:
            layers: whether to keep what every layer's attention gives out.
        """
        modules = self.modules if layers else ()
        own_precision = torch.autocast(ids.device.type, enabled=False)
        with torch.no_grad(), own_precision, attention_outputs(self.model, modules) as outputs:
            hidden = hidden_states(self.model, ids, positions)
        return TeacherView(hidden, tuple(outputs), self.model)


def check_pair(name: str, ours: Any, theirs: Any, *, layers: bool, window: int) -> None:
    """Refuse a teacher that a student cannot learn from, or be compared with.

    Args:
        name: what the user calls the teacher.
        ours, theirs: the text configs of student and teacher.
        layers: whether attention outputs are to be matched too, one by one.
        window: tokens that both are to read at a time.

    Raises:
        UserError: the vocabularies differ, or, for layers, their number or the hidden size; or the teacher's context
            is shorter than the window.
    """
    wanted = {"vocab_size": "use a model of the same tokenizer"}
    if layers:
        way_out = "layer_share=0 does without matching layers"
        wanted |= {"num_hidden_layers": way_out, "hidden_size": way_out}
    for key, way_out in wanted.items():
        if getattr(ours, key) != getattr(theirs, key):
            raise UserError(f"{name} has {key} {getattr(theirs, key)}, the student {getattr(ours, key)}; {way_out}")
    if window > (context := context_length(theirs) or window):
        raise UserError(f"{name} has a context of {context} tokens, and a window {window}; lower window")


def check_tokenizers(name: str, ours: Any, theirs: Any) -> None:
    """Refuse a teacher that means other tokens by the same numbers.

    Raises:
        UserError: so it does. A few may differ: instruct models name some that their base model left unused.
    """
    known, others = ours.get_vocab(), theirs.get_vocab()
    apart = sum(others.get(token) != number for token, number in known.items())
    if apart > MOST_APART * len(known):
        raise UserError(
            f"{name} has another tokenizer: {apart:,} of {len(known):,} tokens have another number there; use a model "
            "of the same tokenizer"
        )


@contextmanager
def attention_outputs(model: Any, modules: Sequence[str]) -> Iterator[list[Tensor]]:
    """A list that forward passes inside fill with the outputs [B, S, D] of these modules, in the order they run."""
    outputs: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [model.get_submodule(name).register_forward_hook(keep) for name in modules]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
