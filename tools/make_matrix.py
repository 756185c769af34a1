"""Writes docs/backends/matrix.md and matrix.json: every backend that runs without silicon of its own, level by level; and takes
its claims into docs/backends/evidence.md.

    python tools/make_matrix.py [FOLDER]

Runs `polydraft conform --matrix` on all of `WANTED`, which takes minutes, or takes the reports that such a run has left in the
folders of FOLDER, of which one may have been made again by itself. A test compares the page with the table; the table itself is
what the kit has seen.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
PAGE, TABLE = ROOT / "docs" / "backends" / "matrix.md", ROOT / "docs" / "backends" / "matrix.json"
WANTED: Final = (
    "reference=cpu@basic", "cpu=cpu@full", "emulator=emulator:0@full", "paddle=cpu@basic", "paddle=polyemu:0@full",
    "xpu=polyemu:0@full",
)  # fmt: skip
"""Backend, device, and the most that it claims there."""
HEAD: Final = """# Backends, level by level

What the conformance kit saw of each backend that runs without an accelerator: checks passed of each level and contract, and
whose kernel it was. `-` is what a backend does not offer on that device, `not run` what its profile does not ask. The class of
evidence says what a column stands for ([evidence.md](evidence.md)): a custom device and an emulator prove order, lifetime,
layout and what runs where; they say nothing of a chip's arithmetic. No Kunlun XPU and no vendor's Paddle runtime was at hand;
`cuda` runs on GPUs alone and is in [cuda.md](cuda.md).

Made by `make matrix`, from `polydraft conform --matrix {wanted}`.

"""


def page(content: Mapping[str, Any]) -> str:
    """The page of a table."""
    from polydraft.conformance.matrix import markdown

    return HEAD.format(wanted=",".join(WANTED)) + markdown(content)


def taken(folder: Path) -> dict[str, Any]:
    """The table of the reports that a run left in `folder`. Raises `ValueError` where a claim does not hold."""
    from polydraft.conformance.matrix import table
    from polydraft.conformance.report import Report

    found = {}
    for file in folder.glob("*/report.json"):
        report = Report(json.loads(file.read_text(encoding="utf-8")))
        backend = report.content["backend"]
        found[f"{backend['name']}={backend['device']}@{report.content['claim']['profile']}"] = report
    content = table([found[one] for one in WANTED])
    if content["status"]:
        failing = [f"{one['name']}: {one['sentence']}" for one in content["backends"] if one["status"]]
        raise ValueError(f"the table does not hold: {'; '.join(failing)}")
    return content


def compact(content: Mapping[str, Any]) -> str:
    """The table as JSON, a line a row: small, and readable where two versions differ."""
    rows = ",\n  ".join(json.dumps(row) for row in content["rows"])
    backends = ",\n  ".join(json.dumps(one) for one in content["backends"])
    rest = {key: value for key, value in content.items() if key not in ("rows", "backends")}
    return f'{json.dumps(rest)[:-1]},\n "backends": [\n  {backends}],\n "rows": [\n  {rows}]}}\n'


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if sys.argv[1:] else Path(scratch)
        if not sys.argv[1:]:
            polydraft = str(Path(sys.executable).with_name("polydraft"))
            command = [polydraft, "conform", "--matrix", ",".join(WANTED), "--out", str(folder)]
            subprocess.run(command, check=False)
        content = taken(folder)
        reports = [str(path) for path in sorted(folder.glob("*/report.json"))]
        subprocess.run([sys.executable, str(ROOT / "tools" / "make_evidence_page.py"), *reports], check=True)
    TABLE.write_text(compact(content), encoding="utf-8")
    PAGE.write_text(page(content), encoding="utf-8")


if __name__ == "__main__":
    main()
