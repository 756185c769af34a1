"""Modes of a kernel beside a backend's first one: further dtypes, row-invariant arithmetic, quantised KV rows, packed weights.

Checks of bindings, graphs, asynchrony and memory use a kernel for long in the first dtype, over plain rows and weights, and for a
while in each of these: what goes wrong in one of them alone is what a user of it meets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polydraft.backend import Capabilities
from polydraft.conformance.harness import Bound, InitMeta
from polydraft.conformance.kernel_checks import has_cache, is_float, legal, moved_on, pairs
from polydraft.conformance.target import Opened, Target
from polydraft.contracts.base import Case
from polydraft.contracts.inputs import Kernel, contract_of
from polydraft.contracts.kv_quant import KV_DTYPES, Kv
from polydraft.contracts.packing import PACKINGS


@dataclass(frozen=True)
class Mode:
    """How a kernel is asked to compute."""

    act: str
    """Dtype of activations."""
    row_invariant: bool = False
    kv: Kv = ""
    """How KV rows are kept."""
    packing: str = ""
    """How matrices are packed."""

    @property
    def name(self) -> str:
        """In a phrase, such as `bf16`, or `f32, rows in int8`."""
        said = {"row-invariant": self.row_invariant, f"rows in {self.kv}": self.kv, f"packed as {self.packing}": self.packing}
        return ", ".join((self.act, *(words for words, holds in said.items() if holds)))

    def on_first_device(self, target: Target) -> bool:
        """Whether a device that was opened for the first mode has its kernels."""
        return self.act == first_mode(target).act and not self.row_invariant

    def cases(self, kernel: Kernel, target: Target) -> tuple[Case, Case]:
        """Two cases of one form with other contents, on the same weights where they are packed."""
        order = target.info.capabilities.row_order
        packed = contract_of(kernel).packed_cases
        if not self.packing or packed is None:
            return pairs(kernel.name, order)[0]
        case = legal(next(one for one in packed(self.packing) if one.n), order)
        return case, moved_on(case)

    def bound(self, kernel: Kernel, case: Case, opened: Opened, init_meta: InitMeta | None) -> Bound:
        """The kernel bound to a case; `opened`: a device of this dtype and arithmetic."""
        return Bound(kernel, case, opened.device, opened.table, act=self.act, init_meta=init_meta, kv=self.kv)


def first_mode(target: Target) -> Mode:
    """The one that is tried at length."""
    return Mode(target.info.capabilities.dtypes[0])


def further_modes(kernel: Kernel, declared: Capabilities) -> Iterator[Mode]:
    """All others of a kernel, in which it computes something else; of packings one of each kind of numbers, with zero points and
    without."""
    first, *others = declared.dtypes
    if is_float(kernel) or has_cache(kernel):
        yield from (Mode(dtype) for dtype in others)
    if is_float(kernel) and declared.row_invariant:
        yield Mode(first, row_invariant=True)
    if has_cache(kernel):
        yield from (Mode(first, kv=kv) for kv in KV_DTYPES if kv in declared.kv_dtypes)
    if contract_of(kernel).packed_cases:
        yield from (Mode(first, packing=packing) for packing in kinds(getattr(declared, contract_of(kernel).packings)))


def kinds(packings: tuple[str, ...]) -> list[str]:
    """Of some packings one of each kind of numbers, with zero points and without."""
    return list({(PACKINGS[name].number, PACKINGS[name].zeros): name for name in sorted(packings, reverse=True)}.values())
