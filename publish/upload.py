"""Bring files to a repository of the Hub.

One commit holds everything, so that a repository is the old one or the new one at any moment. Large files go before it,
one after another: an upload that was stopped is taken up by the same command, and what arrived is not sent again.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.errors import EnvironmentFailure, UserError
from ..common.progress import Stages, silent
from ..common.shown import without_secrets
from ..common.sources import http_status
from ..common.status import Stopped
from .client import hub_client, hub_errors, may_pass, patiently

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoFile

MAIN = "main"
_ATTRIBUTES = ".gitattributes"  # the Hub's own: what is stored as large files
_CARD = "README.md"
_ALONE = 4 << 20  # bytes from which on a file is sent by itself
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REF = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*(?<!\.)(?<!\.lock)")


@dataclass(frozen=True)
class Upload:
    """What an upload did.

    Attributes:
        repo_id, revision: the repository, and the branch in it.
        url: where its files can be seen, as this commit has them.
        commit, tag: of the files; tag None where none was asked for.
        files, bytes: in the repository, of ours.
        files_changed, bytes_changed: of them, those that the branch did not have before. What an upload that was
            stopped had sent of them was not sent again.
        files_deleted: that were in the branch, and are none of ours.
        created: whether the repository was made for this.
        warnings: what the Hub remarks on the card.
    """

    repo_id: str
    revision: str
    url: str
    commit: str
    tag: str | None
    files: int
    bytes: int
    files_changed: int
    bytes_changed: int
    files_deleted: int
    created: bool
    warnings: tuple[str, ...]


def check_repo_id(repo_id: str) -> None:
    """Refuse what cannot be the id of a repository.

    Raises:
        UserError: it is not OWNER/NAME, or has characters that the Hub does not take.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo_id.count("/") != 1:
        raise UserError(f"{repo_id!r} is not the id of a repository; write OWNER/NAME, such as you/llama-gqa8")
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise UserError(
            f"{repo_id!r} is not the id of a repository; letters, digits, - _ and . only, at most 96 characters, "
            "none of - and . at an end, no -- and .., no .git"
        ) from None


def check_ref(flag: str, name: str | None) -> None:
    """Refuse what cannot be the name of a branch or a tag.

    Raises:
        UserError: names it.
    """
    if name is not None and (not _REF.fullmatch(name) or ".." in name or name.startswith("refs/")):
        raise UserError(f"{flag} {name!r} is no name of a branch or a tag; letters, digits, - _ + . and / only")


def check_login() -> str:
    """The name of the user whose token the Hub gets.

    Raises:
        UserError: there is no token, or the Hub does not take it.
        EnvironmentFailure: the Hub cannot be reached.
    """
    with hub_errors("this account"):
        return str(patiently(hub_client().whoami)["name"])


def upload(
    contents: Mapping[str, Path | bytes],
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    tag: str | None = None,
    message: str,
    overwrite: bool = False,
    progress: Stages = silent,
    check_last: Callable[[], None] = lambda: None,
) -> Upload:
    """Make a repository hold these files and no others, in one commit; none if it does so already.

    Args:
        contents: path in the repository -> a file here, or what stands in it.
        repo_id: OWNER/NAME; made if missing.
        private: of a repository that is made. One that is there is not changed, but must not be public then.
        revision: the branch; made of main if missing.
        tag: to set on the commit.
        message: of the commit.
        overwrite: replace other files that the branch holds. Its history keeps them.
        progress: opens a bar.
        check_last: called before the commit; raises if the files are no longer what they were.

    Raises:
        UserError: the branch or the tag has no name that one can have; the repository holds other files, is public, or
            has the tag elsewhere; the Hub refuses.
        EnvironmentFailure: the Hub cannot be reached, or a file cannot be read. The same call goes on.
    """
    check_repo_id(repo_id)
    check_ref("--revision", revision)
    check_ref("--tag", tag)
    with _going_on(), hub_errors(repo_id):
        return _upload(
            contents,
            repo_id,
            private=private,
            branch=revision or MAIN,
            tag=tag,
            message=message,
            overwrite=overwrite,
            progress=progress,
            check_last=check_last,
        )


