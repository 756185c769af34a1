"""How long the conformance kit takes: a whole profile on a backend, and one case of one contract, as a vendor runs them.

Each command is a process of its own, start-up included. Prints a table and, with --out, writes a `polydraft.bench/1` JSON file.

    python bench/conform_seconds.py --out bench/results/conform_seconds.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from polydraft.bench import report

COMMANDS: dict[tuple[str, ...], float] = {
    ("reference", "--profile", "basic", "--seed", "1"): 30.0,
    ("reference", "--profile", "full", "--seed", "1"): 180.0,
    ("emulator", "--profile", "full", "--seed", "1"): 360.0,
    ("reference", "--contract", "verify_match", "--case", "seed-7"): 5.0,
}
"""Arguments of `polydraft conform`, and the seconds that it may take on two cores."""
METHOD = "wall seconds of the command, one process a run; of the repeats the median, as spread the smallest and the largest"


def measure(arguments: tuple[str, ...], limit_s: float, repeats: int) -> dict[str, Any]:
    """One row. Ends the program where a claim does not hold: a run that fails is no figure."""
    seconds, found = [], {}
    for _ in range(repeats):
        start = time.perf_counter()
        command = [str(Path(sys.executable).with_name("polydraft")), "conform", *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - start)
        if done.returncode:
            sys.exit(f"conform {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = json.loads(done.stdout)
    return {
        "command": f"polydraft conform {' '.join(arguments)}",
        "seconds": statistics.median(seconds),
        "spread": [min(seconds), max(seconds)],
        "repeats": repeats,
        "limit_s": limit_s,
        "checks": len(found["results"]),
        "compared": sum(result["comparisons"] for result in found["results"]),
        "verdict": found["verdict"]["sentence"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="write the result here")
    options = parser.parse_args()
    rows = []
    for arguments, limit_s in COMMANDS.items():
        row = measure(arguments, limit_s, options.repeats)
        rows.append(row)
        print(f"{row['seconds']:8.1f} s of {limit_s:g}  {row['command']}  ({row['checks']} checks, {row['compared']:,} compared)")
    if options.out:
        report.write(options.out, report.document(rows, method=METHOD))


if __name__ == "__main__":
    main()
