"""The protocol that makes a measurement on text comparable to another, and the tokens it begins with.

The text's documents are joined by one blank line and tokenised once without special tokens; windows are cut
and scored as `kvfold.common.windows` says. What these rules leave open, `Protocol` says.

The protocol `lm-eval` is that of lm-evaluation-harness for one document: the tokenizer adds what special tokens it
likes, a prefix (its BOS, else its EOS) stands before the text, and windows roll.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UserError
from .loading import load_tokenizer
from .sources import one_line_errors
from .text import join_documents, read_texts, text_hash
from .tokens import plain_ids

KVFOLD, LM_EVAL = PROTOCOLS = ("kvfold", "lm-eval")


@dataclass(frozen=True)
class Protocol:
    """How a perplexity was measured. Figures compare when this (but dtype and device) and the tokenizer agree."""

    name: str
    text_hash: str
    texts: tuple[str, ...]
    join: str
    tokens_in_text: int
    window: int
    stride: int
    max_windows: int | None
    bos: str
    scored: str
    dtype: str
    device: str


@dataclass(frozen=True)
class TokenizedText:
    """A text as the tokenizer of a model reads it.

    Attributes:
        protocol: the one that it was read by.
        names: what the user called its parts.
        joined: the text itself.
        ids: its tokens.
        lead: the token that leads windows, or None, with `lead_id`.
    """

    protocol: str
    names: tuple[str, ...]
    joined: str
    ids: list[int]
    lead: str | None = None
    lead_id: int | None = None


def tokenize_texts(
    model: str | Path,
    text: Sequence[str],
    *,
    protocol: str = KVFOLD,
    bos: bool = False,
    revision: str | None = None,
) -> TokenizedText:
    """Read texts and tokenise them as one.

    Args:
        model: directory, GGUF file or Hub id whose tokenizer is used.
        text: paths, or `builtin`; see `text.read_texts`.
        protocol: one of `PROTOCOLS`.
        bos: whether the tokenizer's BOS is wanted too; `lm-eval` has a rule of its own.
        revision: see `loading.load_tokenizer`.

    Raises:
        UserError: a text or the tokenizer is missing or broken, or the tokenizer has no such token.
        EnvironmentFailure: the Hub cannot be reached.
    """
    names = (text,) if isinstance(text, str) else tuple(text)
    joined = join_documents(read_texts(names))
    tokenizer = load_tokenizer(model, revision=revision)
    lead, lead_id = tokenizer.bos_token, tokenizer.bos_token_id
    if protocol == LM_EVAL:
        if lead_id is None:
            lead, lead_id = tokenizer.eos_token, tokenizer.eos_token_id
        if lead_id is None:
            raise UserError(f"the tokenizer of {model} has neither BOS nor EOS to stand before the text; use {KVFOLD}")
        ids = token_ids(model, tokenizer, joined, add_special_tokens=not joined.startswith(lead))
    elif bos and lead_id is None:
        raise UserError(f"the tokenizer of {model} has no BOS token; leave --bos out")
    else:
        ids = token_ids(model, tokenizer, joined)
        lead, lead_id = (lead, lead_id) if bos else (None, None)
    return TokenizedText(protocol, names, joined, ids, lead, lead_id)


def token_ids(model: str | Path, tokenizer: Any, joined: str, **options: Any) -> list[int]:
    """The tokens of a whole text by the tokenizer of `model`, and no others unless asked; see `tokens.encode`."""
    with one_line_errors(model):
        return plain_ids(tokenizer, joined, **options)


def protocol_of(text: TokenizedText, loaded: Any, *, window: int, stride: int, max_windows: int | None) -> Protocol:
    """The protocol of a measurement that ran the model `loaded` on `text`."""
    if text.protocol == LM_EVAL:
        bos = f"{text.lead} (id {text.lead_id}) before the text, and what the tokenizer adds"
        scored = "every token, once"
    elif text.lead_id is not None:
        bos = f"{text.lead} (id {text.lead_id}) before every window, counted in it"
        scored = "every token, once"
    else:
        bos = "none"
        scored = f"every token but the first of {'the text' if stride < window else 'each window'}, once"
    return Protocol(
        name=text.protocol,
        text_hash=text_hash(text.joined),
        texts=text.names,
        join="one blank line",
        tokens_in_text=len(text.ids),
        window=window,
        stride=stride,
        max_windows=max_windows,
        bos=bos,
        scored=scored,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
    )
