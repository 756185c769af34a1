"""An example proposer plugin, complete in one file: drafts looked up in the request's own text with runs of one token.

Try it without packaging anything:

    polydraft generate "def add(a, b):" --plugin plugins/lookup_proposer.py --proposer lookup --draft-tokens 4 --explain

What a proposer plugin consists of:

1. the hook `polydraft_proposers`, called once when an engine is built: it returns pairs of a name and a factory;
2. a factory: called with a `ProposerContext` when the name was chosen. It allocates nothing: what the proposer works in it
   declares, as `buffers` and `columns`, and the runtime allocates it;
3. `append(program, num_drafts)`: called once for each kind of step program and each number of drafts that a step may make, 0
   among them where steps may make none. It appends launches of contracts, which run behind the commit of every step. A field of
   a contract that is not given is the buffer that bears its name, whoever declared it.

The promise a proposer makes: when its launches have run, the slot columns `drafts` and `draft_len` are defined for every
scheduled slot. It can never change a text, since the target verifies; it can only make it come sooner or later.
"""

from __future__ import annotations

from polydraft import hookimpl
from polydraft.proposers import Factory, ProgramBuilder, ProposerContext, StepBuffer


class LookupProposer:
    """Like the built-in `ngram`, but content with a single matching token: more drafts, more of them wrong."""

    name = "lookup"
    # By sequence ("B"): a launch handles the scheduled sequences in launch order, not the slots.
    buffers = (StepBuffer("lookup.slot", "B"), StepBuffer("lookup.position", "B"), StepBuffer("lookup.budget", "B"))

    def __init__(self, context: ProposerContext) -> None:
        del context

    def append(self, program: ProgramBuilder, num_drafts: int) -> None:
        """Two launches: who drafts, and how much; then the drafts themselves."""
        mine = {"draft_slot": "lookup.slot", "draft_budget": "lookup.budget"}
        program.add("begin_draft", "seqs", "begin_draft", draft_position="lookup.position", num_drafts=num_drafts, **mine)
        if num_drafts:
            program.add("draft_ngram", "seqs", "draft 0", max_ngram=3, min_ngram=1, **mine)


@hookimpl
def polydraft_proposers() -> list[tuple[str, Factory]]:
    """Add `lookup` to what `--proposer` knows."""
    return [("lookup", LookupProposer)]
