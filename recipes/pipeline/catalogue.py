"""The recipes that come with kvfold: found by name, shown, and copied to be changed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ...common.atomic import output_file
from ...common.errors import UserError, did_you_mean
from ...common.typed import read_table

RECIPES = Path(__file__).parent.parent / "models"
_SUFFIXES = (".yaml", ".yml")
_NOT_RUN = "Not run here"  # how a recipe's head says so


@dataclass(frozen=True)
class Entry:
    """A recipe that comes with kvfold.

    Attributes:
        name: by which it is found.
        title: the first line of its head.
        source: the model that it begins with.
        to: what that is converted to, and the size: `gqa, 8 KV heads` or `mla, 576 numbers a token and layer`.
        was_run: whether what its head expects was measured here.
    """

    name: str
    title: str
    source: str
    to: str
    was_run: bool


def recipe_names() -> list[str]:
    """The names of the recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: a path of the user's, or the name of one that comes with kvfold.

    Raises:
        UserError: it is neither.
    """
    path, names = Path(name), recipe_names()
    if path.exists() and not (path.is_dir() and str(name) in names):  # the folder of a run has the recipe's name
        return path
    if str(name) in names:
        return RECIPES / f"{name}.yaml"
    if path.suffix in _SUFFIXES:
        raise UserError(f"recipe {name} does not exist; kvfold recipes ls names those that come with kvfold")
    raise UserError(f"no recipe {str(name)!r}{did_you_mean(str(name), names)}; a file of yours is named *.yaml")


def is_recipe(name: str) -> bool:
    """Whether a name is meant to be a recipe's rather than a model's."""
    return name in recipe_names() or Path(name).suffix in _SUFFIXES


def entries() -> list[Entry]:
    """All recipes, by name."""
    return [_entry(name) for name in recipe_names()]


def _entry(name: str) -> Entry:
    path = RECIPES / f"{name}.yaml"
    table = read_table(path, missing="")
    head = head_of(path)
    convert = table["convert"]
    size = {
        "kv_heads": "{} KV heads",
        "kv_elements": "{} numbers a token and layer",
        "kv_rank": "a latent of {}",
        "kv_ratio": "{} of the cache",
    }
    said = next(text.format(convert[key]) for key, text in size.items() if key in convert)
    title = head.partition("\n")[0].lstrip("# ")
    return Entry(name, title, table["source"]["model"], f"{convert['to']}, {said}", _NOT_RUN not in head)


def head_of(path: Path) -> str:
    """The comment that a recipe begins with, as it stands there."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(takewhile(lambda line: line.startswith("#"), lines))


def copy_recipe(name: str, folder: Path) -> Path:
    """Copy a recipe that comes with kvfold into a folder, and return the copy.

    Raises:
        UserError: there is no such recipe, or a file of its name stands there.
    """
    if name not in (names := recipe_names()):
        raise UserError(f"no recipe {name!r}{did_you_mean(name, names)}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name the folder to copy to")
    copy = folder / f"{name}.yaml"
    with output_file(copy, overwrite=None) as file:
        file.write((RECIPES / f"{name}.yaml").read_bytes())
    return copy
