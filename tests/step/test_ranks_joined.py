"""Ranks whose backend joins a collective with launches behind it: the same texts, the same faults, by whichever graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polydraft import LLM, Engine
from polydraft.backend import Collectives
from polydraft.conformance.target import wrap
from polydraft.contracts.composite import CompositeArgs
from polydraft.errors import DeviceError
from polydraft.plugins.program_pass import Entry, Node, OwnKernel, Rewritten, UnboundProgram
from tests.support import tiny
from tests.support.emulator import Emulator, EmulatorTable
from tests.support.of_ranks import OPTIONS, asks, on_one_core, on_one_rank
from tests.support.runs import drive, essence

PARTS = ("all_reduce", "residual_add", "rms_norm")


def spoil(a: Any, limits: Any) -> Callable[[int], None]:
    """Write what is no number where a sum would lie."""

    def run(n: int) -> None:
        a.x[:n] = np.nan

    return run


class NormOfSum:
    """The launches of the table one behind the other, and no sum behind them."""

    def __init__(self, providers: Any, launched: Counter[int], rank: int) -> None:
        self._providers, self._launched, self._rank = providers, launched, rank

    def bind(self, args: CompositeArgs, limits: Any, workspace: Any) -> Any:
        parts = [*zip(PARTS, args.parts, strict=True), ("spoil", args.parts[0])]
        launches = [self._providers[name].bind(part, limits, workspace) for name, part in parts]

        def launch(stream: Any, n: int) -> None:
            self._launched[self._rank] += 1
            for one in launches:
                one(stream, n)

        return launch

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        return 0


class Joining:
    """The pass: each sum with the residual addition and the norm behind it."""

    def __init__(self, providers: Any, launched: Counter[int], rank: int) -> None:
        self.kernels = {"norm_of_sum": OwnKernel(PARTS, NormOfSum(providers, launched, rank))}

    def rewrite(self, program: UnboundProgram) -> Sequence[Entry]:
        found: list[Entry] = []
        for entry in program.entries:
            before = found[-1] if found else None
            contracts = [one.contract if isinstance(one, Node) else "" for one in (before, entry)]
            if contracts == ["all_reduce", "residual_add+rms_norm"] and isinstance(before, Node) and isinstance(entry, Node):
                found[-1] = Rewritten((before, entry), "norm_of_sum", "one launch", (before.args.x,))  # type: ignore[union-attr]
            else:
                found.append(entry)
        return found


def joining(launched: Counter[int], joins: Callable[[int], bool] = lambda rank: True) -> Any:
    """The emulator, whose ranks for which `joins` is true join."""

    def collectives(answer: Collectives, device: Any, group: Any) -> Collectives:
        providers = {**EmulatorTable(device).providers, **answer.providers, "spoil": device.bind_kernel(spoil)}
        return replace(answer, program_pass=Joining(providers, launched, group.rank)) if joins(group.rank) else answer

    return wrap(Emulator("emulator:0?seed=3"), polydraft_collectives=collectives)


@contextmanager
def over(ranks: int, plugin: Any, **options: Any) -> Iterator[Engine]:
    given = {**OPTIONS, "graph": "decode", "tensor_parallel": ranks, **options}
    with on_one_core(ranks > 1):
        made = LLM(model=str(tiny.checkpoint("narrow")), plugin=plugin, plugins=tiny.PLUGINS, **given).engine
        try:
            yield made
        finally:
            made.close()


@pytest.mark.parametrize(("ranks", "drafts"), [(2, 3), (4, 0)])
def test_texts_and_rounds_are_those_of_one_rank(ranks: int, drafts: int):
    launched = Counter[int]()
    with over(ranks, joining(launched), draft_tokens=drafts) as running:
        (told,) = (one for one in running.runner.joined() if one.joined.contracts == "all_reduce+residual_add+rms_norm")
        assert told.joined.captured
        assert [dict(essence(one)) for one in drive(running, asks("narrow"))] == on_one_rank("narrow", drafts)
    assert launched.keys() == set(range(ranks))
    assert len(set(launched.values())) == 1


def test_ranks_that_join_other_launches_are_named():
    """The first graph that is captured launches everything once."""
    said = r"rank 1 came to collective \d+ for all_reduce \(launch \d+ of the plan of step 0, .*, rank 0 for all_reduce"
    with pytest.raises(DeviceError, match=said), over(2, joining(Counter(), lambda rank: rank == 1)):
        pass
