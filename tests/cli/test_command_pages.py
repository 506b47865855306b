"""The pages of docs/commands say what the command line is today, and links in the documents lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from .command_pages import INDEX, PAGES, blocks, commands, contexts, help_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}
SHOWN = {path.name: blocks(path.read_text()) for path in PAGES.glob("*.md")}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^    (kvfold .*)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(path):
    """What the headings of a document are called in a link, as GitHub does."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_has_one_page():
    pages = {path: [name for name, shown in SHOWN.items() if path in shown] for path in contexts()}
    assert {path: len(names) for path, names in pages.items()} == dict.fromkeys(pages, 1)
    for path in commands():  # and it is called as the command, or as the group of it
        (page,) = pages[path]
        assert "-".join(path.split()[1:]).startswith(page.removesuffix(".md")), path


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_help_is_what_is_printed(name):
    assert SHOWN[name], "a page without help"
    for path, shown in SHOWN[name].items():
        assert shown == help_of(path), "python -m tests.cli.command_pages writes it anew"


def test_examples_are_of_the_page_and_have_the_options_of_today():
    """They are parsed, not run; click says what is wrong with one."""
    known, leaves = contexts(), commands()
    for name in SHOWN.keys() - {INDEX}:
        called = set()
        for line in EXAMPLE.findall(FENCE.sub("", (PAGES / name).read_text())):
            path = max((path for path in leaves if f"{line} ".startswith(f"{path} ")), key=len, default="")
            assert path, line
            known[path].command.make_context(path, shlex.split(line.removeprefix(path)))
            called.add(path)
        assert called >= SHOWN[name].keys() & set(leaves), name


def test_the_index_links_every_page():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (PAGES / INDEX).read_text()))
    assert linked == SHOWN.keys() - {INDEX}


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_relative_links_lead_somewhere(name):
    document = DOCUMENTS[name]
    for target, anchor in LINK.findall(FENCE.sub("", document.read_text())):
        path = document.parent / target if target else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"
