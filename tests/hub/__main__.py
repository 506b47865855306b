"""Run a command against a Hub of its own: python -m tests.hub [--add NAME=FOLDER]... COMMAND...

Its user is called me. What its repositories hold afterwards goes to standard error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from . import environment, hub_server


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hub", description=__doc__)
    parser.add_argument("--add", action="append", default=[], metavar="NAME=FOLDER", help="A repository to begin with.")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    with hub_server() as hub, tempfile.TemporaryDirectory() as home:
        for pair in asked.add:
            name, folder = pair.split("=", 1)
            hub.add(name).add_folder(Path(folder))
        status = subprocess.run(asked.command, env=environment(hub, Path(home))).returncode
        for name, repo in hub.repos.items():
            print(f"{name}: {', '.join(repo.history())}; tags {repo.tags}", file=sys.stderr)
            for path, blob in sorted(repo.head.files.items()):
                print(f"  {len(blob.content):>10} {path}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
