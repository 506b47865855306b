"""A recipe of a whole pipeline: a section for each stage, read and checked before anything is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.embedded import named_model
from ...common.errors import UserError, did_you_mean
from ...common.text import NO_TEXT, check_text
from ...common.typed import at_home, plain_key, read_table, split_pair, typed, typed_table, written
from ...uptrain.recipe import SOURCE, Recipe, read_recipe, teach
from .catalogue import find_recipe, head_of
from .keys import NEEDED, SECTIONS, keys_of

_TEXTS = ("text", "data", "eval_text", "calib")  # keys that name texts
_PATHS = frozenset({*_TEXTS, "model", "stats", "include_path", "task"})  # keys that may name a path
_MISSING = "kvfold recipes ls names those that come with kvfold, or give a YAML file"


@dataclass(frozen=True)
class Pipeline:
    """A recipe with a section for each stage.

    Attributes:
        name: what to call its folder: the file's name without suffix.
        head: the comment that the file begins with, as it stands there.
        sections: the values of each section, typed; keys as in `keys.SECTIONS`.
    """

    name: str
    head: str
    sections: dict[str, dict[str, Any]]

    @property
    def model(self) -> str:
        """What the pipeline begins with, as a command takes it."""
        return named_model(self.sections[SOURCE]["model"])

    @property
    def revision(self) -> str | None:
        return self.sections[SOURCE].get("revision")

    def uptraining(self, model: str, out: str) -> Recipe:
        """The uptraining, of `model` to `out`.

        Raises:
            UserError: its values are out of range, or contradict each other.
        """
        section = teach(self.sections["uptrain"], self.sections[SOURCE])
        return Recipe(model=model, out=out, **section)


def read_pipeline(name: str | Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Read the recipe of a pipeline.

    Args:
        name: of a recipe that comes with kvfold, or a YAML file.
        overrides: ``section.key=value``; a later one wins over an earlier one and the file. A list is ``[a, b]``.

    Raises:
        UserError: there is no such recipe, a section or a key is unknown or stands there twice, a value is of the wrong
            type or out of range, or something is missing.
    """
    path = find_recipe(name)
    table = read_table(path, missing=_MISSING)
    if is_flat(table):
        raise UserError(f"{path} is a recipe of an uptraining alone; kvfold uptrain runs it")
    return assemble(table, overrides, name=path.stem, head=head_of(path), where=f"{path}: ")


def assemble(
    table: Mapping[str, Any], overrides: Sequence[str] = (), *, name: str, head: str = "", where: str = ""
) -> Pipeline:
    """The pipeline that sections and overrides say.

    Args:
        table: a table for each section, its values as YAML gives them.
        overrides: see `read_pipeline`.
        name, head: of the pipeline.
        where: what stands before an error.

    Raises:
        UserError: see `read_pipeline`.
    """
    pairs = [_split(pair) for pair in overrides]
    said = {section: _section(where, section, part) for section, part in table.items()}
    asked = [text for section, key, text, _ in pairs if (section, key) == ("convert", "to")]
    to = asked[-1] if asked else said.get("convert", {}).get("to")
    sections: dict[str, dict[str, Any]] = {}
    for section, part in said.items():
        sections[section] = typed_table(part, keys_of(section, to, where), where, f"{section}.")
    for section, key, text, pair in pairs:
        known = keys_of(section, to)
        if key not in known:
            raise UserError(f"unknown key {key!r} in {pair!r}{did_you_mean(key, known)}")
        value = typed(f"{section}.{key}", written(key, text, known[key]), known[key])
        sections.setdefault(section, {})[key] = value
    ordered = {name: _at_home(sections.get(name, {})) for name in SECTIONS if name in sections or name == SOURCE}
    pipeline = Pipeline(name, head, ordered)
    _check(pipeline, where)
    return pipeline


def is_flat(table: Mapping[str, Any]) -> bool:
    """Whether a table is of one uptraining, without sections."""
    return "model" in table or "out" in table


def validate(name: str | Path, overrides: Sequence[str] = ()) -> list[str]:
    """Check a recipe of either kind, of a whole pipeline or of an uptraining alone, and return its sections.

    Raises:
        UserError: see `read_pipeline` and `uptrain.recipe.read_recipe`.
    """
    path = find_recipe(name)
    if is_flat(read_table(path, missing=_MISSING)):
        read_recipe(path, overrides)
        return ["uptrain"]
    return list(read_pipeline(name, overrides).sections)


def _split(pair: str) -> tuple[str, str, str, str]:
    """Section, key, text, and the pair that they are of."""
    name, text = split_pair(pair)
    section, dot, key = name.partition(".")
    if not dot:
        having = [known for known in SECTIONS if plain_key(name) in SECTIONS[known]]
        near = f"; {' or '.join(f'{one}.{plain_key(name)}=...' for one in having)}" if having else ""
        raise UserError(f"{pair!r} names no section; write section.key=value{near}")
    return plain_key(section), plain_key(key), text, pair


def _section(where: str, section: Any, part: Any) -> dict[str, Any]:
    """A section as it stands there; one without a line below it is there all the same."""
    if section not in SECTIONS:
        raise UserError(f"{where}unknown section {section!r}{did_you_mean(str(section), SECTIONS)}")
    if part in ("", None):
        return {}
    if not isinstance(part, dict):
        raise UserError(f"{where}the section {section} is not a table; write its keys below it, one a line")
    return part


def _at_home(part: dict[str, Any]) -> dict[str, Any]:
    """A section in which ~ is home, where a path may stand."""
    return {key: at_home(value) if key in _PATHS else value for key, value in part.items()}


def _check(pipeline: Pipeline, where: str) -> None:
    """Hold the sections to what only all of them together say, and what would be found out too late.

    Raises:
        UserError: names what is missing or wrong.
    """
    sections = pipeline.sections
    if not sections[SOURCE].get("model"):
        raise UserError(f"{where}source.model is missing; name a directory, a GGUF file, a Hub id, or embedded")
    if not sections.get("convert", {}).get("to"):
        raise UserError(f"{where}convert.to is missing; one of {', '.join(NEEDED)}")
    to = sections["convert"]["to"]
    if not any(key in sections["convert"] for key in NEEDED[to]):
        wanted = " or ".join(f"convert.{key}" for key in NEEDED[to])
        raise UserError(f"{where}convert.to is {to} and its size is missing; write {wanted}")
    if "calibrate" in sections and (also := [key for key in ("stats", "calib") if key in sections["convert"]]):
        raise UserError(f"{where}convert.{also[0]} and a section calibrate contradict each other; leave one out")
    if "tasks" in sections and not sections["tasks"].get("task"):
        raise UserError(f"{where}tasks.task is missing; name at least one task")
    if "eval" in sections and not sections["eval"].get("text"):
        raise UserError(f"{where}eval.text is missing; give a file, builtin, or hub:NAME")
    if "uptrain" in sections:
        with _said_of(f"{where}uptrain: "):
            pipeline.uptraining("converted", "healed")
    for section, part in sections.items():
        for key in _TEXTS:
            for text in part.get(key, ()):
                if key == "calib" and text == NO_TEXT:
                    continue
                with _said_of(f"{where}{section}.{key}: "):
                    check_text(text)


@contextmanager
def _said_of(where: str) -> Iterator[None]:
    """Put the place in front of what is wrong there."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}{error}") from None
