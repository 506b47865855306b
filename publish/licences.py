"""The licence of a result, which is that of its source, and what it asks of whoever hands it on.

The table is licences.json: by the Hub's names, and by the `license_name` of those that the Hub calls `other`. A row has
a `kind` (`free`; `share-alike`, which is named and carried; `conditional`, which needs --accept-license), what it
`asks` in one line of ours, the `files` that have to go along (`licence`, `notice`), the `notice` that a file must hold
word by word, what has to be shown (`built_with`), and how the name has to begin (`prefix`). Rows that are alike have
their `terms` in common. What is not in the table is `unknown`. None of it is legal advice: the licence itself counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..common.errors import UserError, did_you_mean
from ..common.typed import load_yaml
from ..eval.report.plain import plain
from .words import HUB_ID

_TABLE = json.loads(Path(__file__).with_name("licences.json").read_text(encoding="utf-8"))
_LONGEST_HEAD = 1 << 20  # bytes of a README that its head is looked for in
_HEAD = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,8})?|code|multilingual")
_MOST_LANGUAGES = 200
# What the files that a licence asks for are called.
FILES = {
    "licence": re.compile(r"(?i)(licen[cs]e|copying|terms|agreement|.*[-_](licen[cs]e|terms))([-_.].*)?"),
    "notice": re.compile(r"(?i)(notice|attribution)([-_.].*)?"),
    "policy": re.compile(r"(?i)(use_policy|.*prohibited_use.*|acceptable_use.*)([-_.].*)?"),
}
NOTICE = "NOTICE"
GIVEN = "--license"  # where a licence was found that the user said


@dataclass(frozen=True)
class Terms:
    """A row of the table.

    Attributes:
        id: the Hub's name, or the `license_name`.
        title: what people call it.
        kind: `free`, `share-alike` or `conditional`.
        asks: in one line of our own.
        hub: whether the Hub knows the name; `other` stands there for the rest.
        files: kinds of files, of `FILES`, that have to go along.
        notice: what a notice file has to hold; None if nothing is set.
        built_with: what has to be shown where the model is described.
        prefix: what the model's name has to begin with.
        link: of its text, where there is one for all.
    """

    id: str
    title: str
    kind: str
    asks: str
    hub: bool = False
    files: tuple[str, ...] = ()
    notice: str | None = None
    built_with: str | None = None
    prefix: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class Head:
    """What the head of a README says; each is empty where it says nothing that can be used.

    Attributes:
        gated: whether the source asked its readers for something, which a copy would not.
        problem: why the head could not be read.
    """

    license: str = ""
    license_name: str = ""
    license_link: str = ""
    language: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    gated: bool = False
    problem: str = ""


@dataclass(frozen=True)
class Licence:
    """The licence of a result.

    Attributes:
        terms: what it asks.
        name: the `license_name` of one that the Hub calls `other`.
        link: where its text is, if that was said.
        found: where it was.
        also: terms that the source's card names where --license says otherwise.
    """

    terms: Terms
    name: str | None = None
    link: str | None = None
    found: str = ""
    also: Terms | None = field(default=None)

    @property
    def id(self) -> str:
        """As the Hub spells it."""
        return self.terms.id if self.terms.hub else "other"

    @property
    def is_free(self) -> bool:
        return all(terms.kind != "conditional" for terms in (self.terms, self.also) if terms)

    @property
    def label(self) -> str:
        return self.name or self.terms.id


def terms_of(license: str, name: str = "") -> Terms:
    """The row of a licence by its name on the Hub; where that is `other`, by its `license_name`."""
    key = _key(name) if _key(license) in ("other", "") and name else _key(license)
    key = _TABLE["also"].get(key, key)
    row = _TABLE["licences"].get(key)
    if row is None:
        row, key = {"title": name or license, "terms": "unknown"}, key or "other"
    row = {**_TABLE["terms"].get(row.get("terms"), {}), **row}
    row.pop("terms", None)
    return Terms(id=key, **row | {"files": tuple(row.get("files", ()))})


def nearest(terms: Terms) -> str:
    """`; did you mean X?` of terms that the table does not have, where it has a name like theirs."""
    if terms.id in _TABLE["licences"]:
        return ""
    near = did_you_mean(terms.id, [*_TABLE["licences"], *_TABLE["also"]])
    return near if near.startswith("; did") else ""  # all of them fill a page


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.+-]+", "-", name.strip().lower()).strip("-")


def read_head(readme: bytes) -> Head:
    """What a README's YAML head says; it is somebody else's file, and may hold anything."""
    found = _HEAD.match(readme[:_LONGEST_HEAD].decode("utf-8-sig", errors="replace"))
    if not found:
        return Head()
    try:
        table = load_yaml(found[1], "the head of README.md")
    except UserError as error:
        return Head(problem=plain(str(error)))
    if not isinstance(table, Mapping):
        return Head(problem="the head of README.md is no table of keys and values")
    licences = _texts(table.get("license"))
    if len(licences) > 1:  # any of them, or all: the Hub does not say
        return Head(problem=f"the head of README.md names {len(licences)} licences")
    return Head(
        license=licences[0] if licences else "",
        license_name=next(iter(_texts(table.get("license_name"))), ""),
        license_link=next(iter(_texts(table.get("license_link"))), ""),
        language=tuple(one for one in _texts(table.get("language")) if _LANGUAGE.fullmatch(one))[:_MOST_LANGUAGES],
        datasets=tuple(one for one in _texts(table.get("datasets")) if HUB_ID.fullmatch(one)),
        gated=any(str(key).startswith("extra_gated") for key in table),
    )


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [plain(one.strip())[:200] for one in values if isinstance(one, str) and one.strip()]


def find_licence(
    head: Head, *, given: str | None = None, base: str | None = None, hub: Head | None = None, name: str = "the result"
) -> Licence:
    """The licence of a result: the one given, else that of its source's README, else that of its base's card.

    Args:
        given: by --license.
        base: id of the base model on the Hub.
        hub: the head of its card there, if it was looked for and found.
        name: of the result.

    Raises:
        UserError: there is none anywhere.
    """
    card = _said(head, base, "the README.md of its source")
    if given is not None:
        if not _key(given):
            raise UserError(f"--license {given!r} names none; give one such as apache-2.0, or the name of another")
        terms = terms_of(given)
        also = card.terms if card and card.terms.id != terms.id else None
        return Licence(terms, None if terms.hub else _key(given), terms.link, GIVEN, also)
    found = card or (_said(hub, base, f"the card of {base} on the Hub") if hub else None)
    if found is None:
        why = f" ({head.problem})" if head.problem else ""
        raise UserError(
            f"nothing says under which licence the source of {name} is{why}; look at where it came from, and say it "
            "with --license ID"
        )
    return found


def _said(head: Head, base: str | None, where: str) -> Licence | None:
    if not head.license:
        return None
    terms = terms_of(head.license, head.license_name)
    link = head.license_link or terms.link
    if link and not re.match(r"https?://\S+\Z", link):  # a file of the source's
        file = PurePosixPath(link).name
        link = f"https://huggingface.co/{base}/blob/main/{file}" if base and re.fullmatch(r"[\w.-]+", file) else None
    named = terms.id if not terms.hub else _key(head.license_name) if terms.id == "other" else None
    return Licence(terms, named or None, link, where)


def check_licence(licence: Licence, *, accepted: bool, gated: bool, name: str) -> None:
    """Refuse to hand on what has conditions that nobody has said yes to.

    Args:
        accepted: --accept-license.
        gated: whether the base model's repository asks its readers for something.
        name: of the result.

    Raises:
        UserError: names the licence and what it asks.
    """
    if accepted or (licence.is_free and not gated):
        return
    terms = licence.also if licence.also and licence.also.kind == "conditional" else licence.terms
    where = "the README.md of its source" if terms is licence.also else licence.found
    doors = "; its source is gated or private: a copy that anybody may load needs its owners' leave" if gated else ""
    raise UserError(
        f"{name} is under {plain(terms.title)} ({terms.id}, says {where}). It asks: "
        f"{terms.asks}{doors}. If you have read it and keep to it, say --accept-license{nearest(terms)}"
    )


def check_name(licence: Licence, repo_id: str, *, private: bool) -> str | None:
    """Hold the repository's name against what the licence asks of names.

    Returns:
        What to warn of where nobody but the owner sees it.

    Raises:
        UserError: everybody would.
    """
    prefix = licence.terms.prefix
    if prefix is None or _bare(repo_id.rpartition("/")[2]).startswith(_bare(prefix)):
        return None
    owner, slash, own = repo_id.rpartition("/")
    wrong = f"{licence.terms.title} asks for names that begin with {prefix}, and this is {own}"
    if private:
        return f"{wrong}; rename it before you make it public"
    raise UserError(f"{wrong}; call the repository {owner}{slash}{prefix}-{own}, or so")


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def missing_files(terms: Terms, names: Iterable[str]) -> list[str]:
    """Which of the files that a licence asks to be given along are not among these."""
    there = [PurePosixPath(name).name for name in names]
    return [kind for kind in terms.files if not any(FILES[kind].fullmatch(name) for name in there)]


def is_licence_file(name: str) -> bool:
    """Whether a file is a licence, a notice or a policy, which has to go along."""
    return "/" not in name and any(pattern.fullmatch(name) for pattern in FILES.values())
