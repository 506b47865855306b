"""The pages of docs/commands, and what `--help` prints on them.

`python -m tests.cli.command_pages`, from a checkout's root, writes every help block anew. A block is a fence of text
that begins with `Usage: kvfold ...`, and so says itself which command it is of.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from kvfold.cli import kvfold

PAGES = Path(__file__).parents[2] / "docs" / "commands"
INDEX = "README.md"
COLUMNS = 120
_BLOCK = re.compile(r"^```text\n(Usage: (kvfold[a-z -]*?) [\[A-Z].*?)^```$", re.MULTILINE | re.DOTALL)


def contexts() -> dict[str, click.Context]:
    """The context of every command and group, by the words that call it."""
    found: dict[str, click.Context] = {}

    def walk(command: click.Command, name: str, parent: click.Context | None) -> None:
        # Both widths, or click would hold the page to 80 columns, or to those of a terminal.
        widths = {"terminal_width": COLUMNS, "max_content_width": COLUMNS}
        context = click.Context(command, parent, info_name=name, **widths, **command.context_settings)
        command._help_option = None  # click keeps that of whoever asked first, whose parent may have been another
        found[context.command_path] = context
        for sub, inner in getattr(command, "commands", {}).items():
            walk(inner, sub, context)

    walk(kvfold, "kvfold", None)
    return found


def commands() -> list[str]:
    """The words of all that does something, without the groups."""
    return [path for path, context in contexts().items() if not isinstance(context.command, click.Group)]


def help_of(path: str) -> str:
    """What `--help` prints, with a newline at its end.

    Raises:
        KeyError: there is no such command.
    """
    return f"{contexts()[path].get_help()}\n"


def blocks(page: str) -> dict[str, str]:
    """The help blocks of a page, by command."""
    return {match[2]: match[1] for match in _BLOCK.finditer(page)}


def renewed(page: str) -> str:
    """A page with what `--help` prints today."""
    return _BLOCK.sub(lambda match: f"```text\n{help_of(match[2])}```", page)


def main() -> None:
    """Write the help blocks of all pages anew, and say what was changed."""
    for path in sorted(PAGES.glob("*.md")):
        before = path.read_text(encoding="utf-8")
        if (after := renewed(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(path.relative_to(PAGES.parents[1]))


if __name__ == "__main__":
    main()
