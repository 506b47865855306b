"""Texts in files, and stores of their bytes: a token a byte, with BOS and EOS around every document."""

from __future__ import annotations

import json
import random

import pytest
from transformers import AutoConfig

from kvfold.uptrain.data.documents import DataSpec
from kvfold.uptrain.data.store import Store, build_store

from ...eval.conftest import BOS_ID, VOCABULARY, make_tokenizer

EOS_ID = BOS_ID + 1
CONFIG = AutoConfig.for_model("llama", vocab_size=VOCABULARY)
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def paragraphs(seed: int, number: int, length: int = 200) -> list[str]:
    """So many paragraphs of words that come nowhere else."""
    chance = random.Random(seed)
    return [
        " ".join("".join(chance.choices("abcdefghijklm", k=7)) for _ in range(length // 8)).capitalize() + "."
        for _ in range(number)
    ]


@pytest.fixture
def write(tmp_path):
    """Write a text, or the rows of a table, and give its name."""

    def write(name: str, content: str | list) -> str:
        if not isinstance(content, str):
            rows = ({"text": row} if isinstance(row, str) else {"messages": row} for row in content)
            content = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_text(content)
        return str(tmp_path / name)

    return write


@pytest.fixture
def build(tmp_path):
    """Build the store of a spec, each in a folder of its own unless told which."""
    count = iter(range(100))

    def build(*texts: str, folder: str | None = None, template: str | None = None, bos: bool = True, **knobs) -> Store:
        tokenizer = make_tokenizer()
        if not bos:  # with an EOS still
            tokenizer.backend_tokenizer.post_processor = make_tokenizer(bos=False).backend_tokenizer.post_processor
        tokenizer.chat_template = template
        spec = DataSpec(texts, **{"window": 32, **knobs})
        return build_store(tmp_path / (folder or f"tokens{next(count)}"), tokenizer, spec, CONFIG)

    return build


def text_of(part) -> str:
    """All that stands in a part, with its marks."""
    return make_tokenizer().decode(part.batch(range(part.windows)).ids.flatten().tolist())


def documents_of(part) -> list[str]:
    return [piece.removeprefix("<s>") for piece in text_of(part).split("</s>") if piece]
