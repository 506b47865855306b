"""Where kvfold keeps what it can make again: fetched sources, statistics."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """KVFOLD_CACHE, or kvfold in the user's cache folder."""
    if own := os.environ.get("KVFOLD_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold"
