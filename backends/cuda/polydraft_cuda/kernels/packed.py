"""Weights of few bits on the device, and rows of activations that are rounded beside them.

`linear` and `expert_mlp` take what is made here: numbers in the order of operands where tiles widen them, row by row for plain
kernels and where E4M3 meets E4M3, and float32 scales as core has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from polydraft.contracts.packing import MIDDLE, PackedWeight, Packing
from polydraft.device import DTYPES, Array, Launch
from polydraft.errors import ContractError
from polydraft_cuda.compiler import act
from polydraft_cuda.device import CudaBuffer, CudaDevice
from polydraft_cuda.kernels.provider import source

NUMBERS: Final = {"fp8": 1, "int8": 2, "int4": 3}
"""Of packings, as kernels know them."""
PAIR: Final = 128
"""Inputs that are dealt together: what tiles take is a multiple of it."""
THREADS: Final = 256
"""Of the kernel that lays numbers out."""
ROW_THREADS, HELD = 512, 4
"""Of the kernel that rounds rows, and vectors of 8 that each has at most."""


class CudaPackedWeight:
    """A packed weight of [outputs, inputs], or a stack of them, for kernels that compute in `dtype`. `tiled`: `linear_tile` or
    `expert_tile` takes it. Its numbers then lie as `pieces` of 8 outputs by 64 inputs (`kernels/packed.cuh`), matrix by matrix,
    or, where `linear` multiplies E4M3 by E4M3 (`eight`), row by row, and once more as pieces where a projection wants exact
    products, made when that is bound: heads do."""

    __slots__ = ("dtype", "eight", "numbers", "packing", "pieces", "role", "scales", "shape", "tiled", "zeros")

    def __init__(self, device: CudaDevice, role: str, value: PackedWeight, dtype: str) -> None:
        self.role, self.packing, self.shape, self.dtype = role, value.packing, value.shape, dtype
        *stack, outputs, inputs = value.shape
        fits = inputs % 64 == 0 and outputs % 16 == 0 if stack else inputs % PAIR == 0
        self.tiled = device.arch == "sm_90" and dtype != "f32" and fits
        self.eight = self.tiled and not stack and self.packing.number == "fp8" and self.packing.activations
        self.pieces: CudaBuffer | None = None
        if self.tiled and not self.eight:
            self.pieces = self._empty_pieces(device)
        self.numbers = self.pieces or device.empty(f"weight.{role}", (self.rows, value.numbers.shape[-1]), "u8")
        self.scales: CudaBuffer = device.empty(f"weight.{role}_scales", value.scales.shape, "f32")
        self.zeros: CudaBuffer | None = None
        if value.zeros is not None:
            self.zeros = device.empty(f"weight.{role}_zeros", value.zeros.shape, "u8")

    @property
    def rows(self) -> int:
        """Outputs of all matrices."""
        return math.prod(self.shape[:-1])

    @property
    def pointer(self) -> int:
        """Device address of the numbers."""
        return self.numbers.pointer

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.numbers.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def _empty_pieces(self, device: CudaDevice) -> CudaBuffer:
        inputs = self.shape[-1]
        width = inputs // 2 if self.packing.number == "int4" else inputs
        return device.empty(f"weight.{self.role}", (-(-self.rows // 8) * 8, width), "u8")

    def fill(self, device: CudaDevice, value: PackedWeight) -> None:
        """Copy a value to the device, laid out; waits."""
        device.load(self.scales, np.ascontiguousarray(value.scales))
        if self.zeros is not None and value.zeros is not None:
            device.load(self.zeros, np.ascontiguousarray(value.zeros))
        span, *steps = _memory(value.numbers)
        if self.numbers is self.pieces:
            pool = device.empty("weight.pool", span.shape, "u8")
            device.write(pool.pointer, span)
            self._lay_out(device, pool, *steps)
            return
        if span.size == self.numbers.nbytes:
            device.write(self.pointer, span)
        else:
            self._spread(device, span, *steps)
        if self.pieces is not None:
            self._lay_out(device, self.numbers, 0, self.shape[1])

    def _spread(self, device: CudaDevice, span: Array, step: int, pitch: int) -> None:
        """Write out rows that overlap in memory, on the device; waits."""
        pool = device.empty("weight.pool", span.shape, "u8")
        device.write(pool.pointer, span)
        rows, columns = self.numbers.shape
        told = {"EIGHT": 0, "VECTOR": 0, **defines(self.packing), **act(self.dtype)}
        function = device.function(source("packed.cu"), "spread_bytes", **told)
        function.bind(rows, THREADS, pool, self.numbers, columns, self.shape[-2], step, pitch)(device.stream, 1)
        device.synchronize()

    def in_pieces(self, device: CudaDevice) -> CudaBuffer:
        """Its numbers as pieces, made now where there are none yet; waits then."""
        if self.pieces is None:
            self.pieces = self._empty_pieces(device)
            self._lay_out(device, self.numbers, 0, self.shape[1])
        return self.pieces

    def _lay_out(self, device: CudaDevice, numbers: CudaBuffer, step: int, pitch: int) -> None:
        """Make pieces of row-major numbers, `pitch` bytes from row to row and `step` from matrix to matrix; waits."""
        assert self.pieces is not None
        height, inputs = self.shape[-2:]
        function = device.function(source("packed.cu"), "lay_out", EIGHT=0, VECTOR=0, **defines(self.packing), **act(self.dtype))
        blocks = -(-self.pieces.nbytes // (4 * THREADS))
        function.bind(blocks, THREADS, numbers, self.pieces, self.scales, self.rows, inputs, height, step, pitch)(
            device.stream, 1
        )
        device.synchronize()


def prepare(device: CudaDevice, role: str, value: PackedWeight, dtype: str, previous: Any = None) -> CudaPackedWeight:
    """A packed weight on the device, over `previous` where there is one; waits."""
    if previous is None:
        weight = CudaPackedWeight(device, role, value, dtype)
    elif isinstance(previous, CudaPackedWeight) and (previous.shape, previous.packing) == (value.shape, value.packing):
        weight = previous
    else:
        raise ContractError(
            f"weight update: got {value.packing.name} of shape {value.shape}, wanted {getattr(previous, 'dtype', '?')} of shape "
            f"{getattr(previous, 'shape', '?')}; load the same architecture in the same packing"
        )
    weight.fill(device, value)
    return weight


def _memory(numbers: Array) -> tuple[Array, int, int]:
    """The memory that a matrix of bytes or a stack of them spans, flat, and the bytes from matrix to matrix and from row to row.
    Rows that overlap (what `polydraft bench --shape` gives) are not spread out."""
    *stack, rows, columns = numbers.shape
    *steps, pitch, each = numbers.strides
    if each != 1 or not 0 < pitch < columns or min(steps, default=0) < 0:
        return np.ascontiguousarray(numbers).reshape(-1).view(np.uint8), rows * columns, columns
    last = sum((count - 1) * by for count, by in zip((*stack, rows), (*steps, pitch), strict=True))
    span = np.lib.stride_tricks.as_strided(numbers, (last + columns,), (1,), writeable=False)
    return np.ascontiguousarray(span).view(np.uint8), steps[0] if steps else 0, pitch


def packing_of(a: Any) -> Packing | None:
    """The packing of the weight of a product."""
    return a.weight.packing if isinstance(a.weight, CudaPackedWeight) else None


def defines(packing: Packing | None) -> dict[str, int]:
    """What kernels are told of a packing, or of none."""
    if packing is None:
        return {"NUMBER": 0, "GROUP": 0, "BLOCK": 1}
    return {"NUMBER": NUMBERS[packing.number], "GROUP": packing.columns, "BLOCK": packing.rows}


def is_eight(a: Any) -> bool:
    """Whether a projection multiplies E4M3 with E4M3: by tensor cores, whose sums are too rough for outputs in float32."""
    return isinstance(a.weight, CudaPackedWeight) and a.weight.eight and a.out.dtype != "f32"


def product_defines(a: Any) -> dict[str, int]:
    """What kernels that multiply are told besides."""
    packing = packing_of(a)
    zeros, activations = (packing.zeros, packing.activations) if packing else (False, False)
    return {**defines(packing), "ZEROS": int(zeros), "ROUNDED": int(activations)}


# -- activations -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """A tensor within a buffer."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Rounded:
    """Rows of a projection as it multiplies them, and their scales [groups, pitch]: None where they are not rounded."""

    x: Any
    scales: Place | None
    pitch: int


