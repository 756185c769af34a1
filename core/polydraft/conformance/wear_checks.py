"""Checks of engines that last (L5, and L3 in graphs): many steps on the same bindings, and another engine beside them.

Texts and rounds are compared with the oracle's, as everywhere at L5. Single kernels are used for long in L2 and L3 (`wear.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from polydraft.conformance.check import Check, Tally
from polydraft.conformance.lossless_checks import K, run, working_dtype
from polydraft.conformance.probe import prompts
from polydraft.conformance.serving import Ask, as_expected, serve, serve_in_turn
from polydraft.conformance.target import Target
from polydraft.engine import Engine

STEPS: Final = 128
"""Steps that an engine makes at least."""


def checks() -> Iterator[Check]:
    """Every check of this kind."""
    yield Check("L5/many-steps", partial(_many_steps, "off"))
    yield Check("L5/two-engines", partial(_two_engines, "off"))
    yield Check("L3/engine/many-steps", partial(_many_steps, "decode"), ("graph_capture",))
    yield Check("L3/engine/two-engines", partial(_two_engines, "decode"), ("graph_capture",))


def _options(graph: str) -> dict[str, Any]:
    """Those that are launched compute as most users have it, those that are replayed row-invariantly where that is declared."""
    given: dict[str, Any] = {"graph": graph, "block_size": 4, "max_num_seqs": 2}
    return given | ({"invariant": False} if graph == "off" else {"graph_sizes": (1, 2)})


def _many_steps(graph: str, target: Target, tally: Tally) -> None:
    """More steps than a counter of a kernel's own may take, on what was bound when the engine was built."""
    steps: list[int] = []

    def note(engine: Engine, step: int) -> None:
        del engine
        steps.append(step)

    asks = [Ask(prompt) for _ in range(3) for prompt in prompts(10)]
    run(target, tally, asks, each_step=note, **_options(graph))
    tally.true(f"{STEPS} steps or more, got {len(steps)}", len(steps) >= STEPS)


def _two_engines(graph: str, target: Target, tally: Tally) -> None:
    """Two engines of one form, whose steps take turns, each with requests of its own; then one is closed and a third one built,
    and the other works on beside it."""
    dtype, each = working_dtype(target), [[Ask(prompt) for prompt in prompts(8)[place::2]] for place in range(2)]

    def served(*engines: Engine) -> None:
        outputs = serve_in_turn(list(zip(engines, each, strict=True)), tally)
        for asks, found in zip(each, outputs, strict=True):
            as_expected(tally, asks, found, K, target.rounding(dtype))

    with ExitStack() as kept:
        first, second = (kept.enter_context(target.engine(draft_tokens=K, dtype=dtype, **_options(graph))) for _ in range(2))
        served(first, second)
        first.close()
        as_expected(tally, each[1], serve(second, each[1], tally), K, target.rounding(dtype))
        third = kept.enter_context(target.engine(draft_tokens=K, dtype=dtype, **_options(graph)))
        served(third, second)
