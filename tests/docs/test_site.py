"""The site of docs/: it builds without a warning, has every page and picture, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.contracts import REGISTRY
from tests.support.project import ROOT

DOCS = ROOT / "docs"
FOREIGN = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(?:https?:)?//|<link[^>]*rel=\"(?:stylesheet|preload)\"[^>]*href=\"(?:https?:)?//"
)
"""What a browser would load from another host; links are followed by people."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        inside = page.relative_to(DOCS).with_suffix("")
        target = site / inside.parent / "index.html" if inside.name == "index" else site / inside / "index.html"
        assert target.is_file(), page


def test_every_contract_has_its_page_and_the_reference_leads_to_it(site: Path) -> None:
    reference = (site / "backends" / "reference" / "index.html").read_text(encoding="utf-8")
    for name in REGISTRY.names():
        page = (site / "backends" / "contracts" / name / "index.html").read_text(encoding="utf-8")
        assert f'href="../contracts/{name}/"' in reference, name
        assert re.search(rf"<h1[^>]*>{name}, version", page), name


def test_links_between_pages_lead_somewhere(site: Path) -> None:
    """Also those of made pages, which no file of the repository has."""
    for page in site.rglob("index.html"):
        for target in re.findall(r'<a[^>]* href="([^":#?]+/)["#]', page.read_text(encoding="utf-8")):
            assert (page.parent / target / "index.html").is_file() or not (page.parent / target).resolve().is_relative_to(site), (
                f"{page.relative_to(site)} links to {target}"
            )


def test_every_picture_is_there_and_shown(site: Path) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in site.rglob("*.html"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for picture in (DOCS / "images").iterdir():
        assert (site / "images" / picture.name).stat().st_size > 1000, picture
        assert f"images/{picture.name}" in pages + readme, f"no page shows {picture.name}"


def test_pages_of_the_menu_exist_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    page = (site / "serving" / "index.html").read_text(encoding="utf-8")
    for name in ("alternatives", "verification", "performance", "backends/cpu", "backends/tutorial"):
        assert f"../{name}/" in page, f"the menu lacks {name}"
    for page_file in site.rglob("*.html"):
        assert not FOREIGN.search(page_file.read_text(encoding="utf-8")), page_file
