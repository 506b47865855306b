"""What goes into the repository: files of the result that are what kvfold.json says, and what is written for it.

Nothing goes that kvfold did not write or copy, but for licences that somebody put beside the result; and of what it
copied, nothing that is hidden, runs as it is loaded, or looks like a credential. What is left out is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from ..common.errors import UserError
from ..common.progress import Stages, silent
from ..common.sources import first_line
from ..common.typed import load_yaml
from ..convert.checkpoint import Checkpoint
from ..convert.directory import RECORD
from ..convert.sidefiles import check_link, hash_files
from ..eval.report.record import Report
from ..eval.report.write import report_files
from .facts import README, SOURCE_README
from .licences import NOTICE, Terms, is_licence_file, missing_files
from .words import is_local, mapped, public_name, without_folders

Contents = dict[str, Path | bytes]
"""Path in the repository -> a file here, or what stands in it."""

REPORT_FOLDER = "kvfold-report"
RECIPE = "recipe.yaml"
_OURS = (SOURCE_README, RECIPE)  # that a source may have been published with; those of the result are others
_CODE = frozenset(
    {".py", ".pyc", ".so", ".pkl", ".pickle", ".bin", ".pt", ".pth", ".ckpt", ".joblib", ".dill", ".npy", ".npz"}
)
_CREDENTIALS = re.compile(
    r"(?i)\.env(\..*)?|.*\.(env|key|pem|p12|pfx|jks|keystore|kdbx|ppk)|[._]netrc|\.htpasswd|\.pypirc|\.git-credentials"
    r"|(hf_?|hub_?|api_?|auth_?|access_?|stored_?)*(tokens?|keys?)(\.(txt|json|ya?ml|ini))?"
    r"|(.*_)?(credentials?|secrets?|passwords?)(\..*)?|client_secret.*|service_account.*|id_(rsa|dsa|ecdsa|ed25519).*"
)
_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{34}\b")  # as the Hub makes them
_LONGEST_SECRET = 1 << 12  # bytes
_RUN = ".run"  # of the folders that uptraining works in
_HIDDEN, _RUNS, _CREDENTIAL, _STRANGE, _STALE = (
    "hidden",
    "may run code when it is loaded",
    "looks like a credential",
    "kvfold did not write it",
    "was published with the source",
)


@dataclass(frozen=True)
class Inventory:
    """What is in the directory of a result.

    Attributes:
        files: that are to be published, by their names in it, kvfold.json and README.md not among them.
        left_out: the others, each with the reason; folders end in a slash.
        unhashed: files that kvfold.json has no hash of, because of --no-hash.
        states: of each file before it was looked at, see `_state`.
    """

    files: dict[str, Path]
    left_out: dict[str, str]
    unhashed: tuple[str, ...]
    states: dict[str, tuple[int, ...]]

    def check_unchanged(self) -> None:
        """Refuse files that somebody wrote to since they were looked at.

        Raises:
            UserError: names one.
        """
        for name, path in self.files.items():
            if _state(path) != self.states[name]:
                raise UserError(f"{path} was changed while it was being published; run the same command again")


def take_inventory(out: Path, record: Mapping[str, Any], *, progress: Stages = silent) -> Inventory:
    """Look through the directory of a result, and hold its files against the hashes of its kvfold.json.

    Raises:
        UserError: a file is missing or was changed, or weights are there that kvfold.json does not list.
    """
    listed: Mapping[str, Mapping[str, Any]] = record["files"]
    files: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    for name, path in _walk(out, listed, left_out):
        if name == RECORD or (name == README and name not in listed):  # the card of an earlier publication
            continue
        if reason := _reason(name, listed) or (_STRANGE if path.is_symlink() and name not in listed else None):
            left_out[name] = reason
        else:
            files[name] = path
    if absent := [name for name in listed if name not in files and name not in left_out]:
        raise UserError(f"{out} lacks {absent[0]}, which its {RECORD} lists; convert its source again")
    if strange := sorted(Checkpoint.open(out).files - files.keys()):
        raise UserError(f"{out} holds {strange[0]}, of which its {RECORD} knows nothing; convert its source again")
    unhashed = []
    states = {name: _state(path) for name, path in files.items()}
    with progress("checking the files") as advance:
        for number, (name, path) in enumerate(files.items(), 1):
            said = listed.get(name, {}).get("xxh3_128")
            if not isinstance(said, str):
                check_link(out, path)  # whoever wrote kvfold.json may have pointed it at anything of the user's
                unhashed.append(name)
            elif hash_files(out, [name], hashing=True)[name] != said:
                raise UserError(
                    f"{path} is not as kvfold wrote it: its hash is another than in {RECORD}; convert the source again"
                )
            advance(number, len(files))
    return Inventory(files, left_out, tuple(name for name in unhashed if name in listed), states)


def _state(path: Path) -> tuple[int, ...]:
    """What of a file is another once it is written to."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _walk(
    folder: Path, listed: Collection[str], left_out: dict[str, str], inside: str = ""
) -> Iterator[tuple[str, Path]]:
    """Every file, by its name; folders in which nothing is looked for are left out as wholes."""
    for path in sorted((folder / inside).iterdir()):
        name = f"{inside}{path.name}"
        if not path.is_dir():
            if path.is_file() or path.is_symlink():
                yield name, path
            else:
                left_out[name] = _STRANGE  # a pipe, a socket
            continue
        if path.name.startswith("."):
            left_out[f"{name}/"] = _HIDDEN
        elif path.name.endswith(_RUN):
            left_out[f"{name}/"] = "the folder of a run"
        elif path.name == REPORT_FOLDER and not inside:
            left_out[f"{name}/"] = _STALE
        elif path.is_symlink():
            left_out[f"{name}/"] = _STRANGE
        else:
            yield from _walk(folder, listed, left_out, f"{name}/")


