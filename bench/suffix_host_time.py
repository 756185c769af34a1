"""Host time a step of the suffix proposer's lookup, and how many of its guesses were right; writes
bench/results/suffix_host_time.json.

    python bench/suffix_host_time.py

The index alone, without an engine: each row's text repeats a passage of 200 random tokens of its own in which each token is
another with a chance of 5 %, and grows by one to K + 1 tokens a step. Timed: taking in what is new and guessing, for all rows of
a step.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.bench import report
from polydraft.proposers.suffix_index import SuffixIndex

OUT = Path(__file__).resolve().parent / "results" / "suffix_host_time.json"
PASSAGE, CHANGED, VOCAB, LENGTH = 200, 0.05, 50_000, 4000
KEPT = 1 << 18


def measured(batch: int, drafts: int, steps: int) -> dict[str, Any]:
    """One row: microseconds a step, median and quartiles, and tokens of a guess that were right before the first wrong one."""
    rng, window = np.random.default_rng(batch), drafts + 1
    passages = rng.integers(0, VOCAB, (batch, PASSAGE))
    copies = [
        np.where(rng.random((batch, PASSAGE)) < CHANGED, rng.integers(0, VOCAB, (batch, PASSAGE)), passages) for _ in range(20)
    ]
    texts = np.concatenate(copies, axis=1).astype(np.int32)
    tokens = np.concatenate((texts, np.full((batch, window), -1, np.int32)), axis=1)
    index = SuffixIndex(batch, LENGTH, step=window, ahead=window + drafts, kept=KEPT, sure=window, least=0.1)
    rows, known, times, right = np.arange(batch), np.full(batch, PASSAGE), [], 0
    for _ in range(steps):
        known = known + rng.integers(1, window + 1, batch)
        begin = time.perf_counter()
        index.follow(rows, rows, known, tokens)
        guess, length, *_ = index.guesses(rows)
        times.append(1e6 * (time.perf_counter() - begin))
        next_ones = texts[rows[:, None], known[:, None] + np.arange(drafts)]
        same = (guess[:, :drafts] == next_ones) & (np.arange(drafts) < length[:, None])
        right += int(np.minimum.accumulate(same, axis=1).sum())
    low, median, high = np.quantile(times[steps // 10 :], (0.25, 0.5, 0.75))
    return {
        "shape": "repeated passages", "backend": "host", "draft_tokens": drafts, "batch": batch, "repeats": steps,
        "us_per_step": round(float(median), 1), "us_per_step_quartiles": [round(float(low), 1), round(float(high), 1)],
        "right_of_the_first": round(right / batch / steps, 3),
    }  # fmt: skip


def main() -> int:
    """Measure each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(OUT))
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    rows = []
    for batch in (1, 8, 64):
        rows.append(measured(batch, 3, options.steps))
        print(rows[-1], file=sys.stderr, flush=True)
    method = "a lookup of all rows a step by the index alone; median and quartiles of the steps behind the first tenth"
    report.write(options.out, report.document(rows, method=method))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
