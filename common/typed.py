"""Tables of values that a user writes, in YAML or as ``key=value``, by what each key takes.

YAML 1.1 reads ``1e-4`` as text, ``no`` as false, ``010`` as eight and ``12:30`` as 750. So no value is guessed
from how it looks: every scalar is taken as the text that stands there, and the key says what it must be. A value on
the command line goes the same way.
"""

from __future__ import annotations

import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .errors import UserError, did_you_mean

MOST = 2**53  # more of anything than a machine holds, and exact as a float

_LONGEST = 255  # bytes of a file's name
_LARGEST = 1 << 20  # bytes of a recipe
_DEEPEST = 20  # brackets in brackets; every one makes all that follows slower to read

Rule = tuple[Callable[[Any], bool], str]
"""What a number must be, and how to say it."""

AT_LEAST_1: Rule = (lambda x: x >= 1, "at least 1")
AT_LEAST_0: Rule = (lambda x: x >= 0, "at least 0")
POSITIVE: Rule = (lambda x: x > 0, "more than 0")


@dataclass(frozen=True)
class Kind:
    """What a key takes: values of ``of``; several of them if ``many``; nothing at all if ``optional``.

    Each is one of ``choices``, if there are any, and as ``rule`` says.
    """

    of: type
    many: bool = False
    optional: bool = False
    choices: tuple[str, ...] = ()
    rule: Rule | None = None


@cache
def kinds_of(table: type) -> dict[str, Kind]:
    """The kind of each field of a dataclass, from its annotation."""
    kinds = {}
    for name, hint in typing.get_type_hints(table).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        inner = next(option for option in options if option is not types.NoneType)
        many = typing.get_origin(inner) is tuple
        of = typing.get_args(inner)[0] if many else inner
        kinds[name] = Kind(of, many, types.NoneType in options)
    return kinds