def _reason(name: str, listed: Collection[str]) -> str | None:
    """Why a file stays here; None if it goes."""
    last = PurePosixPath(name).name
    if _CREDENTIALS.fullmatch(last):
        return _CREDENTIAL
    if last.startswith("."):
        return _HIDDEN
    if PurePosixPath(name).suffix.lower() in _CODE:
        return _RUNS
    if name == RECIPE or (name == SOURCE_README and README in listed):
        return _STALE
    if name not in listed and not is_licence_file(name):
        return _STRANGE
    return None


def contents(
    out: Path,
    record: Mapping[str, Any],
    inventory: Inventory,
    *,
    card: str,
    readme: str | None,
    terms: Terms,
    report: Report | None = None,
    recipe: bytes | None = None,
    known: Collection[str] = (),
) -> Contents:
    """What the repository will hold.

    Args:
        out: the result.
        record: its kvfold.json.
        inventory: its files.
        card: the model card.
        readme: which of them is the README of its source.
        terms: of the licence; where they set a notice that no file holds, one is added.
        report: figures to be shown, made `publishable`.
        recipe: the recipe of a pipeline, made publishable.
        known: ids of the Hub.
    """
    found: Contents = {name: path for name, path in inventory.files.items() if name != readme}
    found |= {README: card.encode(), RECORD: _to_json(_public_record(record, inventory, readme, known))}
    if readme:
        found[SOURCE_README] = inventory.files[readme]
    if terms.notice and "notice" in missing_files(replace(terms, files=("notice",)), found):
        found[NOTICE] = f"{terms.notice}\n".encode()
    if report is not None:
        found |= {f"{REPORT_FOLDER}/{name}": content for name, content in _files_of(report).items()}
    if recipe is not None:
        found[RECIPE] = recipe
    return dict(sorted(found.items()))


def _files_of(report: Report) -> dict[str, bytes]:
    """A report's page and pictures, drawn anew: somebody may have put anything into those of its folder.

    Raises:
        UserError: its figures do not fit together.
    """
    try:
        return report_files(report)
    except Exception as error:  # each figure is of the right kind; what else is wrong shows only as it is drawn
        raise UserError(
            f"the figures of the report do not fit together ({type(error).__name__}: {first_line(error)}); make it "
            "again with kvfold report"
        ) from error


def _to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _public_record(
    record: Mapping[str, Any], inventory: Inventory, readme: str | None, known: Collection[str]
) -> dict[str, Any]:
    """kvfold.json as it is published: with the files that go, by the names that they get, and without folders."""
    files = {name: row for name, row in record["files"].items() if name in inventory.files}
    if readme and readme in files:
        files[SOURCE_README] = files.pop(readme)
    public = public_history(record, known)
    return {**public, "files": dict(sorted(files.items()))}


def public_history(record: Any, known: Collection[str] = ()) -> Any:
    """A kvfold.json, and those in it, without the folders that anything lay in."""
    if not isinstance(record, dict):
        return None
    found = {key: value for key, value in record.items() if key not in ("recipe", "asked", "source")}
    for key in ("recipe", "asked"):
        if key in record:
            found[key] = public_recipe(record[key], known)
    if isinstance(source := record.get("source"), dict):
        name = source.get("name")
        hub = isinstance(source.get("revision"), str)
        found["source"] = {
            **mapped({key: value for key, value in source.items() if key != "record"}, without_folders),
            "name": public_name(name, {name} if hub else known) if isinstance(name, str) else "the source",
        }
        if "record" in source:
            found["source"]["record"] = public_history(source["record"], known)
    return {key: found[key] for key in record if key in found}


# What a recipe names by a path, an id of the Hub or the name of a text. Conversions and runs leave folders out as they
# record them, as far as a name led to something then; ids of models stay.
_PATHS = frozenset({"init_from", "stats", "data", "calib", "kinds", "held_out"})


