"""What a Hub keeps: repositories with commits, branches, tags, and large files beside them. All in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

LARGE = (".safetensors", ".gguf", ".bin", ".png")  # as the .gitattributes of a new repository say
LARGE_BYTES = 10_000_000


@dataclass(frozen=True)
class Blob:
    """A file: in git if it is small, beside it (LFS) if it is large."""

    content: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """What git calls it: the hash of the file, or of the pointer to it."""
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        stands = pointer.encode() if self.large else self.content
        return hashlib.sha1(b"blob %d\0" % len(stands) + stands).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.oid

    def entry(self, path: str) -> dict[str, object]:
        """Its row in a listing."""
        row = {"type": "file", "path": path, "oid": self.oid, "size": len(self.content)}
        return row | (
            {"lfs": {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}} if self.large else {}
        )


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    files: dict[str, Blob]


def is_large(path: str, size: int) -> bool:
    return path.endswith(LARGE) or size > LARGE_BYTES


@dataclass
class Repo:
    """A repository.

    Attributes:
        name: OWNER/NAME.
        objects: large files that arrived, by hash, whether or not a commit names them.
        parts: pieces of large files that arrived, by hash and number.
    """

    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rules = "".join(f"*{ending} filter=lfs diff=lfs merge=lfs -text\n" for ending in LARGE)
        self.add("main", {".gitattributes": Blob(rules.encode(), large=False)}, "initial commit")

    def add(self, branch: str, files: dict[str, Blob], title: str) -> Commit:
        """Put a commit with exactly these files on top of a branch."""
        parent = self.branches.get(branch)
        tree = {path: blob.oid for path, blob in sorted(files.items())}
        oid = hashlib.sha1(json.dumps([self.name, parent, title, tree]).encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent, title, dict(files))
        self.branches[branch] = oid
        return self.commits[oid]

    def add_folder(self, folder: Path, branch: str = "main") -> Commit:
        """Put a commit that adds the files of a folder on top of a branch."""
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        blobs = {path: Blob(content, is_large(path, len(content))) for path, content in found.items()}
        self.objects |= {blob.sha256: blob.content for blob in blobs.values() if blob.large}
        return self.add(branch, self.commits[self.branches[branch]].files | blobs, f"add {folder.name}")

    def find(self, revision: str) -> Commit | None:
        """The commit of a branch, a tag or a hash."""
        return self.commits.get(self.branches.get(revision) or self.tags.get(revision) or revision)

    @property
    def head(self) -> Commit:
        return self.commits[self.branches["main"]]

    @property
    def files(self) -> dict[str, bytes]:
        """What main holds, but for the Hub's own file."""
        return {path: blob.content for path, blob in self.head.files.items() if path != ".gitattributes"}

    def history(self, branch: str = "main") -> list[str]:
        """Titles of a branch's commits, the newest first."""
        titles, oid = [], self.branches.get(branch)
        while oid is not None:
            titles.append(self.commits[oid].title)
            oid = self.commits[oid].parent
        return titles
