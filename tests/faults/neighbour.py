"""A Hub in a process of its own: its threads must not be in the one that forks. Reads orders, a line each."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ..hub import hub_server


class Neighbour:
    """The process.

    Attributes:
        environment: for those who are to talk to its Hub.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.neighbour"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        said = self._hear()
        self.environment = {
            "HF_ENDPOINT": said["endpoint"],
            "HF_TOKEN": said["token"],
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def ask(self, order: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        return self._hear()

    def forget(self) -> None:
        """Begin anew, without a repository."""
        self.ask("forget")

    def holds(self) -> dict[str, dict[str, str]]:
        """Of every repository that has more than the Hub's own file: path -> sha256."""
        return self.ask("holds")

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def serve() -> None:
    with hub_server() as hub:
        (token,) = hub.users
        print(json.dumps({"endpoint": hub.endpoint, "token": token}), flush=True)
        for order in sys.stdin:
            if order.strip() == "forget":
                with hub.lock:
                    hub.repos.clear()
            with hub.lock:
                found = {
                    name: {path: blob.sha256 for path, blob in repo.head.files.items() if path != ".gitattributes"}
                    for name, repo in hub.repos.items()
                }
            print(json.dumps({name: files for name, files in found.items() if files}), flush=True)


if __name__ == "__main__":
    serve()
