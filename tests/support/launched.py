"""Which contracts something launches: those whose record is filled outside of their definitions."""

from __future__ import annotations

import re

from polydraft.contracts import REGISTRY
from tests.support.project import ROOT

LAUNCHERS = (
    "core/polydraft/program",
    "core/polydraft/sampling",
    "core/polydraft/step",
    "core/polydraft/models",
    "core/polydraft/proposers",
    "tests/support",
)
"""Folders whose code appends launches to a step; the last has proposers and host features of the tests."""


def launched() -> set[str]:
    """Names of contracts whose newest record that code makes. A contract that nobody launches yet is not among them."""
    sources = (path for folder in LAUNCHERS for path in (ROOT / folder).rglob("*.py"))
    words = {word for path in sources for word in re.findall(r"\b(\w+V\d+)\(", path.read_text(encoding="utf-8"))}
    return {contract.name for contract in REGISTRY if contract.args.__name__ in words}
