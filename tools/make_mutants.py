"""Writes docs/backends/mutants.md and mutants.json: which broken backends die around which device.

    python tools/make_mutants.py [FOLDER]

Runs `polydraft conform NAME --device DEVICE --prove --json` on each of `WANTED`, about a minute each, or takes the answers that
such runs have left in FOLDER as NAME.json. A test compares the page with the table, and the table with the mutants of the kit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
PAGE, TABLE = ROOT / "docs" / "backends" / "mutants.md", ROOT / "docs" / "backends" / "mutants.json"
WANTED: Final = {"reference": "queued", "emulator": "emulator:0", "paddle": "polyemu:0", "xpu": "polyemu:0"}
HEAD: Final = """# Broken backends, and where they die

Each mutant is a fault that was met in the field, put around a real backend; the check named must fail
([conformance.md](../conformance.md) says how). `may live` is a fault that makes no difference around that backend, by right;
`not offered` needs what the device does not have, and `not seen` is what nobody can see there from outside. Made by `make matrix`
on {day}.

"""
LAST: Final = """
M54 may live around kernels that read rows and block tables themselves, and M57 where all streams are one queue; M70 and M71
break fp8 rows, which Paddle does not declare. Row order, the step counter of the upstream XPU ops, offsets by capacities and
stale captured inputs are M63, M01, M56 and M21.
"""


def state(trial: Mapping[str, Any]) -> str:
    """What became of a mutant. Raises `ValueError` for one that lives although it must not."""
    if not trial["ok"]:
        raise ValueError(f"{trial['id']} was not killed by {trial['check']}: {trial['unbroken']}, {trial['broken']}")
    never = {"unsupported": "not offered", "unseen": "not seen"}
    return never.get(trial["unbroken"]) or ("killed" if trial["broken"] == "fail" else "may live")


def table(answers: Mapping[str, Mapping[str, Any]], day: str) -> dict[str, Any]:
    """The answers of `--prove --json` by backend, as what is kept of them."""
    rows: dict[str, dict[str, Any]] = {}
    for backend, answer in answers.items():
        for trial in answer["trials"]:
            if trial["kind"] == "mutant":
                row = rows.setdefault(trial["id"], {"title": trial["title"], "check": trial["check"], "states": {}})
                row["states"][backend] = state(trial)
    return {"day": day, "devices": dict(WANTED), "mutants": rows}


def page(content: Mapping[str, Any]) -> str:
    """The page of a table."""
    names = [f"{name} on {device}" for name, device in content["devices"].items()]
    lines = [f"| mutant | fault | killed by | {' | '.join(names)} |", f"|---|---|---|{'---|' * len(names)}"]
    for id_, row in content["mutants"].items():
        states = " | ".join(row["states"].get(name, "not run") for name in content["devices"])
        lines.append(f"| {id_} | {row['title']} | `{row['check']}` | {states} |")
    return HEAD.format(day=content["day"]) + "\n".join(lines) + "\n" + LAST


def answer(name: str, folder: Path | None) -> dict[str, Any]:
    """The proof of one backend, run or taken."""
    if folder is not None:
        taken: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        return taken
    command = [str(Path(sys.executable).with_name("polydraft")), "conform", name, "--device", WANTED[name], "--prove", "--json"]
    done: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    return done


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else None
    content = table({name: answer(name, folder) for name in WANTED}, date.today().isoformat())  # noqa: DTZ011  the day here
    rows = ",\n  ".join(f"{json.dumps(id_)}: {json.dumps(row)}" for id_, row in content["mutants"].items())
    head = json.dumps({key: value for key, value in content.items() if key != "mutants"})[:-1]
    TABLE.write_text(f'{head},\n "mutants": {{\n  {rows}}}}}\n', encoding="utf-8")
    PAGE.write_text(page(content), encoding="utf-8")


if __name__ == "__main__":
    main()
