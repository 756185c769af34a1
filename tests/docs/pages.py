"""Reads the documents for the tests of this folder: the pages, their code blocks, links, tables and headings.

It understands as much Markdown as the pages of this repository need. What a page should say is up to the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.project import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
"""Every document of the repository."""

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


class Fence(NamedTuple):
    """One fenced block: its language and text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int


def name(page: Path) -> str:
    """The page as people call it: its path from the root."""
    return page.relative_to(ROOT).as_posix()


def read(page: Path) -> str:
    """The text of a page."""
    return page.read_text(encoding="utf-8")


def fences(text: str, *languages: str) -> Iterator[Fence]:
    """The fenced blocks in `languages`."""
    for found in _FENCE.finditer(text):
        if found[1] in languages:
            yield Fence(found[1], found[2], text.count("\n", 0, found.start()) + 2)


def prose(text: str) -> str:
    """The text with fenced blocks blanked out, line numbers kept."""
    return _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)


def code_spans(text: str) -> list[str]:
    """What stands in backticks outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def links(text: str) -> list[str]:
    """Targets of links and pictures outside of fenced blocks."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(text)))


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get from the sites that show it."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def section(text: str, heading: str) -> str:
    """What stands between a heading of the second level and the next one."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"there is no section {heading!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of the first table in `text`, without its head."""
    lines = re.search(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)
    assert lines is not None, "there is no table"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].strip().splitlines()]
    return cells[2:]
