"""The embedded demo model: a tiny multi-head Llama, its tokenizer, and the script that trained both."""

from ...common.embedded import MODEL_DIR

__all__ = ["MODEL_DIR"]
