"""What of a conversation is the assistant's: the characters that it says in the chat template, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...common.errors import UserError
from ...common.tokens import render_chat
from .documents import ASSISTANT


def assistant_spans(tokenizer: Any, name: str, messages: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """A conversation of the text `name` as the template renders it, and the characters that are the assistant's.

    A turn begins where a prompt would end, and ends where the conversation up to it does: so what closes the turn, and
    tells the model to stop, belongs to it. That takes a template that leaves what it wrote when a turn follows.

    Returns:
        The text, and `(start, stop)` of every assistant turn.

    Raises:
        UserError: the template does not take the conversation, or rewrites what came before.
    """
    text = render_chat(tokenizer, name, messages)
    spans = []
    for place, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        try:
            prompt = render_chat(tokenizer, name, messages[:place], prompt=True)
        except UserError:
            if place:
                raise
            raise UserError(
                f"{name}: a conversation begins with the assistant, and the chat template does not say where its turn "
                "begins; begin with a user or system message, or use loss_on all"
            ) from None
        turn = render_chat(tokenizer, name, messages[: place + 1])
        if not (turn.startswith(prompt) and text.startswith(turn)):
            raise UserError(
                f"{name}: the chat template rewrites earlier turns when another follows, so message {place + 1} of a "
                "conversation has no fixed place; use loss_on all, or split it into conversations of one answer"
            )
        spans.append((len(prompt), len(turn)))
    return text, spans


def tokens_in(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens lie in one of the spans, bool [n]: those that neither begin before it nor end behind it.

    Args:
        offsets: `(start, stop)` in characters of every token. Some tokenizers leave blanks out of them, so that the
            token of a blank alone is empty and stands at its end.
    """
    starts, stops = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(starts), dtype=bool)
    for start, stop in spans:
        inside |= (starts >= start) & (stops > start) & (stops <= stop)
    return inside
