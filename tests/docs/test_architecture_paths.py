"""Every repository path that a document names in backticks exists; so do the targets of links, headings included."""

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, anchors, code_spans, links, name, read
from tests.support.project import ROOT

# A path of this repository begins with one of these, or is a file of the root.
FOLDERS = ("core", "backends", "plugins", "tests", "docs", "bench", "tools", ".ci")


def repository_paths(text: str) -> set[str]:
    """Code spans that look like paths of this repository; a file of the root counts where it is a page."""
    found = set()
    for span in code_spans(text):
        folder, slash, _ = span.partition("/")
        of_the_root = not slash and span[0].isupper() and span.endswith(".md")
        if not set(span) & set(" <>{}*()=:,\"'$") and (of_the_root or (slash and folder in FOLDERS)):
            found.add(span)
    return found


def missing_paths(text: str, root: Path = ROOT) -> set[str]:
    """Paths that `text` names and that are not there."""
    return {path for path in repository_paths(text) if not (root / path).exists()}


def broken_links(text: str, page: Path) -> list[str]:
    """Relative links of `page` to files or headings that are not there; addresses of the web are not followed."""
    broken = []
    for link in links(text):
        file, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(read(target))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_exist(page: Path):
    assert missing_paths(read(page)) == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path):
    assert broken_links(read(page), page) == []


def test_architecture_names_its_rooms():
    named = repository_paths(read(ROOT / "ARCHITECTURE.md"))
    rooms = {path.parent.relative_to(ROOT).as_posix() + "/" for path in ROOT.glob("core/polydraft/*/__init__.py")}
    assert rooms - named == set(), "ARCHITECTURE.md has no row for these packages"


def test_every_page_is_on_the_map():
    index = ROOT / "docs" / "index.md"
    mapped = {(index.parent / link.partition("#")[0]).resolve() for link in links(read(index))}
    assert set(PAGES) - mapped - {index} == set()


def test_checks_see_what_is_wrong():
    page = ROOT / "docs" / "planted.md"
    assert missing_paths("`core/polydraft/nowhere.py` and `tests/unit`, `NOWHERE.md`, `README.md`, `DIR/config.json`") == {
        "core/polydraft/nowhere.py",
        "NOWHERE.md",
    }
    text = "[a](nowhere.md) [b](index.md) [c](../README.md#nowhere) [d](../README.md#status) ![e](images/nowhere.svg) `[f](x)`"
    assert broken_links(text, page) == ["nowhere.md", "../README.md#nowhere", "images/nowhere.svg"]
