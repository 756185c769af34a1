"""Tokens per round of the demo model: how much of a window becomes text, greedy at several K and sampled by two rules.

Runs the five code prompts of the test suite. Counts do not depend on the machine's speed; greedy ones are exact where no two
logits tie, sampled ones belong to the seeds named here. The token that a prefill chooses belongs to no round. Prints the table
of the README and, with --out, writes a `polydraft.bench/1` JSON file.

    python bench/tokens_per_round.py --out bench/results/tokens_per_round.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from polydraft import LLM, SamplingParams
from polydraft.bench import report

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
from tests.oracle.prompts import CODE_PROMPTS  # noqa: E402  the prompts live with the tests that know their exact counts

METHOD = (
    "five code prompts of tests/oracle/prompts.py in one batch, 128 new tokens each; tokens of decode rounds over decode rounds, "
    "all texts together; spread is the lowest and highest of the seeds"
)
NEW_TOKENS = 128
DRAFT_TOKENS = (1, 2, 3, 5)
SEEDS = (1, 2, 3, 4)
SAMPLED = [(verify, {"temperature": t, "top_p": 0.95}) for verify in ("coupled", "rejection") for t in (0.8, 1.0)]


def tokens_per_round(llm: LLM, params: list[SamplingParams]) -> tuple[float, list[float]]:
    """Of all texts together, and of the texts of each parameter set alone."""
    tokens, rounds = [], []
    for own in params:
        outputs = llm.generate(CODE_PROMPTS, own)
        tokens.append(sum(len(output.token_ids) - 1 for output in outputs))
        rounds.append(sum(len(output.rounds) for output in outputs))
    return sum(tokens) / sum(rounds), [t / r for t, r in zip(tokens, rounds, strict=True)]


def acceptance(llm: LLM) -> list[float]:
    """Share of the rounds that verified a draft at each position in which it became text, since the engine was built."""
    totals = llm.engine.totals
    return [accepted / drafted for accepted, drafted in zip(totals.accepted_at, totals.drafted_at, strict=True)]


def measure(num_drafts: int, verify: str, sampling: dict[str, Any], seeds: tuple[int, ...]) -> dict[str, Any]:
    """One row of the result, by an engine of its own."""
    llm = LLM(backend="reference", draft_tokens=num_drafts, verify=verify, max_num_seqs=len(CODE_PROMPTS))
    params = [SamplingParams(max_new_tokens=NEW_TOKENS, seed=seed, **sampling) for seed in seeds]
    together, each = tokens_per_round(llm, params)
    row = {
        "shape": "demo",
        "backend": llm.engine.resolved.backend,
        "draft_tokens": num_drafts,
        "batch": len(CODE_PROMPTS),
        "verify": llm.engine.resolved.verify,
        "temperature": 0.0,
        "top_p": 1.0,
        **sampling,
        "seeds": list(seeds),
        "accept_schedule": None,
        "tokens_per_round": together,
        "spread": [min(each), max(each)],
        "acceptance_per_position": acceptance(llm),
        "new_tokens": NEW_TOKENS,
        "dtype": llm.engine.resolved.dtype,
        "invariant": llm.engine.resolved.invariant,
    }
    llm.close()
    return row


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [measure(k, "greedy", {}, (0,)) for k in DRAFT_TOKENS]
    rows += [measure(3, verify, sampling, SEEDS) for verify, sampling in SAMPLED]
    print("| K | verification | temperature | top-p | tokens per round | accepted by position |\n|---|---|---|---|---|---|")
    for r in rows:
        shares = " ".join(f"{share:.0%}" for share in r["acceptance_per_position"])
        settings = f"| {r['draft_tokens']} | `{r['verify']}` | {r['temperature']:g} | {r['top_p']:g}"
        print(f"{settings} | {r['tokens_per_round']:.2f} | {shares} |")
    if args.out:
        report.write(args.out, report.document(rows, method=METHOD))


if __name__ == "__main__":
    main()
