"""What people are shown, on a terminal or in a log: nothing that steers a terminal, and nothing that opens a door."""

from __future__ import annotations

import os
import re
import sys

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")  # variables that hold one
_SHORTEST = 8  # letters; what is shorter is no token
# As the Hub makes tokens; what an HTTP header says after that word; and who somebody is, in an address.
_SECRETS = re.compile(r"""\bhf_[A-Za-z0-9]{20,}|(?<=Bearer )[^\s'"]+|(?<=://)[^\s/@'"<>]+(?=@)""")
_PLACE = "<token>"


def shown(text: str) -> str:
    """A text that may be anybody's, as it is shown: controls and what turns the direction of writing are spelt out."""
    text = without_secrets(text)
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def without_secrets(text: str) -> str:
    """A text without tokens: those of this process's environment, and whatever looks like one."""
    for token in map(os.environ.get, TOKENS):
        if token and len(token) >= _SHORTEST:
            text = text.replace(token, _PLACE)
    return _SECRETS.sub(_PLACE, text)


def say(line: str) -> None:
    """A line beside the result, on standard error."""
    print(f"kvfold: {shown(line)}", file=sys.stderr, flush=True)
