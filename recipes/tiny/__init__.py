"""The embedded demo model: a tiny multi-head Llama, its tokenizer, and the script that trained both."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
"""The shipped checkpoint, in the Hugging Face layout: weights in bf16, config and tokenizer."""