def _upload(
    contents: Mapping[str, Path | bytes],
    repo_id: str,
    *,
    private: bool,
    branch: str,
    tag: str | None,
    message: str,
    overwrite: bool,
    progress: Stages,
    check_last: Callable[[], None],
) -> Upload:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    contents = {path: content for path, content in contents.items() if path != _ATTRIBUTES}
    assert contents, "there is nothing to upload"
    api = hub_client()
    created = _make_repo(api, repo_id, private)
    branches, tags = _refs(api, repo_id)
    if branch not in branches:
        if branch in tags or _COMMIT.fullmatch(branch):
            raise UserError(f"{branch} is a tag or a commit of {repo_id}, which cannot change; name a branch")
        patiently(lambda: api.create_branch(repo_id, branch=branch, exist_ok=True))
        branches, tags = _refs(api, repo_id)
    head = branches[branch]
    there = _files(api, repo_id, head)
    with progress("comparing") as bar:
        ours, changed = [], []
        for number, (path, content) in enumerate(contents.items()):
            bar(number, len(contents))
            add = CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
            ours.append(add)
            if not _is_same(add, there.get(path)):
                changed.append(add)
    stale = sorted(there.keys() - contents.keys())
    if changed or stale:
        # A branch made just now, here or by a call that was stopped, holds what main holds, and nothing of its own.
        fresh = branch != MAIN and head == branches.get(MAIN)
        if there and not (overwrite or fresh):
            raise UserError(
                f"{repo_id} ({branch}) holds other files, or others of the same names, such as {min(there)}; "
                "--overwrite replaces them, and its history keeps them; or name another repository"
            )
    if tag in tags and (changed or stale or tags[tag] != head):
        raise UserError(f"{repo_id} has the tag {tag} elsewhere ({tags[tag][:8]}); choose another, or delete that one")

    remarks: tuple[str, ...] = ()
    if changed or stale:
        remarks = _check_card(api, contents[_CARD]) if any(add.path_in_repo == _CARD for add in changed) else ()
        _send(api, repo_id, branch, changed, progress)
        check_last()
        operations = [*changed, *(CommitOperationDelete(path, is_folder=False) for path in stale)]
        head = _commit(api, repo_id, branch, head, operations, ours, message)
    if tag and tags.get(tag) != head:
        patiently(lambda: api.create_tag(repo_id, tag=tag, revision=head, exist_ok=True))
        if _refs(api, repo_id)[1].get(tag) != head:
            raise UserError(f"{repo_id} got the tag {tag} elsewhere meanwhile; choose another, or delete that one")
    return Upload(
        repo_id=repo_id,
        revision=branch,
        url=without_secrets(f"{api.endpoint}/{repo_id}/tree/{head}"),
        commit=head,
        tag=tag,
        files=len(ours),
        bytes=_size(ours),
        files_changed=len(changed),
        bytes_changed=_size(changed),
        files_deleted=len(stale),
        created=created,
        warnings=remarks,
    )


def _make_repo(api: HfApi, repo_id: str, private: bool) -> bool:
    """Make the repository if it is missing, and say whether it was."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = patiently(lambda: api.model_info(repo_id))
    except RepositoryNotFoundError:
        # Not public unless asked for: an organisation may have a rule of its own.
        patiently(lambda: api.create_repo(repo_id, private=private or None, exist_ok=True))
        return True
    if private and not info.private:
        raise UserError(f"{repo_id} is there, and public; make it private in its settings, or name another")
    return False


def _refs(api: HfApi, repo_id: str) -> tuple[dict[str, str], dict[str, str]]:
    """Branches and tags of a repository, and the commit of each."""
    refs = patiently(lambda: api.list_repo_refs(repo_id))
    branches, tags = ({ref.name: ref.target_commit for ref in kind} for kind in (refs.branches, refs.tags))
    return branches, tags


def _files(api: HfApi, repo_id: str, commit: str) -> dict[str, RepoFile]:
    """The files of a commit, but for the Hub's own."""
    from huggingface_hub.hf_api import RepoFile

    tree = api.list_repo_tree(repo_id, recursive=True, revision=commit)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile) and entry.path != _ATTRIBUTES}


