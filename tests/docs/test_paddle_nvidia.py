"""The page on Paddle and NVIDIA GPUs against the committed result, the claims of the kit, and the list of operations."""

import itertools
import json
import re
from typing import Any

from polydraft.bench.report import renewed
from tests.docs.pages import read, section
from tests.docs.test_performance import script
from tests.support.project import ROOT

PAGE = ROOT / "docs" / "backends" / "paddle-nvidia.md"
CELLS = set(itertools.product(("mimo-7b", "small"), (0, 3), (1, 32)))


def figures() -> tuple[Any, dict[str, Any]]:
    """The script and its result."""
    result = json.loads((ROOT / "bench" / "results" / "paddle_nvidia.json").read_text(encoding="utf-8"))
    return script("paddle_nvidia"), result


def test_the_table_is_that_of_the_result():
    bench, result = figures()
    page = read(PAGE)
    assert renewed(page, bench.FIGURES, bench.markdown(result)) == page
    assert bench.markdown(result) in section(page, "How it compares")
    assert {bench.key_of(row) for row in result["rows"]} == set(itertools.product(bench.CONTENDERS, CELLS))


def test_the_pack_and_the_cuda_backend_are_of_one_run():
    bench, result = figures()
    commits = {bench.key_of(row): row.get("commit") for row in result["rows"]}
    assert all(commits["paddle, pack", cell] == commits["cuda", cell] for cell in CELLS)


def test_native_operations_are_as_many_as_the_page_says():
    listed = (ROOT / "plugins" / "paddle-device-skeleton" / "include" / "paddle_device" / "operations.h").read_text(
        encoding="utf-8"
    )
    count = len(re.findall(r"operation_\w+", listed[listed.index("using AllOperations") :]))
    page = read(PAGE)
    assert f"the {count} operations of" in section(page, "What is native, and what falls back")
    assert f"| operations | {count}," in page


def test_verdicts_of_the_kit_are_those_of_the_claims():
    seen = section(read(PAGE), "What ran where")
    claims = json.loads((ROOT / "docs" / "backends" / "claims.json").read_text(encoding="utf-8"))
    found = {one["profile"]: one for one in claims if (one["name"], one["device"]) == ("paddle", "polycuda:0")}
    assert "graph" in found
    for profile, one in found.items():
        passed = re.search(r"holds: (\d+) checks passed", one["sentence"])
        assert passed, one["sentence"]
        row = next(
            line
            for line in seen.splitlines()
            if line.startswith("| `conform`") and f"`{profile}`" in line and "with the pack" not in line
        )
        assert f"{int(passed[1]):,} checks passed" in row
