"""The model that comes with kvfold, by its name."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = "embedded"
MODEL_DIR: Path = Path(__file__).parent.parent / "recipes" / "tiny" / "model"
"""The shipped checkpoint, in the Hugging Face layout: weights in bf16, config and tokenizer."""


def last_part(path: str) -> str:
    """What may be published of a path: its last part, and of the shipped model its name."""
    folder = Path(path).resolve()
    return EMBEDDED if folder == MODEL_DIR.resolve() else folder.name


def named_model(model: str) -> str:
    """A model as the user names it, `embedded` as the path of the shipped one; a path of that name comes first."""
    return str(MODEL_DIR) if model == EMBEDDED and not Path(model).exists() else model
