"""docs/backends/xpu_fastdeploy.md: its tables are what the adaptors of the kernel pack say of themselves."""

from __future__ import annotations

import sys

from tests.docs.pages import read, rows, section
from tests.support.project import ROOT

sys.path.insert(0, str(ROOT / "backends" / "paddle"))
sys.path.insert(0, str(ROOT / "backends" / "xpu"))
from polydraft_xpu.fastdeploy.adaptor import Adaptor, Fill, Given, HostFlag
from polydraft_xpu.fastdeploy.adaptors import ADAPTORS, EVIDENCE, REFUSALS
from polydraft_xpu.fastdeploy.installed import GET_IT, MODULE

PAGE = ROOT / "docs" / "backends" / "xpu_fastdeploy.md"


def call(one: Adaptor) -> str:
    """How an operator is called, in a phrase."""
    made = sum(isinstance(source, Given) for source in one.takes.values())
    filled = sum(isinstance(source, (Fill, HostFlag)) for source in one.takes.values())
    rest = len(one.takes) - made - filled
    said = [
        f"parameters from the contract: {made}, constant tensors: {filled}, numbers: {rest}",
        f"written in place: {len(one.writes)}" if one.writes else f"returned: {len(one.returns)}",
        f"for {one.only}" if one.only else "",
        f"not captured, since {one.waits}" if one.waits else "",
    ]
    return "; ".join(filter(None, said))


def adaptors() -> list[list[str]]:
    """The table of adaptors as the page has it."""
    found = []
    for one in ADAPTORS:
        differs = "; ".join(one.differs)
        found.append([f"`{one.contract}`", f"`{one.operator}`", call(one), differs, f"`{one.read}`", EVIDENCE])
    return found


def refusals() -> list[list[str]]:
    """The table of operators without an adaptor as the page has it."""
    return [
        [f"`{one.operator}`", ", ".join(f"`{name}`" for name in one.contracts) or "none", one.why, f"`{one.read}`"]
        for one in REFUSALS
    ]


def test_tables_are_the_data():
    page = read(PAGE)
    assert rows(section(page, "Adaptors")) == adaptors()
    assert rows(section(page, "Operators without an adaptor")) == refusals()


def test_the_page_says_how_to_get_it_as_the_error_does():
    page = read(PAGE)
    assert f"`{MODULE}`" in page
    command = GET_IT.partition("(")[2].partition(")")[0]
    assert command in page
    assert EVIDENCE in page
