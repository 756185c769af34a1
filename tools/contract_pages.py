"""Puts the contracts into the site while MkDocs builds it: a page each, and the tables of docs/backends/reference.md.

A hook of mkdocs.yml; nothing that it makes is kept in the repository. `polydraft contracts NAME` prints a page without a site.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from polydraft.conformance.needs import need
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Contract
from polydraft.contracts.docs import render

ROOT = Path(__file__).parents[1]
NEEDS = {"own": "counts as own work", "offered": "has to be there"}
"""What `basic` asks of a contract whose feature is claimed."""
FOLDER, REFERENCE = "backends/contracts", "backends/reference.md"
CONTRACTS, FUSED = "<!-- table of contracts -->", "<!-- table of composites -->"
"""Where the page of reference wants its tables."""


def on_files(files: Any, config: Any) -> Any:
    """MkDocs asks which files there are: one more for each contract."""
    names = upstream()
    for contract in REGISTRY:
        files.append(File.generated(config, f"{FOLDER}/{contract.name}.md", content=contract_page(contract, names)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """MkDocs shows every page before it becomes HTML: the reference gets its tables."""
    del config, files
    return with_tables(markdown) if page.file.src_uri == REFERENCE else markdown


def with_tables(markdown: str) -> str:
    """The page of reference with both tables. Raises `ValueError` where it has no place for one."""
    for mark, made in ((CONTRACTS, contracts(upstream())), (FUSED, composites())):
        if markdown.count(mark) != 1:
            raise ValueError(f"docs/{REFERENCE} wants {mark} once, where its table belongs; put it back")
        markdown = markdown.replace(mark, made)
    return markdown


def upstream() -> dict[str, list[str]]:
    """Contract to what FastDeploy calls it, read from the table of docs/names.md."""
    text = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
    table = re.search(r"^## FastDeploy: op by op\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert table is not None, "docs/names.md has lost its table of ops"
    found: dict[str, list[str]] = {}
    for row in re.findall(r"^\|(.+)\|$", table[1], re.MULTILINE)[2:]:
        op, here, _ = (cell.strip() for cell in row.split("|", 2))
        for name in re.findall(r"`(\w+)`", here):
            found.setdefault(name, []).append(op)
    return found


def contract_page(contract: Contract, names: Mapping[str, Sequence[str]]) -> str:
    """The page of one contract."""
    claim = f"In a claim for `{contract.feature}`" if contract.feature != "dense" else "In every claim"
    facts = [f"{claim} it {_in_basic(contract)} in the profile `basic`, and has to be the backend's own above it."]
    if contract.name in names:
        facts.append(f"FastDeploy: {'; '.join(names[contract.name])}.")
    one = f'`check_kernel("{contract.name}", fn, to_device, to_host)`'
    facts.append(f"Try one function: {one}; a backend: `polydraft conform NAME --contract {contract.name}`.")
    return f"{render(contract).rstrip()}\n\n## In a backend\n\n" + "\n\n".join(facts) + "\n"


def contracts(names: Mapping[str, Sequence[str]]) -> str:
    """The table of all contracts."""
    rows = ["| contract | computes | feature | in `basic` | FastDeploy |", "|---|---|---|---|---|"]
    for contract in REGISTRY:
        link, theirs = f"[`{contract.key}`](contracts/{contract.name}.md)", "; ".join(names.get(contract.name, []))
        rows.append(f"| {link} | {_first_line(contract.doc)} | {contract.feature} | {_in_basic(contract)} | {theirs} |")
    return "\n".join(rows)


def _in_basic(contract: Contract) -> str:
    return NEEDS[need(contract.name, "basic", contract.features)]


def composites() -> str:
    """The table of what may be fused."""
    rows = ["| composite | computes | dead |", "|---|---|---|"]
    for composite in COMPOSITES.values():
        dead = ", ".join(f"`{name}`" for name in composite.dead)
        rows.append(f"| `{composite.name}` | {_first_line(composite.doc)} | {dead} |")
    return "\n".join(rows)


def _first_line(text: str) -> str:
    return text.splitlines()[0].replace("|", "\\|")
