"""Names the mutants that a failure looks like, where that can be told; a hint is right or absent.

Two things tell it. What a kernel left is just what a mutant of its golden leaves on the same case, which is tried out; or the
sentence of a failure says something that only one kind of fault brings about. `--prove` counts a hint that names another mutant
than the one that was there as a wrong trial.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from polydraft.conformance.outcomes import Result
from polydraft.contracts.base import Case, Contract
from polydraft.contracts.compare import compare, from_host, to_host
from polydraft.contracts.composite import part_lengths, split
from polydraft.contracts.inputs import Kernel, contract_of
from polydraft.contracts.kv_quant import Kv
from polydraft.device import Array

if TYPE_CHECKING:
    from polydraft.conformance.fault_injection import BrokenGolden

MOST: Final = 2
"""Mutants that a hint names; where more fit, nothing is told apart."""
SIGNS: Final[Mapping[str, str]] = {
    "M18": r"wanted: drafts are made",
    "M20": r"(a replay or more|steps were replayed).*, got \[?0\b",
    "M22": r"allocated [1-9]|allocations in each steady step|allocations during the steps of a run",
    "M24": r"synchronised [1-9]|waits in each steady step\[\d+\] is [2-9]",
    "M31": r"what lies in staging once query\(\) said True",
    "M33": r"a block is lost, or free and held at once",
    "M35": r"a block is lost, or free and held at once|free blocks of an engine at rest",
    "M42": r"kernels that silently run the reference's code",
    "M46": r"what the capture facility lacks|polydraft_graph_capture returned",
    "M53": r"the buffer behind a capture is",
    "M60": r"a refusal that names .*binding says 'nothing'",
    "M124": r"wanted: a replay of \w+ returns while",
    "M88": r"wanted: filling \w+ of \w+ returns while",
    "M89": r"event\.record\(\) waits",
    "M121": r"wanted: stream\.wait\(\) returns while",
}
"""Mutants, and what a failure's sentence says of their kind of fault alone."""


def causes(result: Result) -> str:
    """`M08 (first mismatch counted as accepted)`, or two of them: what a failure looks like; "" where that cannot be told."""
    from polydraft.conformance.faulty_backends import MUTANTS

    titles = {mutant.id: mutant.title for mutant in MUTANTS}
    return " or ".join(f"{id_} ({titles[id_]})" for id_ in named(result))


def named(result: Result) -> tuple[str, ...]:
    """The mutants that a failure looks like, by id; at most `MOST`, or none."""
    found = tuple(result.like) or tuple(id_ for id_, sign in SIGNS.items() if re.search(sign, result.message))
    return found if len(found) <= MOST else ()


def resembled(kernel: Kernel, case: Case, got: Mapping[str, Array], *, act: str = "f32", kv: Kv = "") -> tuple[str, ...]:
    """Ids of the mutants of this kernel that leave on `case` what was `got`, in host representations by argument name."""
    from polydraft.conformance.fault_injection import BrokenGolden
    from polydraft.conformance.faulty_backends import MUTANTS
    from polydraft.conformance.harness import run_golden

    parts = (kernel,) if isinstance(kernel, Contract) else kernel.contracts
    breaks = {one.id: one.broken for one in MUTANTS if isinstance(one.broken, BrokenGolden)}
    mine = {id_: change for id_, change in breaks.items() if change.contract in {part.name for part in parts}}

    def same(change: BrokenGolden) -> bool:
        try:
            found = run_golden(kernel, case, act, kv=kv, golden=_broken(kernel, change))
        except IndexError:  # it leaves its arrays on this case, which a kernel that has left results did not
            return False
        # Rounded, since no error is allowed where the golden itself computes nothing.
        left = {name: replace(one, value=from_host(to_host(one.value, one.dtype), one.dtype)) for name, one in found.items()}
        return compare(contract_of(kernel), case, got, left).ok

    return tuple(id_ for id_, change in mine.items() if same(change))


def _broken(kernel: Kernel, change: BrokenGolden) -> Callable[[Any, int], None]:
    """The golden of a contract with a mutant's change, or that of a composite in one of its parts."""

    def golden(a: Any, n: int) -> None:
        for contract, part, length in _parts(kernel, a, n):
            if contract.name == change.contract:
                change.corrupt(contract.golden, part, length)
            else:
                contract.golden(part, length)

    return golden


def _parts(kernel: Kernel, a: Any, n: int) -> Iterator[tuple[Contract, Any, int]]:
    if isinstance(kernel, Contract):
        yield kernel, a, n
        return
    parts = split(kernel, a)
    yield from zip(kernel.contracts, parts, part_lengths(kernel, parts, n), strict=True)
