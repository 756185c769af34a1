"""docs/backends/matrix.md against its table, and the turns in which every change claims a backend in full."""

from __future__ import annotations

import json
from typing import Any

from polydraft.conformance.faulty_backends import MUTANTS
from polydraft.conformance.outcomes import PROFILES
from polydraft.contracts import COMPOSITES, REGISTRY
from tests.support.project import ROOT
from tests.support.schemas import published
from tools import conform_in_turn, make_matrix, make_mutants

CONTENT: dict[str, Any] = json.loads(make_matrix.TABLE.read_text(encoding="utf-8"))


def test_the_page_is_that_of_the_table():
    assert make_matrix.PAGE.read_text(encoding="utf-8") == make_matrix.page(CONTENT), "run `make matrix`"
    assert make_matrix.TABLE.read_text(encoding="utf-8") == make_matrix.compact(CONTENT)
    published("polydraft.matrix/1").validate(CONTENT)


def test_every_backend_that_needs_no_accelerator_is_in_it_and_holds():
    found = [f"{one['name'].split(' on ')[0]}={one['device']}@{one['profile']}" for one in CONTENT["backends"]]
    assert found == list(make_matrix.WANTED)
    assert [one["status"] for one in CONTENT["backends"]] == [0] * len(found)
    claimed = [(one["evidence"], one["device"]) for one in CONTENT["backends"]]
    assert ("silicon", "polyemu:0") not in claimed
    assert claimed.count(("custom device", "polyemu:0")) == 2


def test_its_rows_are_contracts_and_levels_and_nothing_was_waived():
    levels = {row["level"] for row in CONTENT["rows"]}
    assert levels == set(PROFILES["full"])
    contracts = {row["contract"] for row in CONTENT["rows"] if row["level"] == "L2"} - {""}
    assert contracts <= {*REGISTRY.names(), *COMPOSITES}, "a contract that is no more; run `make matrix`"
    assert len(contracts) > 40
    cells = [cell for row in CONTENT["rows"] for cell in row["cells"].values()]
    assert not any(cell["waived"] or cell["fail"] or cell["error"] for cell in cells)


def test_the_page_of_mutants_is_that_of_its_table_and_the_table_is_that_of_the_zoo():
    content = json.loads(make_mutants.TABLE.read_text(encoding="utf-8"))
    assert make_mutants.PAGE.read_text(encoding="utf-8") == make_mutants.page(content), "run `make matrix`"
    by_right = {mutant.id for mutant in MUTANTS if mutant.moot}
    assert [one.id for one in MUTANTS][: len(content["mutants"])] == list(content["mutants"]), "newer ones may follow"
    assert len(content["mutants"]) >= 63
    for id_, row in content["mutants"].items():
        assert set(row["states"]) == set(make_mutants.WANTED)
        assert "may live" not in row["states"].values() or id_ in by_right
        assert "killed" in row["states"].values(), f"{id_} dies nowhere"


def test_each_backend_has_its_turn_and_all_others_claim_basic():
    turns = [conform_in_turn.turn_of(commits) for commits in range(len(conform_in_turn.BACKENDS))]
    assert len(set(turns)) == len(turns)
    assert {one.name for one in turns} == {wanted.partition("=")[0] for wanted in make_matrix.WANTED}
    for commits in range(len(turns)):
        claims = conform_in_turn.claims(commits)
        assert claims[0] == (turns[commits], turns[commits].most)
        assert {one for one, _ in claims} == set(conform_in_turn.BACKENDS)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make --no-print-directory check conform test" in ci