def public_recipe(recipe: Any, known: Collection[str] = ()) -> Any:
    """A recipe without folders."""
    if not isinstance(recipe, dict):
        return mapped(recipe, without_folders)
    return {
        key: mapped(value, lambda text: public_name(text, known)) if key in _PATHS else public_recipe(value, known)
        for key, value in recipe.items()
    }


def publishable(report: Report, known: Collection[str] = ()) -> Report:
    """A report without the folders of this machine, in which its models, texts and runs lay.

    Args:
        known: ids of the Hub, which stay.
    """

    def say(name: str) -> str:
        return public_name(name, known)

    places = [row.model for row in report.results] + [run.run for run in report.uptraining]
    places += [report.model, *report.protocol.texts, *(_folder_of(report))]
    longest = sorted({place for place in places if say(place) != place}, key=len, reverse=True)

    def clean(text: str) -> str:
        for place in longest:
            text = text.replace(place, say(place))
        return without_folders(text)

    results = [
        replace(row, model=say(row.model), reason=clean(row.reason), made_by=[*map(clean, row.made_by)])
        for row in report.results
    ]
    return replace(
        report,
        title=clean(report.title),
        model=say(report.model),
        results=results,
        verdict=replace(
            report.verdict,
            text=clean(report.verdict.text),
            next=clean(report.verdict.next),
            command=clean(report.verdict.command),
        ),
        protocol=replace(report.protocol, texts=tuple(map(say, report.protocol.texts))),
        uptraining=[
            replace(run, run=say(run.run), held_out=[replace(one, text=say(one.text)) for one in run.held_out])
            for run in report.uptraining
        ],
        commands=[*map(clean, report.commands)],
        warnings=[*map(clean, report.warnings)],
    )


def _folder_of(report: Report) -> list[str]:
    """Where the report was written to, which its commands say."""
    return [found[1] for line in report.commands if (found := re.search(r" -o ([^\s'\"]+)", line))]


def read_recipe_file(path: Path, known: Collection[str] = ()) -> bytes:
    """The recipe of a pipeline as it is published: as it stands, comments too, with paths of this machine shortened.

    Raises:
        UserError: it cannot be read, or is no recipe.
    """
    import yaml

    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read the recipe {path} ({error.strerror}); name a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"the recipe {path} is not UTF-8 text; name a YAML file") from None
    if not isinstance(load_yaml(text, str(path)), Mapping):
        raise UserError(f"{path} is no recipe: it is not a table of sections")
    for node in sorted(_scalars(yaml.compose(text, Loader=yaml.BaseLoader)), key=lambda n: -n.start_mark.index):
        if node.style in (None, "'", '"') and node.value not in known and is_local(node.value):
            name = json.dumps(PurePath(node.value).name, ensure_ascii=False)
            text = text[: node.start_mark.index] + name + text[node.end_mark.index :]
    return without_folders(text).encode()


def _scalars(node: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Every scalar of a YAML document, once each: aliases lead to what was seen."""
    seen = set() if seen is None else seen
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node.value, str):
        yield node
        return
    for one in node.value:
        for part in one if isinstance(one, tuple) else (one,):
            yield from _scalars(part, seen)


def check_secrets(found: Contents, secrets: Collection[str]) -> None:
    """Refuse to hand on a token, wherever it got to; weights are not looked through.

    Args:
        secrets: that must stay here; short ones are no secrets.

    Raises:
        UserError: names the file, and not the token.
    """
    ours = [secret.encode(errors="surrogateescape") for secret in secrets if len(secret) >= 8]
    for name, content in found.items():
        if name.endswith(".safetensors"):
            continue
        for piece in _pieces(content):
            if any(secret in piece for secret in ours):
                raise UserError(
                    f"{name} holds your token for the Hub; take it out where it came from, and revoke the token"
                )
            if _TOKEN.search(piece):
                raise UserError(f"{name} holds what looks like a token of the Hub; take it out where it came from")


def _pieces(content: Path | bytes) -> Iterator[bytes]:
    """All of a file, each piece with the end of the one before it."""
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        end = b""
        while piece := file.read(1 << 20):
            yield end + piece
            end = piece[-_LONGEST_SECRET:]


def naming_places(found: Contents, places: Collection[str]) -> list[str]:
    """The files that name a folder of this machine all the same: they came with the source as they are."""
    return [name for name, text in _readable(found) if any(place.encode() in text for place in places)]


_READABLE = frozenset({".json", ".md", ".txt", ".yaml", ".yml", ".html", ".jinja", ".py", ".sh", ".cfg", ".toml", ""})
_LARGEST_READ = 64 << 20


def _readable(found: Contents) -> Iterator[tuple[str, bytes]]:
    for name, content in found.items():
        if isinstance(content, bytes):
            yield name, content
        elif PurePosixPath(name).suffix.lower() in _READABLE and content.stat().st_size <= _LARGEST_READ:
            yield name, content.read_bytes()
