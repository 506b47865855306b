"""The catalogue: how an input is spoilt, the command that meets it, and what its one line must say."""

from __future__ import annotations

from dataclasses import replace

from .configs import CONFIGS
from .contents import CHECKPOINTS, PICKLES, TEXTS, TOKENIZERS
from .flags import FLAGS, NUMBERS
from .headers import HEADERS
from .paths import PATHS
from .recipes import RECIPES

SECTIONS = {
    "config": CONFIGS, "header": HEADERS, "path": PATHS, "flag": FLAGS, "recipe": RECIPES,
    "pickle": PICKLES, "checkpoint": CHECKPOINTS, "number": NUMBERS, "text": TEXTS, "tokenizer": TOKENIZERS,
}  # fmt: skip
LIGHT = ("config", "header", "path", "flag", "recipe")
"""The sections whose cases need neither torch nor transformers to be seen."""

CASES = [replace(case, section=section) for section, cases in SECTIONS.items() for case in cases]
