"""The suffix proposer: drafts that running and finished texts went on with before, looked up on the host, without a model.

Chosen by `--proposer suffix`; it pays where texts repeat their input, themselves or each other: edits, agents' loops, templates.
The lookup runs while the device computes the target's pass, and knows every token but those of the step in flight: its guess runs
over them, and drafts are what it says behind them where the step's own tokens are those that it guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from polydraft.device import Array
from polydraft.errors import ConfigError
from polydraft.program.declare import StepBuffer
from polydraft.program.host_inputs import HostView, Needs
from polydraft.program.program import ProgramBuilder
from polydraft.proposers.base import Drafting, ProposerContext
from polydraft.proposers.suffix_index import SuffixIndex


class SuffixGuesses:
    """Guesses of a window and the drafts behind it, by sequence of the step."""

    name = "suffix"
    needs: Needs = "previous_tokens"
    reads_drafts = False
    inputs: Sequence[str] = ("guess", "guess_start", "guess_len")

    def __init__(self, context: ProposerContext) -> None:
        limits, least = context.limits, context.options["min_token_prob"]
        if least > 1:
            raise ConfigError(
                f"proposer {self.name}: min_token_prob is {least:g}, wanted a chance, 0 to 1; correct --proposer-option"
            )
        ahead = limits.window + limits.num_drafts
        self._index = SuffixIndex(
            limits.max_seqs, limits.max_len, step=limits.window, ahead=ahead, kept=int(context.options["cached_tokens"]),
            sure=limits.window, least=least,
        )  # fmt: skip
        self.buffers: tuple[StepBuffer, ...] = (
            StepBuffer("guess", f"B {ahead}", initial=0),
            StepBuffer("guess_start", "B", initial=0),
            StepBuffer("guess_len", "B", initial=0),
        )

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        slots, table = view.plan.slots, view.slots
        n, known = len(slots), table.num_known[slots]
        self._index.follow(slots, table.number[slots], known, table.tokens)
        self.guesses = self._index.guesses(slots)
        arrays["guess"][:n], arrays["guess_start"][:n], arrays["guess_len"][:n] = self.guesses.tokens, known, self.guesses.length
        for array in arrays.values():
            array[n:] = 0  # launches may be longer than the step has sequences
        return len(arrays["guess_len"])

    def append(self, program: ProgramBuilder) -> None:
        """Nothing is done to logits."""

    def reset(self) -> None:
        """What the device failed with is on the host alone; every step fills all that goes up."""


class SuffixProposer:
    """Drafts as many tokens as are likely enough, in one launch behind the host's guess."""

    name = "suffix"
    ranks = True
    needs: Needs = "previous_tokens"
    options: ClassVar[Mapping[str, float]] = MappingProxyType({"cached_tokens": 1 << 18, "min_token_prob": 0.1})
    """Tokens of finished texts that later ones may be drafted from (0: each text is drafted from its own alone), and the least
    chance with which a token is drafted."""
    buffers = Drafting.buffers

    def __init__(self, context: ProposerContext) -> None:
        self.features = (SuffixGuesses(context),)

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        program.add("begin_draft", "seqs", "begin_draft", num_drafts=num_drafts)
        if num_drafts:
            program.add("align_drafts", "seqs", "draft 0")
