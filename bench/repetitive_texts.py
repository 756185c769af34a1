"""Tokens per round of the proposers where texts repeat: a file that is edited and printed again, an agent's loop over JSON.
Writes bench/results/repetitive_texts.json with --out, and the table of a page with --page.

The texts are those of bench/texts, written for this: a prompt, and what follows it. The demo model is made to write what follows:
of its logits all but the text's next token are masked, so that every proposer drafts the same text, from the hidden states of a
model that reads it. Counts do not depend on the machine's speed. One request at a time, each by an engine of its own, so the
lookup knows its prompt and what it wrote, and nothing else.

    python bench/repetitive_texts.py --out bench/results/repetitive_texts.json --page docs/performance.md
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from polydraft import SamplingParams
from polydraft.bench import report
from polydraft.config import EngineConfig
from polydraft.demo import demo_model_path
from polydraft.device import Array
from polydraft.engine import Engine
from polydraft.models import Tokenizer
from polydraft.program.declare import StepBuffer
from polydraft.program.host_inputs import HostView, Needs
from polydraft.program.program import ProgramBuilder
from polydraft.proposers import ProposerContext

TEXTS = Path(__file__).resolve().parent / "texts"
SEPARATOR = "\n=== what is written ===\n"
DRAFT_TOKENS = (3, 5, 8)
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "suffix": ("suffix", ()),
    "mtp": ("mtp", ()),
    "hybrid": ("hybrid", ()),
    "hybrid, 2 passes": ("hybrid", ("model_drafts=2",)),
}
METHOD = (
    "the texts of bench/texts, one request at a time; the model is made to write what follows each prompt; tokens of decode "
    "rounds over decode rounds"
)


class Forced:
    """The only token that a row may choose is that of the text."""

    name: ClassVar[str] = "forced text"
    needs: ClassVar[Needs] = "previous_tokens"
    reads_drafts = True  # how many rows a window has is told by the drafts
    buffers = (StepBuffer("forced.mask", "NL V", "f32", initial=0),)
    inputs = ("forced.mask",)

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def __call__(self, context: ProposerContext) -> Forced:
        """As its own factory."""
        del context
        return self

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        (mask,), plan, t = arrays.values(), view.plan, view.slots
        slot, first = int(plan.slots[0]), int(t.num_known[plan.slots[0]])
        count = 1 + min(int(view.draft_len[slot]), int(plan.rows[0]) - 1) if plan.decode[0] else int(plan.emits[0])
        mask[:] = -np.inf
        for row, place in enumerate(range(first, first + count)):
            mask[row, self._text[min(place, len(self._text) - 1)]] = 0.0
        return len(mask)

    def append(self, program: ProgramBuilder) -> None:
        program.add("residual_add", "logit_rows", "verify", x="logits", y="forced.mask")

    def reset(self) -> None:
        """Nothing is kept."""


def measure(path: Path, method: str, num_drafts: int, backend: str) -> dict[str, Any]:
    """One row of the result."""
    tokenizer = Tokenizer.from_dir(demo_model_path())
    prompt, written = (tokenizer.encode(part) for part in path.read_text(encoding="utf-8").split(SEPARATOR))
    proposer, options = METHODS[method]
    config = EngineConfig(
        backend=backend, draft_tokens=num_drafts, proposer=proposer, proposer_options=options, max_num_seqs=1, invariant=True
    )
    engine = Engine(config, features=(Forced([*prompt, *written]),))
    engine.add(prompt, SamplingParams(max_new_tokens=len(written), ignore_eos=True))
    found = []
    while engine.has_work:
        engine.step()
        found += engine.poll()
    (output,) = found
    assert list(output.token_ids) == list(written), f"{path.name}: another text than was asked for"
    made = {name: sum(token.source == name for token in output.tokens) for name in ("draft", "lookup")}
    row = {
        "shape": "demo", "backend": engine.resolved.backend, "text": path.stem, "method": method, "draft_tokens": num_drafts,
        "batch": 1, "verify": engine.resolved.verify, "new_tokens": len(written), "rounds": len(output.rounds),
        "tokens_per_round": round((len(written) - 1) / len(output.rounds), 4), "accepted": sum(output.rounds),
        "drafted": output.drafted, "looked_up": made["lookup"],
    }  # fmt: skip
    engine.runner.device.close()
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/performance.md: tokens per round, a column for each method."""
    found = {(row["text"], row["draft_tokens"], row["method"]): row["tokens_per_round"] for row in rows}
    lines = [f"| text | K | {' | '.join(METHODS)} |", f"|{'---|' * (2 + len(METHODS))}"]
    for text, num_drafts in dict.fromkeys((row["text"], row["draft_tokens"]) for row in rows):
        figures = (f"{found[text, num_drafts, method]:.2f}" for method in METHODS)
        lines.append(f"| `{text}` | {num_drafts} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--backend", default="cpu")
    args = parser.parse_args()
    rows = [
        measure(path, method, num_drafts, args.backend)
        for path in sorted(TEXTS.glob("*.txt"))
        for num_drafts in DRAFT_TOKENS
        for method in METHODS
    ]
    print(table(rows))
    if args.out:
        report.write(args.out, report.document(rows, method=METHOD))
    if args.page:
        report.renew(args.page, "bench/results/repetitive_texts.json", table(rows))


if __name__ == "__main__":
    main()
