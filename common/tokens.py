"""What a tokenizer makes of text: its bare ids, what it puts in front, and conversations in its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import UserError
from .sources import first_line

# Some templates say today's date; the same text must be the same tomorrow.
_STOP_CLOCK = "{% macro strftime_now(format) %}01 Jan 2025{% endmacro %}"


def encode(tokenizer: Any, text: str | Sequence[str], **options: Any) -> Any:
    """A tokenizer's encoding of one text or several, by default without special tokens or any padding."""
    options = {"add_special_tokens": False, **options}
    # Not verbose: it would warn that a text is longer than a context.
    return tokenizer(text, return_attention_mask=False, verbose=False, **options)


def plain_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The ids of one text; see `encode`."""
    return encode(tokenizer, text, **options)["input_ids"]


def check_vocabulary(config: Any, highest: int) -> None:
    """Refuse a text whose highest token id a model has no embedding for, by its config.

    Raises:
        UserError: so it is.
    """
    vocabulary = config.get_text_config(decoder=True).vocab_size
    if highest >= vocabulary:
        raise UserError(
            f"token id {highest} lies beyond the model's vocabulary of {vocabulary}; use the model's own tokenizer"
        )


def leading_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts in front of a text by default."""
    bare, whole = plain_ids(tokenizer, "a"), plain_ids(tokenizer, "a", add_special_tokens=True)
    return next((whole[:start] for start in range(len(whole)) if whole[start : start + len(bare)] == bare), [])


def check_messages(name: str, messages: Sequence[Any]) -> list[dict[str, Any]]:
    """A conversation of the text `name` as templates take it.

    Raises:
        UserError: a message lacks its role or content.
    """
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages):
        raise UserError(f"{name} holds messages without 'role' or 'content'; give each both")
    # A table gives every message the fields of all, and templates (before transformers 5.24) would see None.
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def render_chat(tokenizer: Any, name: str, messages: Sequence[Any], *, prompt: bool = False) -> str:
    """A conversation of the text `name` in the tokenizer's chat template.

    Args:
        prompt: whether the text goes on to where the assistant begins to speak.

    Raises:
        UserError: it is no conversation, or not one that the template takes.
    """
    messages = check_messages(name, messages)
    try:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=_STOP_CLOCK + tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=prompt,
        )
    except Exception as error:  # a template may raise what it likes
        raise UserError(f"{name}: the chat template refuses a conversation: {first_line(error)}") from error
