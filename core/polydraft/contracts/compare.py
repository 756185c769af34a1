"""Compares what a kernel left in its arrays with what the golden left in them.

The harness calls it for every case, the adequacy gate for every mutant, the conformance kit for every vendor. It runs no kernel.
Tolerances are the contract's, carried by `Expected.allowed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from polydraft.contracts.base import Case, Contract
from polydraft.device import DTYPES, Array

Mask = NDArray[np.bool_]

EPS: Final[Mapping[str, float]] = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
"""Distance from 1 to the next number of each float dtype; a float tolerance counts in it."""

STRETCH: Final = 1 << 16
"""Numbers that are rounded at a time."""

Products = Literal["f32", "tf32"]
"""What products of float32 round their factors to (`Capabilities.f32_matmul`)."""
TF32_EPS: Final = 2.0**-10
"""Distance from 1 to the next number of TF32. Numbers of float16 and bf16 are numbers of TF32."""

NORMAL: Final[Mapping[str, float]] = {"f32": 2.0**-126, "f16": 2.0**-14, "bf16": 2.0**-126}
"""Smallest normal number of each float dtype: below it neighbours do not move closer together."""

FLUSHED: Final[Mapping[str, float]] = {"f32": NORMAL["f32"], "f16": 0.0, "bf16": NORMAL["bf16"]}
"""Below this a computed number may be 0, since many devices flush subnormal numbers of float32; those of float16 count."""

MANY: Final = 10.0
"""Times that a tolerance was exceeded from which on nobody counts in per cent."""

Kind = Literal["missing", "extra", "type", "dtype", "shape", "value", "touched", "unspecified", "nothing"]
"""What is wrong. `touched`: written where nothing may be written; `unspecified`: not finite where any finite number
will do; `nothing`: no element was compared, which proves nothing."""


@dataclass(frozen=True)
class Expected:
    """What the golden left in one array, and how far a kernel may be from it.

    `value`, `before`: the array after and before the launch in canonical numbers (floats float64, integers as they
    are). `dtype`: dtype name that the kernel's array must have. `allowed`: absolute error allowed an element, broadcast
    to the shape; None for exactly equal. `loose`: elements whose value the contract leaves open (pad "any");
    `loose_finite`: they must be finite. An element that the golden left as it was must be exactly as it was, whatever
    `allowed` says.
    """

    value: Array
    before: Array
    dtype: str
    allowed: Array | None = None
    loose: Array | None = None
    loose_finite: bool = True


@dataclass(frozen=True)
class Mismatch:
    """What is wrong with one argument: `got` and `wanted` are texts, `index` the worst element (None when the structure
    is wrong), `count` how many elements are wrong of `total`."""

    contract: str
    case: str
    argument: str
    kind: Kind
    got: str
    wanted: str
    index: tuple[int, ...] | None = None
    count: int = 0
    total: int = 0
    left: bool = False
    """Whether that element is as it was before the launch, and should not be."""

    def describe(self) -> str:
        """What differs, without contract and case."""
        place = self.argument if self.index is None else f"{self.argument}[{', '.join(map(str, self.index))}]"
        many = f" ({self.count} of {self.total} elements are wrong)" if self.count > 1 else ""
        many += "; it was left as before the launch" if self.left else ""
        return f"{place} is {self.got}, wanted {self.wanted}{many}"


@dataclass(frozen=True)
class Headroom:
    """The element that came nearest to its tolerance: `ratio` is error / allowed, above 1 where it was exceeded."""

    ratio: float
    argument: str
    index: tuple[int, ...]

    def describe(self) -> str:
        """Such as `out[2, 0] used 31% of its tolerance`."""
        return f"{self.argument}[{', '.join(map(str, self.index))}] used {share(self.ratio)} its tolerance"


def share(ratio: float) -> str:
    """What part of a tolerance was used, before its name: `31% of`, and far beyond it `8.4e+06 times`."""
    return f"{ratio:.0%} of" if ratio < MANY else f"{ratio:.2g} times"


@dataclass(frozen=True)
class Comparison:
    """The verdict over one case: `elements` compared, at most one mismatch an argument, and the headroom of float
    arithmetic (None where everything is compared exactly). `like`: known faults, by id, that leave just what was left."""

    contract: str
    case: str
    elements: int
    mismatches: tuple[Mismatch, ...]
    headroom: Headroom | None
    like: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.mismatches

    def describe(self) -> str:
        """One sentence for somebody who sees this contract for the first time: what differs, argument by argument; otherwise how
        much was compared and how near it was."""
        near = f"; {self.headroom.describe()}" if self.headroom else ""
        found = [mismatch.describe() for mismatch in self.mismatches] or [f"{self.elements} elements as specified{near}"]
        return f"{self.contract}, case {self.case!r}: {'; '.join(found)}"


def to_host(value: Array, dtype: str) -> Array:
    """Round canonical numbers to `dtype` and return their host representation (bf16: its bits, ties to even)."""
    if dtype not in EPS:
        return np.asarray(value, DTYPES[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "bf16":
            return np.asarray(value, DTYPES[dtype])
        return _bf16_bits(np.ascontiguousarray(value, np.float32))


def _bf16_bits(single: Array) -> Array:
    """The upper halves, rounded, a stretch at a time that a core's cache holds."""
    flat = single.reshape(-1)
    bits, found = flat.view(np.uint32), np.empty(flat.size, np.uint16)
    scratch = np.empty(min(STRETCH, flat.size), np.uint32)
    for begin in range(0, flat.size, STRETCH):
        part, out = bits[begin : begin + STRETCH], found[begin : begin + STRETCH]
        rounded = scratch[: part.size]
        np.right_shift(part, 16, out=rounded)
        rounded &= 1
        rounded += 0x7FFF
        rounded += part
        rounded >>= 16
        np.copyto(out, rounded, casting="unsafe")
        if (undefined := np.isnan(flat[begin : begin + STRETCH])).any():
            out[undefined] = 0x7FC0
    return found.reshape(single.shape)


