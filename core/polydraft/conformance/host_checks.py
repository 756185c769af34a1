"""Checks of data that comes from the host while requests run (L5): inputs in the middle of a step, and new weights.

Both are compared with recomputing oracles, token by token. How a backend moves data is not examined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from polydraft.conformance.check import Check, Tally
from polydraft.conformance.collective_checks import look_for_ranks
from polydraft.conformance.lossless_checks import K, working_dtype
from polydraft.conformance.oracle import greedy_rounds
from polydraft.conformance.probe import MARGIN, VOCAB, checkpoint, oracle, prompts
from polydraft.conformance.serving import Ask, as_chosen, serve
from polydraft.conformance.target import Target
from polydraft.device import Array
from polydraft.engine import Engine
from polydraft.program.declare import StepBuffer
from polydraft.program.host_inputs import HostView, Needs
from polydraft.program.program import ProgramBuilder

KINDS: Final = 3
"""Remainders into which the rule below parts the vocabulary."""
BIAS: Final = -1000.0
ENOUGH: Final = 8
"""Tokens of a text on the new weights that are compared."""
OTHER: Final = 1
"""Seed of the weights that replace the probe's."""


def checks() -> Iterator[Check]:
    """All of them."""
    for graph in ("off", "decode"):
        how, needs = ("eager", ("host_inputs",)) if graph == "off" else ("replayed", ("host_inputs", "graph_capture"))
        yield Check(f"L5/host-inputs/{how}", partial(_host_inputs, graph), needs, kernel="bias_logits", features=("processing",))
    yield Check("L5/weights/begun-requests-keep-the-old-ones", _weights, ("update_weights",))
    yield Check("L5/ranks/new-weights", partial(_weights, ranks=2), ("ranks", "update_weights"), features=())


# -- inputs in the middle of a step ----------------------------------------------------------------------
class OtherRemainder:
    """A rule for texts, as a grammar is one: behind token t only tokens of another remainder may follow. The step learns of t
    while its target pass runs. Without drafts, so that one rule holds for all rows of a slot."""

    name: ClassVar[str] = "another remainder"
    needs: ClassVar[Needs] = "previous_tokens"
    reads_drafts = False

    def __init__(self, context: Any) -> None:
        del context
        table = -(-VOCAB // KINDS)
        self.buffers = (
            StepBuffer("conform.count", "B", initial=0),
            StepBuffer("conform.ids", f"B {table}", initial=0),
            StepBuffer("conform.biases", f"B {table}", "f32", initial=BIAS),
        )
        self.inputs = ("conform.count", "conform.ids")

    def fill(self, view: HostView, arrays: Mapping[str, Array]) -> int:
        """For every scheduled slot the tokens that may not follow."""
        counts, tables = arrays["conform.count"], arrays["conform.ids"]
        counts[:], tables[:] = 0, 0
        for slot in view.plan.slots.tolist():
            last = int(view.slots.tokens[slot, view.slots.num_known[slot] - 1])
            ids = np.flatnonzero(np.arange(VOCAB) % KINDS == last % KINDS)
            counts[slot], tables[slot, : len(ids)] = len(ids), ids
        return len(counts)

    def append(self, program: ProgramBuilder) -> None:
        """Behind the processing of the target's logits."""
        program.add(
            "bias_logits", "logit_rows", "verify", row_slot="logit_slot", num_biases="conform.count", bias_ids="conform.ids",
            biases="conform.biases",
        )  # fmt: skip

    def reset(self) -> None:
        """Every step fills all of it anyway."""


def _ruled(logits: Array, known: Sequence[int]) -> Array:
    """The same rule, for the oracle."""
    return np.where(np.arange(len(logits)) % KINDS == known[-1] % KINDS, logits + BIAS, logits)


def _host_inputs(graph: str, target: Target, tally: Tally) -> None:
    """Texts that obey a rule about the token before, which the host works out behind the launch of each target pass."""
    asks, dtype = [Ask(prompt, max_new=12, arrival=i) for i, prompt in enumerate(prompts(5))], working_dtype(target)
    given: dict[str, Any] = {"graph": graph, "dtype": dtype, "max_num_seqs": 3}
    if graph != "off":
        given["graph_sizes"] = (1, 3)
    for depth in (0, "auto"):
        with target.engine(draft_tokens=0, overlap=depth, features=(OtherRemainder,), **given) as engine:
            outputs = serve(engine, asks, tally)
        params, rules = [ask.params for ask in asks], [_ruled] * len(asks)
        as_chosen(tally, "under the rule", params, outputs, 0, target.rounding(dtype), rules)


# -- new weights -----------------------------------------------------------------------------------------
def _weights(target: Target, tally: Tally, ranks: int = 1) -> None:
    """Weights are replaced as soon as a request has been preempted: whoever had begun, that one too, ends on the old ones, and
    whoever had not sees the new ones alone. Of several ranks all take them together."""
    if ranks > 1:
        look_for_ranks(target, ranks)
    asks = [Ask(prompt, arrival=i) for i, prompt in enumerate(prompts(10)[4:])]
    asks.append(Ask(prompts(4)[3], arrival=40))
    before: dict[tuple[int, ...], bool] = {}

    def note(engine: Engine, step: int) -> None:
        del step
        if not before and engine.scheduler.num_preemptions:
            before.update({one.prompt_ids: one.begun or one.slot >= 0 for one in engine.requests.values()})
            engine.update_weights(checkpoint(OTHER), running="finish")

    dtype = working_dtype(target) if ranks == 1 else "f32"
    options: dict[str, Any] = {
        "tensor_parallel": ranks,
        "max_num_seqs": 4,
        "num_blocks": 26,
        "block_size": 4,
        "prefix_cache": False,
        "graph": "off",
    }
    with target.engine(draft_tokens=K, dtype=dtype, **options) as engine:
        outputs = serve(engine, asks, tally, each_step=note)
    tally.true("weights were replaced while a preempted request waited", bool(before))
    for number, (ask, output) in enumerate(zip(asks, outputs, strict=True)):
        # Whoever is not known at the change has ended by then, on the old weights, or comes later.
        old = before.get(ask.prompt, ask.arrival < 40)
        wanted = ask.expected(0) if old else greedy_rounds(oracle(OTHER), ask.prompt, 0, ENOUGH, ())
        sure = next((i for i, gap in enumerate(wanted.margins) if gap < MARGIN[target.rounding(dtype)]), len(wanted.token_ids))
        who = f"request {number}, on the {'old' if old else 'new'} weights"
        tally.no_error(who, output.error)
        tally.equal(f"tokens of {who}", output.token_ids[:sure], tuple(wanted.token_ids[:sure]))
