"""Point the real client at a Hub: that of another process by its environment, that of this one by its constants."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .server import Hub

if TYPE_CHECKING:
    import pytest


def environment(hub: Hub, home: Path, *, token: bool = True, offline: bool = False) -> dict[str, str]:
    """Variables for a process whose client talks to this Hub, and keeps what it fetches in a folder.

    The server does not speak xet, so the client is told to use what it falls back to where hf_xet is missing.
    """
    gone = ("HF_TOKEN", "HF_HUB_CACHE", "HF_TOKEN_PATH", "HF_HUB_DISABLE_PROGRESS_BARS")
    return {name: value for name, value in os.environ.items() if name not in gone} | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
        **({"HF_TOKEN": hub.token} if token else {}),
    }


def use(hub: Hub, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the client of this process talk to this Hub, with its token, and keep what it fetches in a folder."""
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _http, close_session
    from transformers.utils import hub as of_transformers

    values = {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }
    for name, value in values.items():
        patch.setattr(constants, name, value)
    # What was made before knows another Hub, and would be patient with it.
    patch.setattr(hf_api.api, "endpoint", hub.endpoint)
    patch.setattr(of_transformers, "_hf_api", None, raising=False)
    # So that redirects to the storage lose the token, as with the real Hub.
    patch.setattr(_http, "_HUB_ORIGINS", frozenset(), raising=False)
    patch.setenv("HF_TOKEN", hub.token)
    close_session()