def from_host(array: Array, dtype: str) -> Array:
    """Return the canonical numbers of a host representation: floats as float64, integers as they are."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64) if dtype in EPS else array


def compare(contract: Contract, case: Case, got: Mapping[str, Any], want: Mapping[str, Expected]) -> Comparison:
    """Compare `got`, host representations by argument name, with the golden's `want`.

    Structure comes first: the same arguments, each an array of the wanted dtype and shape, nothing broadcast. Then
    every element: exactly equal (NaN equals NaN, zeros of either sign are equal), or finite on both sides and within
    the allowed error. Raises nothing: whatever is wrong is in the result.
    """
    mismatches: list[Mismatch] = []
    nearest: Headroom | None = None
    elements = sum(one.value.size for one in want.values())
    for name in [*want, *(extra for extra in got if extra not in want)]:
        wrong, near = _argument(contract, case, name, got.get(name), want.get(name))
        if wrong is not None:
            mismatches.append(wrong)
        if near is not None and (nearest is None or near.ratio > nearest.ratio):
            nearest = near
    if elements == 0 and not mismatches:
        mismatches.append(
            Mismatch(contract.key, case.name, "the comparison", "nothing", "without a single element", "at least one")
        )
    return Comparison(contract.key, case.name, elements, tuple(mismatches), nearest)


def _argument(
    contract: Contract, case: Case, name: str, got: Any, want: Expected | None
) -> tuple[Mismatch | None, Headroom | None]:
    structure = _structure(got, want)
    if structure is not None:
        kind, is_, wanted = structure
        return Mismatch(contract.key, case.name, name, kind, is_, wanted), None
    assert want is not None  # _structure has reported it otherwise
    value = from_host(got, want.dtype)
    near = _headroom(name, value, want)
    if np.array_equal(value, want.value):  # the usual case, and much cheaper
        return None, near
    kept = _same(want.before, want.value)
    fine = _same(value, want.value)
    if want.allowed is not None:
        fine |= ~kept & (_excess(value, want) <= 1.0)
    if want.loose is not None:
        fine |= want.loose & (np.isfinite(value) | (not want.loose_finite))
    if fine.all():
        return None, near
    index = _worst(value, want, ~fine)
    kind, wanted = _wanted(want, index, bool(kept[index]))
    wrong = int((~fine).sum())
    left = bool(_same(value, want.before)[index])
    return Mismatch(contract.key, case.name, name, kind, _text(value[index]), wanted, index, wrong, fine.size, left), near


def _structure(got: Any, want: Expected | None) -> tuple[Kind, str, str] | None:
    """What is wrong before any element is looked at: (kind, got, wanted)."""
    if want is None:
        return "extra", "delivered", "no such argument"
    if got is None:
        return "missing", "missing", f"an array of shape {want.value.shape}"
    if not isinstance(got, np.ndarray):
        return "type", f"of type {type(got).__name__}", "a NumPy array"
    if got.dtype != DTYPES[want.dtype]:
        return "dtype", f"of dtype {got.dtype}", f"{DTYPES[want.dtype]} (the host form of {want.dtype})"
    if got.shape != want.value.shape:
        return "shape", f"of shape {got.shape}", f"shape {want.value.shape}"
    return None


def _same(left: Array, right: Array) -> Mask:
    """Elementwise equality in which NaN equals NaN."""
    same: Mask = left == right
    if left.dtype.kind == "f":
        same = same | (np.isnan(left) & np.isnan(right))
    return same


def _excess(value: Array, want: Expected) -> Array:
    """Error over allowed error; infinite where a number is not finite, or where there is an error and none allowed."""
    assert want.allowed is not None
    with np.errstate(all="ignore"):
        error = np.abs(value - want.value)
        ratio = np.where(error == 0.0, 0.0, error / want.allowed)
    return np.where(np.isfinite(ratio) & np.isfinite(want.allowed), ratio, np.inf)


def _headroom(name: str, value: Array, want: Expected) -> Headroom | None:
    """The nearest element among those that were computed, are finite, and are allowed an error."""
    if want.allowed is None:
        return None
    computed = ~_same(want.before, want.value) & np.isfinite(want.value) & np.isfinite(value) & (want.allowed > 0.0)
    if not computed.any():
        return None
    ratio = np.where(computed, _excess(value, want), -1.0)
    index = _position(ratio)
    return Headroom(float(ratio[index]), name, index)


def _worst(value: Array, want: Expected, wrong: Mask) -> tuple[int, ...]:
    """The wrong element farthest beyond its tolerance; the first one where elements are compared exactly."""
    if want.allowed is None:
        return _position(wrong)
    return _position(np.where(wrong, _excess(value, want), -1.0))


def _position(array: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(array)), array.shape))


def _wanted(want: Expected, index: tuple[int, ...], kept: bool) -> tuple[Kind, str]:
    if want.loose is not None and want.loose[index]:
        return "unspecified", "any finite number (the row carries nothing)"
    if kept:
        return "touched", f"{_text(want.before[index])} as before the launch (this element may not be written)"
    allowed = 0.0 if want.allowed is None else float(np.broadcast_to(want.allowed, want.value.shape)[index])
    wanted = _text(want.value[index])
    return "value", f"{wanted} within {allowed:.3g}" if allowed > 0 and math.isfinite(allowed) else f"exactly {wanted}"


def _text(value: Any) -> str:
    return f"{float(value):.9g}" if isinstance(value, np.floating) else str(int(value))
