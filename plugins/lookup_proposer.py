"""An example proposer plugin, complete in one file: drafts looked up in the request's own text with runs of one token.

Try it without packaging anything:

    polydraft generate "def add(a, b):" --plugin plugins/lookup_proposer.py --proposer lookup --draft-tokens 4 --explain

What a proposer plugin consists of:

1. the hook `polydraft_proposers(register)`, called once when an engine is built: `register(name, factory)`;
2. a factory: called with a `ProposerContext` when the name was chosen. It allocates whatever the proposer needs (nothing may
   be allocated later) and returns the proposer;
3. `append(program, sampling=...)`: called once for each kind of step program. It appends launches of contracts, bound to
   buffers, which run behind the commit of every step.

The promise a proposer makes: when its launches have run, `state.drafts` and `state.draft_len` are defined for every
scheduled slot. It can never change a text, since the target verifies; it can only make it come sooner or later.
"""

from __future__ import annotations

from collections.abc import Callable

from polydraft import hookimpl
from polydraft.contracts import BeginDraftV1, DraftNgramV1
from polydraft.proposers import ProposerContext, ProposerShape
from polydraft.runtime.program import ProgramBuilder


class LookupProposer:
    """Like the built-in `ngram`, but content with a single matching token: more drafts, more of them wrong."""

    name = "lookup"

    def __init__(self, context: ProposerContext) -> None:
        self.shape = ProposerShape(max_width=context.limits.num_drafts, fixed=False, one_call=True)
        self._state, self._step = context.state, context.step
        # Buffers by sequence: a launch handles the scheduled sequences in launch order, not the slots.
        sequences = (context.limits.max_seqs,)
        self._slot = context.device.empty("lookup.slot", sequences, "i32")
        self._position = context.device.empty("lookup.position", sequences, "i32")
        self._budget = context.device.empty("lookup.budget", sequences, "i32")

    def append(self, program: ProgramBuilder, *, sampling: bool) -> None:
        """Two launches: who drafts, and how much; then the drafts themselves. `sampling` makes no difference to a look-up."""
        del sampling
        state, step = self._state, self._step
        begin = BeginDraftV1(
            slot_order=step.slot_order,
            seq_len=step.seq_len,
            phase=state.phase,
            kv_len=state.kv_len,
            prompt_len=state.prompt_len,
            num_generated=state.num_generated,
            max_total=state.max_total,
            drafts=state.drafts,
            draft_len=state.draft_len,
            draft_slot=self._slot,
            draft_position=self._position,
            draft_budget=self._budget,
        )
        program.add("begin_draft", begin, "seqs", "begin_draft")
        look_up = DraftNgramV1(
            draft_slot=self._slot,
            draft_budget=self._budget,
            prompt_len=state.prompt_len,
            num_generated=state.num_generated,
            tokens=state.tokens,
            drafts=state.drafts,
            draft_len=state.draft_len,
            max_ngram=3,
            min_ngram=1,
        )
        program.add("draft_ngram", look_up, "seqs", "draft 0")


@hookimpl
def polydraft_proposers(register: Callable[..., None]) -> None:
    """Add `lookup` to what `--proposer` knows."""
    register("lookup", LookupProposer)
