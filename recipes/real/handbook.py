"""The Debian handbook as plain text: prose of a kind that nothing here is calibrated on."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "debian-handbook"
PAGES = "usr/share/doc/debian-handbook/html/en-US"
_PARAGRAPH = re.compile(r"<p\b[^>]*>(.*?)</p>|<div class=\"para\">(.*?)</div>", re.DOTALL)
_LEAST = 60  # characters; shorter ones are captions and menus


def fetch_handbook(cache: Path) -> Path | None:
    """The text, fetched with apt at the first call; None where apt cannot fetch it."""
    path = cache / "debian-handbook.txt"
    if path.exists():
        return path
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        print(f"no apt here, so {PACKAGE} is not judged on", file=sys.stderr)
        return None
    with tempfile.TemporaryDirectory() as scratch:
        fetched = subprocess.run(["apt-get", "download", PACKAGE], cwd=scratch, capture_output=True, text=True)
        archives = list(Path(scratch).glob("*.deb"))
        if fetched.returncode or not archives:
            print(f"apt cannot fetch {PACKAGE}, so it is not judged on", file=sys.stderr)
            return None
        subprocess.run(["dpkg-deb", "-x", archives[0], scratch], check=True)
        chapters = [plain(page.read_text(errors="replace")) for page in sorted((Path(scratch) / PAGES).glob("*.html"))]
    partial = path.with_suffix(".part")
    partial.write_text("\n\n".join(chapter for chapter in chapters if chapter))
    partial.rename(path)
    return path


def plain(page: str) -> str:
    """The paragraphs of an HTML page, a blank line between two."""
    found = (first or second for first, second in _PARAGRAPH.findall(page.partition("<body")[2]))
    texts = (re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", text))).strip() for text in found)
    return "\n\n".join(text for text in texts if len(text) > _LEAST)
