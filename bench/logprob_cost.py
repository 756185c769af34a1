"""What log probabilities cost the host of a step, as `host_turns.py` measures it, and how long their record is; compared with
engines that may report log probabilities and whose requests want none.

`pack`: the reference's kernel that packs the record, by itself: the null device leaves a record that would be the same where it
is, and copies it whole. The fixed record has 21 columns for every place of every window, as a record of fixed size would have,
asked for or not: it is computed, copied and kept as if every request had asked for 20.

    python bench/logprob_cost.py --page docs/serving.md
    python bench/logprob_cost.py --read bench/results/logprobs.json --page docs/serving.md
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from bench import host_turns
from bench.host_turns import BATCH, Engine, Wish

FIGURES = "bench/results/logprobs.json"
WISHES = {
    "no engine option": Wish({}, {}),
    **{
        name: Wish({"logprobs": 20}, {"logprobs": asked})
        for name, asked in {"nothing": None, "top 0": 0, "top 5": 5, "fixed 21 columns": 20}.items()
    },
}


def packing(engine: Engine) -> float:
    """Microseconds of the packing kernel, median of some launches; 0 where nobody wants a record."""
    from polydraft.reference.logprobs import KERNELS
    from polydraft.reference.provider import arrays_of

    times, served = [], engine.engine
    programs = served.runner.programs
    if "greedy.logprobs" not in programs or served.slots.num_top.max() < 0:
        return 0.0
    args: Any = next(e.args for e in programs["greedy.logprobs"]["target"].entries if e.contract == "pack_logprobs")
    kernel = KERNELS["pack_logprobs"](arrays_of(args), served.resolved.limits)
    for _ in range(50):
        start = time.perf_counter_ns()
        kernel(BATCH)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times)


def rows(turns: int) -> list[dict[str, Any]]:
    """A row a wish, with what packing takes."""
    found, engines = host_turns.measure("log probabilities", WISHES, "nothing", turns)
    return [
        {**row, "pack_us": round(statistics.median(map(packing, same)), 1)}
        for row, same in zip(found, engines.values(), strict=True)
    ]


def markdown(found: list[dict[str, Any]]) -> str:
    """A line a wish."""
    columns = {"packing kernel, us": lambda row: f"{row['pack_us']:.0f}", "bytes up": lambda row: f"{row['bytes_per_step']:,}"}
    return host_turns.markdown(found, columns)


if __name__ == "__main__":
    host_turns.main(__doc__ or "", FIGURES, rows, markdown)
