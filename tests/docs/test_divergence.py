"""docs/backends/divergence.md: each row names contracts, a capability or a hook, a case, a mutant and a test that exist."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest

from polydraft.backend import Capabilities
from polydraft.conformance.faulty_backends import MUTANTS
from polydraft.conformance.kernel_checks import named_cases
from polydraft.contracts import REGISTRY
from polydraft.hooks import HOOKS
from tests.docs.pages import prose, read, rows
from tests.support.project import ROOT

PAGE = read(ROOT / "docs" / "backends" / "divergence.md")
TABLE = rows(PAGE)
NUM_ROWS = 19
"""Rows of the upstream table; one that is settled there stays, since it is a way to go wrong."""


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_row_is_there():
    assert [int(row[0]) for row in TABLE] == list(range(1, NUM_ROWS + 1))
    assert all(len(row) == 8 and all(row) for row in TABLE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[1])
def test_a_row_says_what_decides_and_what_proves_it(row: list[str]):
    _, _, _, _, decided, case, mutant, test = row
    names = spans(decided)
    contracts = [name for name in names if name in REGISTRY.names()]
    capabilities = {field.name for field in dataclasses.fields(Capabilities)}
    known = {*REGISTRY.names(), *capabilities, *HOOKS, "meta"}
    assert contracts, "no contract decides"
    assert [name for name in names if name not in known] == []
    (wanted,) = spans(case)
    assert any(wanted in {one.name for one in named_cases(REGISTRY[name])} for name in contracts), wanted
    assert mutant in {one.id for one in MUTANTS}
    (place,) = spans(test)
    path, _, function = place.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place


def test_mutants_are_not_all_the_same():
    """A row has a mutant of its own kind."""
    assert len({row[6] for row in TABLE}) >= NUM_ROWS - 1


def test_what_waits_is_a_requirement():
    """It says what contract there will be, which there is not yet, and what would get it wrong."""
    found = re.search(r"^\* \*\*Prefill on another node\.\*\*(.*?)\Z", prose(PAGE), re.MULTILINE | re.DOTALL)
    assert found is not None
    assert "`receive_blocks`" in found[1]
    assert "receive_blocks" not in REGISTRY.names()
    assert re.search(r"[Mm]utant", found[1])
