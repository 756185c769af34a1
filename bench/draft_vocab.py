"""What a reduced draft vocabulary costs in accepted drafts: tokens per round of the demo model by the number of tokens kept.

Tokens are ranked by their counts in the standard library of the Python that runs this. Texts are those of the five code prompts
of the test suite, greedy and sampled; they are checked to be the same whatever the vocabulary. Figures do not depend on the
machine's speed. Writes a `polydraft.bench/1` JSON file and renews the table of docs/verification.md.

    python bench/draft_vocab.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from polydraft import LLM, SamplingParams
from polydraft.bench import report
from polydraft.demo import demo_model_path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
from tests.oracle.prompts import CODE_PROMPTS  # noqa: E402  as for bench/tokens_per_round.py

PAGE, FIGURES = ROOT / "docs" / "verification.md", "bench/results/draft_vocab.json"
METHOD = (
    "five code prompts of tests/oracle/prompts.py in one batch, 128 new tokens each; tokens ranked by their counts in Python's "
    "standard library; texts are equal in all rows of a way of sampling; ends of text come on top of the number"
)
DRAFTS, NEW_TOKENS = 3, 128
SHARES = (1, 2, 4, 8, 16, 64)
"""The vocabulary is divided by them."""
WAYS: tuple[dict[str, float], ...] = ({}, {"temperature": 0.8, "top_p": 0.95})


def measure(number: int, counts: Path, sampling: dict[str, float], wanted: list[tuple[int, ...]]) -> dict[str, Any]:
    """One row; `wanted`, if there is any, are the texts that must come out, and otherwise becomes those that did."""
    llm = LLM(
        backend="reference", draft_tokens=DRAFTS, max_num_seqs=len(CODE_PROMPTS), invariant=True, draft_vocab=f"{counts}:{number}"
    )
    outputs = llm.generate(CODE_PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS, seed=1, **sampling))  # type: ignore[arg-type]
    texts, totals, resolved = [output.token_ids for output in outputs], llm.engine.totals, llm.engine.resolved
    wanted += [] if wanted else texts
    if texts != wanted:
        raise SystemExit(f"{number} tokens to draft from changed a text")
    row = {
        "shape": "demo", "backend": resolved.backend, "draft_tokens": DRAFTS, "batch": len(CODE_PROMPTS),
        "draft_vocab": resolved.describe()["draft_vocab"], "vocab": llm.engine.model.vocab_size, "verify": resolved.verify,
        "temperature": 0.0, "top_p": 1.0, **sampling, "accept_schedule": None,
        "tokens_per_round": sum(len(text) - 1 for text in texts) / sum(len(output.rounds) for output in outputs),
        "acceptance_per_position": [a / d for a, d in zip(totals.accepted_at, totals.drafted_at, strict=True)],
        "new_tokens": NEW_TOKENS, "dtype": resolved.dtype, "invariant": resolved.invariant,
    }  # fmt: skip
    llm.close()
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """For people."""
    lines = ["| tokens that may be drafted | temperature | tokens per round | accepted by position |", "|---|---|---|---|"]
    for r in rows:
        shares = " ".join(f"{share:.0%}" for share in r["acceptance_per_position"])
        lines.append(f"| {r['draft_vocab']} of {r['vocab']} | {r['temperature']:g} | {r['tokens_per_round']:.2f} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write, renew the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        subprocess.run([sys.executable, ROOT / "tools" / "count_tokens.py", *files, "--out", counts], check=True)
        vocab = json.loads((demo_model_path() / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        for sampling in WAYS:
            wanted: list[tuple[int, ...]] = []
            rows += [measure(vocab // share, counts, sampling, wanted) for share in SHARES]
    report.write(ROOT / FIGURES, report.document(rows, method=METHOD))
    report.renew(PAGE, FIGURES, table(rows))


if __name__ == "__main__":
    main()