def _is_same(ours: CommitOperationAdd, theirs: RepoFile | None) -> bool:
    """Whether a file of the Hub is one of ours, by its size and hash."""
    if theirs is None or theirs.size != ours.upload_info.size:
        return False
    if theirs.lfs:
        return theirs.lfs.sha256 == ours.upload_info.sha256.hex()
    with ours.as_file() as file:
        content = file.read()  # the Hub keeps only small files in git
    return theirs.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _check_card(api: HfApi, content: Path | bytes) -> tuple[str, ...]:
    """Have the Hub look at the card before anything is sent, and return what it remarks."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    text = (content if isinstance(content, bytes) else content.read_bytes()).decode()

    def ask() -> dict[str, Any]:
        asked = {"repoType": "model", "content": text}
        response = get_session().post(f"{api.endpoint}/api/validate-yaml", json=asked)
        if response.status_code != 400:  # which is an answer
            hf_raise_for_status(response)
        return response.json()

    answer = patiently(ask)
    errors, remarks = (tuple(str(row["message"]) for row in answer.get(kind, ())) for kind in ("errors", "warnings"))
    if errors:
        raise UserError(f"the Hub does not take the head of {_CARD}: {'; '.join(errors)}")
    return remarks


def _send(api: HfApi, repo_id: str, branch: str, changed: Sequence[CommitOperationAdd], progress: Stages) -> None:
    """Send what is stored as large files. The client repeats requests that fail, and asks before each file whether it
    is there; that it knows how each is stored afterwards keeps a .gitignore of the repository out of it."""
    large = [[add] for add in changed if add.upload_info.size >= _ALONE]
    small = [add for add in changed if add.upload_info.size < _ALONE]
    total, done = _size(changed), 0
    with progress("uploading") as bar:
        for group in (*large, small):
            bar(done, total)
            if group:
                api.preupload_lfs_files(repo_id, group, revision=branch, gitignore_content="", free_memory=False)
            done += _size(group)


def _commit(
    api: HfApi,
    repo_id: str,
    branch: str,
    head: str,
    operations: Sequence[Any],
    ours: Sequence[CommitOperationAdd],
    message: str,
) -> str:
    """Commit on top of head, unless somebody else did, and return the commit once it holds what was meant."""

    def is_ours(commit: str) -> bool:
        files = _files(api, repo_id, commit)
        return len(files) == len(ours) and all(_is_same(add, files.get(add.path_in_repo)) for add in ours)

    def commit() -> str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on the card, told before
                return api.create_commit(
                    repo_id, operations, commit_message=message, revision=branch, parent_commit=head
                ).oid
        except Exception as error:
            if may_pass(error) or http_status(error) in (409, 412):
                # The answer may have been lost, but not the commit.
                now = _refs(api, repo_id)[0].get(branch, head)
                if now != head and is_ours(now):
                    return now
            raise

    made = patiently(commit)
    if not is_ours(made):
        raise EnvironmentFailure(f"{repo_id} does not hold what was sent; run the same command again")
    return made


@contextmanager
def _going_on() -> Iterator[None]:
    """Say of a stopped upload what is left of it."""
    try:
        yield
    except Stopped as stopped:
        raise Stopped(stopped.number, "what was sent is on the Hub, and the same command goes on") from None


def _size(files: Sequence[CommitOperationAdd]) -> int:
    return sum(add.upload_info.size for add in files)
