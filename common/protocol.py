"""The protocol that makes a measurement on text comparable to another, and the tokens it begins with.

The text's documents are joined by one blank line and tokenised once without special tokens; windows are cut
and scored as `kvfold.common.windows` says. What these rules leave open, `Protocol` says.
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


@dataclass(frozen=True)
class Protocol:
    """How a perplexity was measured. Figures compare when this (but dtype and device) and the tokenizer agree."""

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
        names: what the user called its parts.
        joined: the text itself.
        ids: its tokens.
        bos: the token that leads every window, or None, with `bos_id`.
    """

    names: tuple[str, ...]
    joined: str
    ids: list[int]
    bos: str | None = None
    bos_id: int | None = None


def tokenize_texts(
    model: str | Path, text: Sequence[str], *, bos: bool = False, revision: str | None = None
) -> TokenizedText:
    """Read texts and tokenise them as one.

    Args:
        model: directory, GGUF file or Hub id whose tokenizer is used.
        text: paths, or `builtin`; see `text.read_texts`.
        bos: whether the tokenizer's BOS is wanted too.
        revision: see `loading.load_tokenizer`.

    Raises:
        UserError: a text or the tokenizer is missing or broken, or the tokenizer has no BOS.
        EnvironmentFailure: the Hub cannot be reached.
    """
    names = (text,) if isinstance(text, str) else tuple(text)
    joined = join_documents(read_texts(names))
    tokenizer = load_tokenizer(model, revision=revision)
    if bos and tokenizer.bos_token_id is None:
        raise UserError(f"the tokenizer of {model} has no BOS token; leave --bos out")
    ids = token_ids(model, tokenizer, joined)
    return TokenizedText(names, joined, ids, *((tokenizer.bos_token, tokenizer.bos_token_id) if bos else ()))


def token_ids(model: str | Path, tokenizer: Any, joined: str) -> list[int]:
    """The tokens of a whole text by the tokenizer of `model`, and no others."""
    # Not verbose: it would warn that a whole text is longer than a context.
    with one_line_errors(model):
        return tokenizer(joined, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def protocol_of(text: TokenizedText, loaded: Any, *, window: int, stride: int, max_windows: int | None) -> Protocol:
    """The protocol of a measurement that ran the model `loaded` on `text`."""
    if text.bos_id is not None:
        bos = f"{text.bos} (id {text.bos_id}) before every window, counted in it"
        scored = "every token, once"
    else:
        bos = "none"
        scored = f"every token but the first of {'the text' if stride < window else 'each window'}, once"
    return Protocol(
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
