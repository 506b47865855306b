"""Hand a result on: everything is looked at here, put together, and written to a folder or brought to the Hub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..common.atomic import Kind, check_output, check_room, output_directory, real_path
from ..common.embedded import EMBEDDED
from ..common.errors import UserError
from ..common.progress import Stages, silent
from ..common.shown import TOKENS
from ..convert.directory import RECORD
from .card import MARKER, card_text
from .contents import (
    Contents,
    check_secrets,
    contents,
    naming_places,
    publishable,
    read_recipe_file,
    take_inventory,
)
from .facts import README, Facts, gather
from .licences import Head, Licence, check_licence, check_name, find_licence, missing_files, read_head
from .upload import MAIN, check_login, check_ref, check_repo_id, upload

_PATIENCE = 10.0  # seconds for the Hub to say something about the base model


@dataclass(frozen=True)
class PublishReport:
    """What was published, or would be.

    Attributes:
        model: the result, as it was named.
        repo_id, revision: the repository, and the branch in it.
        private: whether a repository that had to be made was to be private.
        license: as the Hub spells it, or its own name.
        base_model: id on the Hub; empty where it is not known.
        files, bytes: of all that the repository holds.
        engines: that read the result.
        left_out: files of the result that were not published, each with the reason.
        warnings: what to know before anybody is told of it.
        tag: that was set on it; empty without one.
        url, commit: of what was uploaded; empty after a dry run, as what follows is 0.
        files_changed, bytes_changed: of the files, those that the branch did not have before.
        files_deleted: that the branch had before, and that are none of ours.
        created: whether the repository was made.
        folder: that a dry run wrote.
    """

    model: str
    repo_id: str
    revision: str
    private: bool
    license: str
    base_model: str
    files: int
    bytes: int
    engines: list[str]
    left_out: list[str]
    dry_run: bool
    warnings: list[str]
    tag: str = ""
    url: str = ""
    commit: str = ""
    files_changed: int = 0
    bytes_changed: int = 0
    files_deleted: int = 0
    created: bool = False
    folder: str = ""


def publish(
    out: str | Path,
    repo_id: str,
    *,
    report: str | Path | None = None,
    recipe: str | Path | None = None,
    base_model: str | None = None,
    license: str | None = None,
    accept_license: bool = False,
    private: bool = False,
    revision: str | None = None,
    tag: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    folder: str | Path | None = None,
    progress: Stages = silent,
) -> PublishReport:
    """Publish a result with its model card, or write what would be published.

    Everything on this machine is looked at before the network is.

    Args:
        out: a checkpoint that kvfold wrote.
        repo_id: OWNER/NAME on the Hub; made if it is not there.
        report: the folder of a report with a row of it, whose figures, plot and page go along.
        recipe: the recipe of the pipeline that made it.
        base_model: id of its base model on the Hub, where kvfold.json does not say it.
        license: its licence, where the source's README does not say it.
        accept_license: the user keeps to what the licence asks.
        private: of a repository that is made.
        revision: the branch; main if None.
        tag: to set on the commit.
        overwrite: replace other files that the branch holds; in a dry run, the folder of an earlier one.
        dry_run: write the files to `folder`, and touch no network.
        folder: of a dry run; `out` + ".publish" if None.
        progress: opens a progress for each stage.

    Raises:
        UserError: something cannot be published as it is; see the modules of this folder. Nothing was sent.
        EnvironmentFailure: the Hub cannot be reached, or the disk is full. The same command goes on.
    """
    if not str(out):
        raise UserError("OUT is empty; is a shell variable unset?")
    if folder is not None and not dry_run:
        raise UserError("--folder is where a dry run writes; add --dry-run, or leave it out")
    check_repo_id(repo_id)
    check_ref("--revision", revision)
    check_ref("--tag", tag)
    out = Path(out)
    target = Path(folder) if folder is not None else out.with_name(f"{real_path(out).name}.publish")
    if dry_run:
        _check_folder(out, target, overwrite=overwrite)
    facts = gather(out, base_model=base_model, report=None if report is None else Path(report))
    known = {facts.base} if facts.base else set()
    recipe_text = None if recipe is None else read_recipe_file(Path(recipe), known)
    licence, gated, warnings = _permission(
        str(out),
        repo_id,
        facts.head,
        base=facts.base,
        base_revision=facts.base_revision,
        license=license,
        accepted=accept_license,
        private=private,
        cached=dry_run,
    )

    inventory = take_inventory(out, facts.record, progress=progress)
    figures = None if facts.report is None else publishable(facts.report, known)
    warnings += _doubts(facts, licence, [*inventory.files], inventory.unhashed)
    warnings += [
        f"{name} stays here: it {reason}" for name, reason in inventory.left_out.items() if reason.startswith("looks")
    ]
    card = card_text(facts, licence, repo_id, report=figures, recipe=recipe_text is not None, revision=revision)
    found = contents(
        out,
        facts.record,
        inventory,
        card=card,
        readme=facts.readme,
        terms=licence.terms,
        report=figures,
        recipe=recipe_text,
        known=known,
    )
    check_secrets(found, _secrets())
    if named := naming_places(found, _places(out)):
        warnings.append(f"{', '.join(named)} named folders of this machine when the source came, and still do")
    said: dict[str, Any] = {
        "model": str(out),
        "repo_id": repo_id,
        "private": private,
        "license": licence.label,
        "base_model": facts.base or "",
        "engines": [engine.engine for engine in facts.read_by],
        "left_out": [f"{name} ({reason})" for name, reason in inventory.left_out.items()],
        "dry_run": dry_run,
    }
    if dry_run:
        with progress("writing"):
            _write(found, target, overwrite=overwrite)
        return PublishReport(
            **said,
            revision=revision or MAIN,
            tag=tag or "",
            files=len(found),
            bytes=sum(map(_size, found.values())),
            folder=str(target),
            warnings=warnings,
        )
    check_login()
    if facts.base and not accept_license and not gated and _is_gated(facts.base, open_copy=not private):
        check_licence(licence, accepted=False, gated=True, name=str(out))
    done = upload(
        found,
        repo_id,
        private=private,
        revision=revision,
        tag=tag,
        message=f"Publish {facts.name} by kvfold",
        overwrite=overwrite,
        progress=progress,
        check_last=inventory.check_unchanged,
    )
    return PublishReport(**said | asdict(done) | {"tag": done.tag or "", "warnings": [*warnings, *done.warnings]})


def foresee(
    source: str,
    repo_id: str,
    *,
    kind: Literal["folder", "gguf", "hub"],
    source_revision: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    accept_license: bool = False,
    private: bool = False,
    **others: Any,
) -> None:
    """Refuse, before a result is made, what `publish` would refuse because of its source, its name, or a missing token.

    Args:
        source: what the result will be made of, and the `kind` of source that it is.
        source_revision: of a Hub id.
        others: whatever else is said of the publication, which decides nothing here.

    Raises:
        UserError: see `publish`.
    """
    from .client import hub_client

    check_repo_id(repo_id)
    hub_client()
    head = Head()
    if kind == "folder" and (readme := Path(source) / README).is_file():
        head = read_head(readme.read_bytes())
    _permission(
        source,
        repo_id,
        head,
        base=source if kind == "hub" else base_model,
        base_revision=source_revision if kind == "hub" else None,
        license=license,
        accepted=accept_license,
        private=private,
        cached=False,
    )


def _permission(
    name: str,
    repo_id: str,
    head: Head,
    *,
    base: str | None,
    base_revision: str | None,
    license: str | None,
    accepted: bool,
    private: bool,
    cached: bool,
) -> tuple[Licence, bool, list[str]]:
    """The licence of a model, whether its base is gated as far as is known, and what its name lacks by that licence.

    Args:
        name: of the model, for messages.
        head: of the README that it came with.
        base, base_revision: its base model on the Hub, whose card is asked where nothing else says the licence.
        cached: only as far as the Hub's cache knows it.

    Raises:
        UserError: nobody says what the licence is, or it asks for more than was said.
    """
    card = _head_on_hub(base, base_revision, cached=cached) if base and license is None and not head.license else None
    licence = find_licence(head, given=license, base=base, hub=card, name=name)
    gated = head.gated or (card is not None and card.gated)
    check_licence(licence, accepted=accepted, gated=gated, name=name)
    remark = check_name(licence, repo_id, private=private)
    return licence, gated, [remark] if remark else []


def _doubts(facts: Facts, licence: Licence, files: Sequence[str], unhashed: Sequence[str]) -> list[str]:
    """What the user should know of the result and its licence."""
    found = []
    if facts.head.problem:
        found.append(f"{facts.head.problem}; nothing in it was used")
    if licence.also:
        found.append(f"--license says {licence.terms.id}, and the README.md of the source {licence.also.id}")
    found += [
        f"{licence.terms.title} asks for its {kind} file to go along, and {facts.out} holds none; put it there"
        for kind in missing_files(licence.terms, files)
    ]
    if unhashed:
        found.append(f"{len(unhashed)} files were written with --no-hash, so nothing says whether they are whole")
    if not facts.base and facts.source != EMBEDDED:
        found.append(f"the base model is only known as {facts.source}; if it is on the Hub, say --base-model ID")
    if facts.is_plain:
        found.append("this is the plain form, which only kvfold reads; kvfold convert mla makes an export of it")
    elif not facts.read_by:
        found.append(f"no engine reads it: {facts.engines[0].reason}")
    return found


def _head_on_hub(base: str, revision: str | None, *, cached: bool) -> Head | None:
    """The head of the base model's card; None where it cannot be had. A dry run looks into the Hub's cache only."""
    from huggingface_hub import hf_hub_download

    from ..common.sources import quiet

    try:
        with quiet():
            path = hf_hub_download(base, README, revision=revision, local_files_only=cached)
        return read_head(Path(path).read_bytes())
    except Exception:  # whatever it is, --license says what this would
        return None


def _is_gated(base: str, *, open_copy: bool) -> bool:
    """Whether the base model's repository asks its readers for something; False where that cannot be known.

    Args:
        open_copy: whether everybody may see the copy: a base that only some may see counts as gated then.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError

    try:
        found = HfApi().model_info(base, timeout=_PATIENCE)
        return bool(found.gated or (found.private and open_copy))
    except GatedRepoError:
        return True
    except Exception:
        return False


