"""The page on the number of drafts against what it rests on: the simulated result, and what it says of it."""

from __future__ import annotations

import json
from typing import Any

from bench import draft_policy, draft_policy_shapes
from bench import draft_policy_host_time as host_time
from bench import draft_policy_traces as script
from polydraft.bench.report import renewed
from tests.docs.pages import read
from tests.support.project import ROOT

PAGE = read(ROOT / "docs" / "how_many_drafts.md")
RESULT = json.loads((ROOT / script.FIGURES).read_text(encoding="utf-8"))


def test_the_simulated_table_is_that_of_the_result() -> None:
    rows = RESULT["rows"]
    assert renewed(PAGE, script.FIGURES, script.about(rows), script.markdown(rows)) == PAGE
    assert RESULT["device"] == "none: simulated"


def test_the_measured_tables_are_those_of_their_results() -> None:
    for figures in (draft_policy.FIGURES, draft_policy.OF_ONE):
        rows = json.loads((ROOT / figures).read_text(encoding="utf-8"))["rows"]
        assert renewed(PAGE, figures, draft_policy.about(rows), draft_policy.markdown(rows)) == PAGE
    near, all_cells = 0, 0
    for shape in ("mimo-7b", "ernie21"):
        name = draft_policy_shapes.FIGURES.format(shape)
        result = json.loads((ROOT / name).read_text(encoding="utf-8"))
        table = draft_policy_shapes.markdown(result["rows"])
        assert renewed(PAGE, name, draft_policy_shapes.about(result), table) == PAGE
        worst = dict[tuple[Any, ...], float]()
        for row in result["rows"]:
            if (row["work"], row["policy"]) == ("steady", "fixed"):
                cell = row["accept_schedule"][0], row["batch"]
                worst[cell] = min(worst.get(cell, 9.0), row["auto_over_this"])
        near, all_cells = near + sum(ratio >= 0.97 for ratio in worst.values()), all_cells + len(worst)
    assert f"{near} of {all_cells} steady cells reach 0.97" in PAGE


def test_the_table_of_the_host_is_that_of_its_result() -> None:
    result = json.loads((ROOT / host_time.FIGURES).read_text(encoding="utf-8"))
    rows = result["rows"]
    assert renewed(PAGE, host_time.FIGURES, host_time.about(result), host_time.markdown(rows)) == PAGE
    assert all(row["us_without_decision"] < 2.0 for row in rows), "a counter and a clock"


def test_an_interval_leaves_out_what_the_sign_test_does() -> None:
    for count, inside in ((1, 1), (3, 3), (6, 6), (9, 7), (12, 8), (20, 10)):
        low, high = draft_policy.interval(list(map(float, range(count))))
        assert (low + high, high - low + 1) == (count - 1, inside)


def works() -> list[list[dict[str, Any]]]:
    """The rows of each work."""
    rows, size = RESULT["rows"], len(script.FIXED) + 2
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def test_the_trace_is_as_the_page_says() -> None:
    traces = {rows[0]["shape"]: rows for rows in works() if rows[0]["work"] == "trace"}
    for name in ("ernie21, H200", "mimo-7b, H200"):
        assert script.best(traces[name])["auto_over_this_spread"][0] > 1.0, "ahead of every fixed number, with every seed"
    assert min(script.best(rows)["auto_over_this"] for rows in works()) > 0.97
    first = [script.best(rows)["auto_over_this_first"] for rows in works()]
    assert f"it is {sum(first) / len(first):.3f} of it over all cells, and {min(first):.3f} at worst" in PAGE
    known = {
        name: next(row for row in rows if row["policy"] == "known")["tokens_per_s"] / script.best(rows)["tokens_per_s"]
        for name, rows in traces.items()
    }
    for name in ("ernie21, H200", "bumpy", "mimo-7b, H200"):
        assert f"{known.pop(name):.3f} " in PAGE, "what a policy reaches that is told everything"
    assert f"between {min(known.values()):.3f} and {max(known.values()):.3f} elsewhere" in PAGE
