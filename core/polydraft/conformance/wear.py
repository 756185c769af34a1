"""Uses one binding of a kernel for long, on contents that change, in whichever ways it can be used.

What a kernel keeps between launches shows in it: results of earlier contents, counters that run over, memory that was returned.
Checks of bindings (L2) and of graphs (L3) call it. Every result is held against the first one of the same contents, and those
against the golden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from polydraft.conformance.check import Tally
from polydraft.conformance.harness import Bound, held, run_golden, weights_of
from polydraft.contracts.base import Case
from polydraft.contracts.compare import Products
from polydraft.contracts.inputs import Kernel, contract_of
from polydraft.device import Array

LAUNCHES: Final = 128
"""Uses of one binding, and of one graph."""
MANY: Final = 256
"""Uses of one binding in profiles above `basic`, and up to `DRAWN` more, which the seed of a run draws."""
DRAWN: Final = 128
FEW: Final = 8
"""Uses of a second one, of another form."""
Use = Callable[[int], None]
"""Enqueues the work of a binding for a launch length."""


def with_weights_of(kernel: Kernel, first: Case, case: Case) -> Case:
    """The case with the weights of `first`, which the kernel is bound to."""
    weights = weights_of(contract_of(kernel))
    return replace(case, arrays={**case.arrays, **{name: first.arrays.get(name) for name in weights}})


Results = dict[int, dict[str, Array]]
"""What a kernel left first on each of some contents, by their places: host representations by argument name."""


def worn(
    kernel: Kernel,
    cases: Sequence[Case],
    bound: Bound,
    uses: Mapping[str, Use],
    tally: Tally,
    *,
    products: Products,
    count: int = LAUNCHES,
    first: Results | None = None,
) -> Results:
    """Use `bound` `count` times, in the ways of `uses` by turns, on the contents of `cases`, which have the form of the one that
    it was bound to; the same contents now and then come twice in a row. Returns the first results, of which those of an earlier
    call may be given."""
    cases = [with_weights_of(kernel, cases[0], case) for case in cases]
    wants = [run_golden(kernel, case, bound.act, kv=bound.kv, products=products) for case in cases]
    random = contract_of(kernel).deterministic == "none"
    ways, chosen = list(uses.items()), np.random.default_rng(len(uses)).integers(0, len(cases), count).tolist()
    first = {} if first is None else first
    for number, which in enumerate([*range(len(cases)), *chosen]):
        way, use = ways[number % len(ways)]
        bound.load(cases[which])
        use(cases[which].n)
        got = bound.read()
        if which not in first or random:
            tally.compared(held(kernel, cases[which], got, wants[which], act=bound.act, kv=bound.kv))
            first[which] = got
        for name, array in () if random else got.items():
            what = f"{name} of use {number + 1} of one binding ({way}, contents of {cases[which].name})"
            tally.same_bits(what, array, first[which][name])
    return first