def _secrets() -> list[str]:
    """The tokens that this machine has for the Hub."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import get_stored_tokens

    kept = [get_token(), *get_stored_tokens().values(), *map(os.environ.get, TOKENS)]
    return [token for token in kept if token]


def _places(out: Path) -> set[str]:
    """Folders of this machine that nobody else should read of; those that are everywhere tell nothing."""
    found = {str(Path.home()), str(real_path(out).parent), str(Path.cwd())}
    return {f"{place}/" for place in found if place.count("/") > 1}


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _is_published(folder: Path) -> bool:
    """Whether a directory is what a dry run wrote."""
    try:
        return (folder / RECORD).is_file() and MARKER in (folder / README).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


PUBLISHED = Kind("the folder of an earlier kvfold publish --dry-run", _is_published)


def _check_folder(out: Path, target: Path, *, overwrite: bool) -> None:
    ours, theirs = real_path(out), real_path(target)
    if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
        raise UserError(f"--folder {target} and {out} lie inside one another; choose a folder elsewhere")
    check_output(target, overwrite=overwrite, kind=PUBLISHED)


def _write(found: Contents, target: Path, *, overwrite: bool) -> None:
    """Write what would be uploaded; large files as links to ours where the file system allows.

    Raises:
        UserError: see `check_output`.
        OSError: the disk failed. Nothing half-written is left.
    """
    weights = {name for name in found if name.endswith(".safetensors")}
    with output_directory(target, overwrite=overwrite, kind=PUBLISHED) as staging:
        for name, content in found.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
                continue
            if name in weights and _linked(content, path):
                continue
            check_room(staging, _size(content))
            shutil.copyfile(content, path)


def _linked(content: Path, path: Path) -> bool:
    try:
        path.hardlink_to(real_path(content))
    except OSError:
        return False
    return True
