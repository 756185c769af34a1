"""Collectives of the emulator's ranks: those of host memory, with ranks that come late, stall, fail or leave one out.

The device string says which, by `ranks=ITEM,...`, the same on all ranks; whom an item means is in it:

    late          every rank sleeps for up to some milliseconds before some collectives, by seed and rank
    stall@R:N     rank R does not come to its N-th collective, and to none after it, until the others have given up
    dead@R:N      its device is lost there
    skip@R:N      rank R leaves its N-th collective out

Collectives are counted from 1, in the order in which a rank runs them.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from polydraft.contracts.base import Limits
from polydraft.errors import ConfigError, DeviceError
from polydraft.ranks import Group
from polydraft.ranks.kernels import Run, kernels

LATE_S: Final = 0.002
"""Seconds that a late rank sleeps at most."""
OFTEN: Final = 0.2
"""Share of collectives to which a rank comes late."""
NAP_S: Final = 0.002
_ITEM: Final = re.compile(r"late|(stall|dead|skip)@(\d+):([1-9]\d*)")


class Fault(NamedTuple):
    """What a rank does at one of its collectives."""

    what: str
    rank: int
    number: int


def read(text: str) -> tuple[bool, tuple[Fault, ...]]:
    """Whether ranks come late, and the faults. Raises `ConfigError` for anything else."""
    late, faults = False, []
    for item in filter(None, text.split(",")):
        found = _ITEM.fullmatch(item)
        if not found:
            raise ConfigError(
                f"emulator option ranks has {item!r}, wanted late, stall@RANK:N, dead@RANK:N or skip@RANK:N; correct it or leave "
                "it out"
            )
        if found[1]:
            faults.append(Fault(found[1], int(found[2]), int(found[3])))
        late = late or item == "late"
    return late, tuple(faults)


def collectives_of(group: Group, seed: int, text: str) -> dict[str, Callable[[Any, Limits], Run]]:
    """The kernels of one rank, by contract, with what the device string asks of it. Raises `ConfigError` for a behaviour that is
    unknown, or of a rank that is not there."""
    late, faults = read(text)
    for fault in faults:
        if fault.rank >= group.size:
            raise ConfigError(
                f"emulator option ranks has {fault.what}@{fault.rank}:{fault.number}, and there are {group.size} ranks, 0 to "
                f"{group.size - 1}; name one of them"
            )
    mine = {fault.number: fault.what for fault in faults if fault.rank == group.rank}
    plain = dict(kernels(group))
    if not late and not mine:
        return plain
    draws = random.Random(f"{seed} {group.rank}")  # noqa: S311  no secret: its sequence is the same on every Python
    count = [0]

    def changed(bind: Callable[[Any, Limits], Run]) -> Callable[[Any, Limits], Run]:
        def bound(a: Any, limits: Limits) -> Run:
            run = bind(a, limits)

            def behaved(n: int) -> None:
                count[0] += 1
                what = mine.get(count[0])
                if late and draws.random() < OFTEN:
                    time.sleep(draws.random() * LATE_S)
                if what == "dead":
                    raise DeviceError(f"the device of rank {group.rank} was lost, as ranks=dead@{group.rank}:{count[0]} asks")
                while what == "stall" and not group.exchange.failure:
                    time.sleep(NAP_S)
                if what != "skip":
                    run(n)

            return behaved

        return bound

    return {name: changed(bind) for name, bind in plain.items()}