def read_table(path: Path, *, missing: str) -> dict[str, Any]:
    """The table in a YAML file, its scalars as text.

    Args:
        missing: what to do if there is no such file.

    Raises:
        UserError: there is none, or it holds no table.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for, and a device has no end
        raise UserError(f"{path} is a {'directory' if path.is_dir() else 'device'}; give a recipe's YAML file")
    try:
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path} is larger than any recipe; give a recipe's YAML file")
        loaded = load_yaml(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise UserError(f"recipe {path} does not exist; {missing}") from None
    if loaded in ("", None):
        return {}
    if not isinstance(loaded, dict):
        raise UserError(f"{path} is not a table of keys and values; write one key: value a line")
    return loaded


def load_yaml(text: str | bytes, where: str) -> Any:
    """YAML with every scalar as the text that stands there.

    Raises:
        UserError: it is not YAML, or says a key twice.
    """
    import yaml

    class Loader(yaml.BaseLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        line = key.start_mark.line + 1
                        raise UserError(f"{where}: the key {key.value!r} stands there twice (line {line}); remove one")
                    seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

        def fetch_flow_collection_start(self, token: type) -> None:
            if self.flow_level == _DEEPEST:
                raise UserError(f"{where} is not YAML as recipes have it: brackets are nested too deep; write fewer")
            super().fetch_flow_collection_start(token)

    try:
        return yaml.load(text, Loader=Loader)  # makes text, lists and tables only
    except yaml.MarkedYAMLError as error:
        at = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise UserError(f"{where} is not YAML: {error.problem}{at}") from None
    except (yaml.YAMLError, RecursionError):  # of the latter two: bytes that are no text, and nesting without end
        raise UserError(f"{where} is not YAML in UTF-8; write it as text") from None


def plain_key(key: Any) -> str:
    """A key as Python spells it: flags have hyphens, and may be written so."""
    return str(key).strip().replace("-", "_")


def typed_table(table: Mapping[Any, Any], known: Mapping[str, Kind], where: str, section: str = "") -> dict[str, Any]:
    """A table of texts as the values that its keys take.

    Args:
        where: what an error begins with, such as the file's name and a colon.
        section: what the keys are called by there, such as `convert.`.

    Raises:
        UserError: a key is unknown or stands there in two spellings, or a value is of the wrong type.
    """
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = plain_key(key)
        if name not in known:
            raise UserError(f"{where}unknown key {f'{section}{key}'!r}{did_you_mean(name, known)}")
        if name in values:
            raise UserError(f"{where}the key {name!r} stands there twice, once with hyphens; remove one")
        values[name] = typed(f"{where}{section}{key}", value, known[name])
    return values


def split_pair(pair: str) -> tuple[str, str]:
    """The key and the text of ``key=value``.

    Raises:
        UserError: there is no equals sign.
    """
    key, equals, text = pair.partition("=")
    if not equals:
        raise UserError(f"{pair!r} is not a pair; write key=value")
    return key.strip(), text.strip()


def written(key: str, text: str, kind: Kind) -> Any:
    """A value of the command line: text as it stands, unless a list or quotes are written."""
    if text[:1] in ('"', "'") or (kind.many and text.startswith("[")):
        return load_yaml(text, f"the value of {key}")
    return text


def typed(name: str, value: Any, kind: Kind) -> Any:
    """Text, or a list of texts, as the values that a key takes.

    Raises:
        UserError: names the key, and what it must be.
    """
    if kind.optional and value in ("", "~", "null"):
        return None
    items = value if kind.many and isinstance(value, list) else [] if kind.many and value == "" else [value]
    values = tuple(_scalar(name, item, kind.of) for item in items)
    for one in values:
        check_sane(name, one)
        check_rule(name, one, kind.rule)
        check_choice(name, one, kind.choices)
    return values if kind.many else values[0]


def at_home(value: Any) -> Any:
    """A path, or several, with ~ written out: in YAML, and behind `=`, no shell does it."""
    if isinstance(value, tuple):
        return tuple(map(at_home, value))
    try:
        return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~") else value
    except RuntimeError:  # nobody of that name lives here
        return value


def check_sane(name: str, value: Any) -> None:
    """Refuse text that no system takes, and numbers that nothing has.

    Raises:
        UserError: names it.
    """
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{name} is {quoted(value)}, with a NUL in it; write it as text")
    if isinstance(value, str) and any(len(part.encode(errors="replace")) > _LONGEST for part in value.split("/")):
        raise UserError(f"{name} is {quoted(value)}; nothing has a name of more than {_LONGEST} bytes")
    if isinstance(value, int | float) and not abs(value) <= MOST:  # nan too
        raise UserError(f"{name} is {quoted(value)}; there is not so much of anything")


def check_rule(name: str, value: Any, rule: Rule | None) -> None:
    """Refuse a value that a rule forbids; None is left to whoever gave it a meaning.

    Raises:
        UserError: says what it must be.
    """
    if rule is not None and value is not None and not rule[0](value):
        raise UserError(f"{name} is {quoted(value)}; it must be {rule[1]}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Refuse what is none of the choices, if there are any.

    Raises:
        UserError: names the nearest.
    """
    if choices and value not in choices:
        raise UserError(f"unknown {name} {value!r}{did_you_mean(str(value), choices)}")


def _whole(text: str) -> int:
    try:
        return int(text, 10)
    except ValueError:
        if not (number := float(text)).is_integer():  # 1e9 is as good as 1000000000
            raise
        return int(number)


_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_TYPES: dict[type, tuple[Callable[[str], Any], str]] = {
    str: (str, "text"),
    int: (_whole, "a whole number"),
    float: (float, "a number"),
    bool: (lambda text: _BOOLEANS[text.lower()], "true or false"),
}


def _scalar(name: str, value: Any, of: type) -> Any:
    convert, wanted = _TYPES[of]
    if isinstance(value, str):
        try:
            return convert(value)
        except (KeyError, ValueError, OverflowError):
            pass
    raise UserError(f"{name} is {quoted(value)}; it must be {wanted}")


def quoted(value: Any) -> str:
    """A value as it is quoted in an error: a line at most."""
    quote = repr if isinstance(value, str) else str if isinstance(value, int | float) else reprlib.repr
    said = re.sub(r"\s+", " ", quote(value))
    return said if len(said) <= 60 else f"{said[:57]}..."
