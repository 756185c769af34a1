"""What fewer bits change of the demo model: its text, and how many drafts become text, by packing and by parts left unpacked.

Each configuration of `--weights` and `--weights-ignore` writes the five code prompts of the test suite greedily with three
drafts a round, and scores the text that the unpacked model wrote: how often it would have chosen the same token there. Counts do
not depend on the machine's speed. Prints a table; --out writes a file, --page puts the table into a page.

    python bench/packing_acceptance.py --out bench/results/packing_acceptance.json --page docs/checkpoints.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from polydraft import LLM, SamplingParams
from polydraft.bench import report

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
from bench.tokens_per_round import NEW_TOKENS, acceptance  # noqa: E402  as for bench/draft_vocab.py
from tests.oracle.prompts import CODE_PROMPTS  # noqa: E402  likewise

DRAFTS = 3
MADE = ("int8", "int8-a8", "fp8", "int4", "int4-a8")
LEFT = ((), ("mtp",), ("head",), ("head", "mtp"))
NAME = "bench/results/packing_acceptance.json"
METHOD = (
    "five code prompts of tests/oracle/prompts.py in one batch on the reference backend, 128 new tokens each, greedy; "
    "tokens of decode rounds over decode rounds, all texts together, spread the lowest and highest of one text; "
    "same_tokens: share of the tokens of the unpacked model's texts that are the likeliest behind what comes before them "
    "there, same_prefix: share of them in front of the first that the packed model's own text has not; packing_error: root "
    "mean square of what packing changed over that of the matrix, median over the matrices that were packed"
)


def measure(weights: str, left: Sequence[str], unpacked: Sequence[Sequence[int]]) -> tuple[dict[str, Any], list[Sequence[int]]]:
    """One row of the result, and the texts. `unpacked`: those of the model as it is, none for itself."""
    options: dict[str, Any] = {"weights": weights, "weights_ignore": list(left)} if weights != "auto" else {}
    with closing(LLM(backend="reference", draft_tokens=DRAFTS, max_num_seqs=len(CODE_PROMPTS), logprobs=1, **options)) as llm:
        outputs = llm.generate(CODE_PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
        accepted, errors = acceptance(llm), llm.engine.weights.packing_errors
        texts: list[Sequence[int]] = [output.token_ids for output in outputs]
        prompts = [list(output.prompt_ids) for output in outputs]
        pairs = list(zip(prompts, unpacked or texts, strict=True))
        score = SamplingParams(max_new_tokens=1, prompt_logprobs=1)
        scored = llm.generate([prompt + list(text) for prompt, text in pairs], score)
    same = 0
    for (prompt, text), output in zip(pairs, scored, strict=True):
        records = output.prompt_logprobs or ()
        same += sum(one is not None and one.top[0][0] == token for one, token in zip(records[len(prompt) :], text, strict=True))
    each = [(len(output.token_ids) - 1) / len(output.rounds) for output in outputs]
    total = sum(len(text) for _, text in pairs)
    return {
        "shape": "demo", "backend": "reference", "draft_tokens": DRAFTS, "batch": len(CODE_PROMPTS), "packing": weights,
        "weights": "checkpoint",
        "weights_ignore": list(left),
        "tokens_per_round": sum(len(o.token_ids) - 1 for o in outputs) / sum(len(o.rounds) for o in outputs),
        "spread": [min(each), max(each)], "acceptance_per_position": accepted, "same_tokens": same / total,
        "same_prefix": sum(prefix(text, mine) for (_, text), mine in zip(pairs, texts, strict=True)) / total,
        "packing_error": statistics.median(errors.values()) if errors else 0.0, "matrices": len(errors), "new_tokens": NEW_TOKENS,
        "dtype": "f32",
    }, texts  # fmt: skip


def prefix(text: Sequence[int], other: Sequence[int]) -> int:
    """Tokens in front of the first that differs."""
    return next((i for i, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), min(len(text), len(other)))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table of a page."""
    head = ("`--weights`", "left as they are", "changed by packing", "same next token", "same text up to", "tokens per round",
            "accepted by position")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in rows:
        shares = " ".join(f"{share:.0%}" for share in r["acceptance_per_position"])
        left = ", ".join(r["weights_ignore"]) or ("all" if r["packing"] == "auto" else "")
        error = f"{r['packing_error']:.1%}" if r["matrices"] else ""
        same = f"{r['same_tokens']:.1%} | {r['same_prefix']:.0%}"
        lines.append(f"| `{r['packing']}` | {left} | {error} | {same} | {r['tokens_per_round']:.2f} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="write the table into this page, behind its marker")
    parser.add_argument("--read", type=Path, help="measure nothing: take the rows of this result")
    args = parser.parse_args()
    if args.read:
        rows = json.loads(args.read.read_text(encoding="utf-8"))["rows"]
    else:
        first, texts = measure("auto", (), ())
        rows = [first, *(measure(made, left, texts)[0] for made in MADE for left in LEFT)]
    print(table(rows))
    if args.out:
        report.write(args.out, report.document(rows, method=METHOD))
    if args.page:
        report.renew(args.page, NAME, table(rows))


if __name__ == "__main__":
    main()