def rounded_bytes(a: Any) -> int:
    """Scratch of a projection that rounds its rows."""
    packing = packing_of(a)
    if packing is None or not packing.activations:
        return 0
    numbers, scales = _sizes(a, packing)
    return numbers + scales


def _sizes(a: Any, packing: Packing) -> tuple[int, int]:
    rows, inputs = a.x.shape
    groups = -(-inputs // packing.columns) if packing.columns else 1
    return -(-rows * inputs * DTYPES[_rounded_dtype(a)].itemsize // 256) * 256, groups * _pitch(rows) * 4


def _rounded_dtype(a: Any) -> str:
    return "u8" if is_eight(a) else str(a.x.dtype)


def _pitch(rows: int) -> int:
    return -(-rows // 8) * 8


def place_rounded(a: Any, scratch: int) -> Rounded:
    """Where the rows of a projection are found: in scratch from an address on, where they are rounded."""
    packing = packing_of(a)
    if packing is None or not packing.activations:
        return Rounded(a.x, None, 0)
    rows, inputs = a.x.shape
    numbers, _ = _sizes(a, packing)
    groups = -(-inputs // packing.columns) if packing.columns else 1
    return Rounded(
        Place(scratch, (rows, inputs), _rounded_dtype(a)), Place(scratch + numbers, (groups, _pitch(rows)), "f32"), _pitch(rows)
    )


def rounding_defines(a: Any) -> dict[str, int]:
    """What kernels that round rows of a projection are told."""
    return {"EIGHT": int(is_eight(a)), **defines(packing_of(a))}


def round_rows(device: CudaDevice, a: Any, to: Rounded, each: int = 1) -> Launch:
    """Bind the rounding of the rows of a launch, `each` for one of its own."""
    packing = packing_of(a)
    assert packing is not None
    inputs = int(a.x.shape[1])
    vector = a.x.dtype != "f32" and inputs % (packing.columns or 8) == 0 and inputs <= 8 * HELD * ROW_THREADS
    function = device.function(source("packed.cu"), "round_rows", VECTOR=int(vector), **rounding_defines(a), **act(a.x.dtype))
    grid = lambda n: (n * each, 1, 1)  # noqa: E731
    return function.bind(grid, ROW_THREADS, a.x, to.x, to.scales, inputs, to.pitch, dependent=True)


assert MIDDLE == 8, "kernels take 8 where there are no zero points"
