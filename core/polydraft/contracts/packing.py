"""Defines packed weights: which numbers of few bits stand for a matrix, and how activations are rounded beside them.

Goldens, the loader and the kit call it in NumPy. A checkpoint is read into this form whatever its own layout is, without a float
copy; how a backend lays a packed weight out in memory is its own business (`prepare_weight`).

Weights of few bits with scales by channel and group: Frantar et al. 2022, GPTQ; Lin et al. 2023, AWQ. Activations rounded by
token: Xiao et al. 2022, SmoothQuant; by 128 columns of a token beside blocks of 128 x 128: DeepSeek-AI 2024, DeepSeek-V3; by 32
columns of a token beside groups of as many: ggml's products of Q4_0. E4M3: Micikevicius et al. 2022, FP8 Formats for Deep
Learning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from polydraft.contracts.compare import from_host, to_host
from polydraft.device import Array
from polydraft.errors import ContractError

Number = Literal["int8", "int4", "fp8"]
LARGEST: Final[Mapping[str, float]] = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""Of the numbers of a weight that is packed here, of either sign; stored int8 and int4 may also be -128 and -8."""
MIDDLE: Final = 8
"""What stands for 0 among the int4 of a packing without zero points, which are stored as 0 to 15."""
LEAST_SCALE: Final = 2.0**-100
"""Of activations: a row of zeros has one, too."""
CANDIDATES: Final = (7.0, 7.5, 8.0)
"""By what the largest number of a group of int4 is divided: the scale that leaves the smallest sum of squared errors is taken."""


@dataclass(frozen=True)
class Packing:
    """How a matrix [outputs, inputs] is packed: weight = (number - zero) * scale.

    `number`: how each is stored. A scale is of `rows` outputs and `columns` inputs (0: all of them); the last block of a matrix
    may be smaller. `zeros`: each scale has a zero point from 0 to 15 beside it (int4). `activations`: rows of activations are
    rounded to 8 bits (`rounded_to`), each `columns` of a row with a scale of their own (`rounded`), and not at all without."""

    number: Number
    rows: int = 1
    columns: int = 0
    zeros: bool = False
    activations: bool = False

    @property
    def name(self) -> str:
        """As capabilities, plans and checks call it: "int4-group128-zeros", "int8-channel-a8"."""
        grain = f"block{self.columns}" if self.rows > 1 else f"group{self.columns}" if self.columns else "channel"
        return f"{self.number}-{grain}{'-zeros' if self.zeros else ''}{'-a8' if self.activations else ''}"

    def scales_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales, and of the zero points, of a matrix or a stack of them."""
        *stack, outputs, inputs = shape
        return *stack, -(-outputs // self.rows), -(-inputs // self.columns) if self.columns else 1

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix or a stack, scales of groups in 16 bits and others in 32; a backend may take a few more."""
        *rows, inputs = shape
        scales = math.prod(self.scales_of(shape)) * ((2 if self.grouped else 4) + self.zeros)
        return math.prod(rows) * (-(-inputs // 2) if self.number == "int4" else inputs) + scales

    @property
    def rounded_to(self) -> Number:
        """The kind of number that activations are rounded to, where they are: that of the weights, int8 beside int4."""
        return "fp8" if self.number == "fp8" else "int8"

    @property
    def grouped(self) -> bool:
        """Whether there are several scales along the inputs of one output alone."""
        return bool(self.columns) and self.rows == 1


def _packings() -> dict[str, Packing]:
    found = [Packing("int8"), Packing("int8", activations=True)]
    found += [Packing("int4", 1, columns, zeros) for zeros in (False, True) for columns in (0, 32, 64, 128)]
    found += [Packing("int4", 1, columns, activations=True) for columns in (32, 64, 128)]
    for rows, columns in ((1, 0), (128, 128)):
        found += [Packing("fp8", rows, columns), Packing("fp8", rows, columns, activations=True)]
    return {one.name: one for one in found}


PACKINGS: Final[Mapping[str, Packing]] = _packings()
"""Those that there are, by name. One scale for a whole tensor is a channel's for each of its outputs."""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix [outputs, inputs] in few bits, or a stack of them, [matrices, outputs, inputs], whose arrays have that axis, too.

    `numbers`: int8 [outputs, inputs]; uint8 [outputs, ceil(inputs / 2)] with two int4, that of the even column in the low half;
    or uint8 [outputs, inputs], the bits of E4M3. `scales`: float32, shaped as `Packing.scales_of` says. `zeros`: uint8 of that
    shape, None in a packing without. Raises `ContractError` for arrays of another form."""

    packing: Packing
    shape: tuple[int, ...]
    numbers: Array
    scales: Array
    zeros: Array | None = None

    def __post_init__(self) -> None:
        *rows, inputs = self.shape
        width = -(-inputs // 2) if self.packing.number == "int4" else inputs
        places = self.packing.scales_of(self.shape)
        dtype = np.int8 if self.packing.number == "int8" else np.uint8
        wanted: list[tuple[str, Array | None, tuple[int, ...], type]] = [("numbers", self.numbers, (*rows, width), dtype)]
        wanted += [("scales", self.scales, places, np.float32)]
        wanted += [("zeros", self.zeros, places, np.uint8)] if self.packing.zeros else []
        for name, array, shape, kind in wanted:
            if array is None or array.shape != shape or array.dtype != kind:
                got = None if array is None else f"{array.dtype} {list(array.shape)}"
                raise ContractError(
                    f"a weight {list(self.shape)} packed as {self.packing.name}: got {name} {got}, wanted {np.dtype(kind)} "
                    f"{list(shape)}; correct what packs it"
                )

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What is stored: numbers, scales, and zero points where there are some."""
        return (self.numbers, self.scales) if self.zeros is None else (self.numbers, self.scales, self.zeros)

    @property
    def nbytes(self) -> int:
        """Of what is stored."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def ndim(self) -> int:
        """2 of a matrix, 3 of a stack."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, number: int) -> PackedWeight:
        """One matrix of a stack."""
        zeros = None if self.zeros is None else self.zeros[number]
        return PackedWeight(self.packing, self.shape[1:], self.numbers[number], self.scales[number], zeros)

    def __iter__(self) -> Iterator[PackedWeight]:
        """The matrices of a stack."""
        return (self[number] for number in range(len(self)))

    def read(self, dtype: type = np.float32) -> Array:
        """The matrix or stack, each element (number - zero) * scale computed in `dtype`."""
        return np.asarray((self.signed(dtype) * self._spread(self.scales)), dtype)

    def signed(self, dtype: type = np.float32) -> Array:
        """number - zero of each element, exact in `dtype`, of its `shape`."""
        if self.packing.number == "int8":
            return self.numbers.astype(dtype)
        if self.packing.number == "fp8":
            return E4M3[self.numbers].astype(dtype)
        both = np.stack([self.numbers & 15, self.numbers >> 4], axis=-1).reshape(*self.shape[:-1], -1)[..., : self.shape[-1]]
        return both.astype(dtype) - (MIDDLE if self.zeros is None else self._spread(self.zeros).astype(dtype))

    def _spread(self, places: Array) -> Array:
        """What is of a block, at each of its elements."""
        outputs, inputs = self.shape[-2:]
        rows = np.repeat(places, self.packing.rows, axis=-2)[..., :outputs, :] if self.packing.rows > 1 else places
        return np.repeat(rows, self.packing.columns, axis=-1)[..., :inputs] if self.packing.columns else rows


Matrix = Array | PackedWeight
"""A weight in its canonical form, packed or not."""


def unpacked(value: Matrix, dtype: type = np.float32) -> Array:
    """The array that a weight stands for, in `dtype`; itself where it is not packed."""
    return value.read(dtype) if isinstance(value, PackedWeight) else value


def stacked(matrices: Sequence[PackedWeight]) -> PackedWeight:
    """Packed matrices of one shape and packing as a stack."""
    first = matrices[0]
    zeros = [one.zeros for one in matrices if one.zeros is not None]
    return PackedWeight(
        first.packing,
        (len(matrices), *first.shape),
        np.stack([one.numbers for one in matrices]),
        np.stack([one.scales for one in matrices]),
        np.stack(zeros) if zeros else None,
    )


def pack(matrix: Array, packing: Packing) -> PackedWeight:
    """The packed weight nearest to a float32 matrix [outputs, inputs], or to each of a stack of them, each number to the nearest,
    ties to the even one.

    Scales of int8 and fp8 are the largest magnitude over `LARGEST`. A group of int4 takes the scale of a few that errs least, and
    with zero points the span of its numbers and 0. Scales of groups are rounded to bfloat16 first: they are many."""
    if matrix.ndim == 3:
        return stacked([pack(one, packing) for one in matrix])
    outputs, inputs = matrix.shape
    rows, columns = packing.scales_of(matrix.shape)
    height, width = packing.rows, packing.columns or inputs
    padded = np.zeros((rows * height, columns * width), np.float32)
    padded[:outputs, :inputs] = matrix
    blocks = padded.reshape(rows, height, columns, width)
    if packing.zeros:
        low, high = (np.asarray(reduce(blocks, axis=(1, 3)), np.float32) for reduce in (np.min, np.max))
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = _usable((high - low) / np.float32(15), packing)
        zeros = np.clip(np.rint(-low / scales), 0, 15).astype(np.uint8)
        found = np.clip(np.rint(blocks / _at(scales)) + _at(zeros), 0, 15)
        return PackedWeight(packing, (outputs, inputs), nibbles(_flat(found, matrix)), scales, zeros)
    most = np.asarray(np.abs(blocks).max(axis=(1, 3), initial=0.0), np.float32)
    scales = _usable(most / np.float32(LARGEST[packing.number]), packing)
    if packing.number == "fp8":
        flat = _flat(blocks / _at(scales), matrix)
        return PackedWeight(packing, (outputs, inputs), e4m3_bits(flat), scales)
    if packing.number == "int8":
        return PackedWeight(
            packing, (outputs, inputs), _flat(np.clip(np.rint(blocks / _at(scales)), -127, 127), matrix).astype(np.int8), scales
        )
    least = np.full(scales.shape, np.inf, np.float32)
    found = np.zeros_like(blocks)
    for by in CANDIDATES:
        tried = _usable(most / np.float32(by), packing)
        numbers = np.clip(np.rint(blocks / _at(tried)), -8, 7)
        error = np.square(numbers * _at(tried) - blocks).sum(axis=(1, 3))
        better = error < least
        least, scales = np.where(better, error, least), np.where(better, tried, scales)
        np.copyto(found, numbers, where=_at(better))
    return PackedWeight(packing, (outputs, inputs), nibbles(_flat(found + MIDDLE, matrix)), scales)


def _at(places: Array) -> Array:
    """What is of a block [rows, columns], beside its elements [rows, height, columns, width]."""
    return places[:, None, :, None]


def _flat(blocks: Array, matrix: Array) -> Array:
    rows, height, columns, width = blocks.shape
    return np.ascontiguousarray(blocks.reshape(rows * height, columns * width)[: matrix.shape[0], : matrix.shape[1]])


def _usable(scales: Array, packing: Packing) -> Array:
    """Scales as they are kept: none is 0, those of groups are bfloat16 numbers."""
    kept = from_host(to_host(scales, "bf16"), "bf16").astype(np.float32) if packing.grouped else scales
    return np.where(kept > 0, kept, np.float32(1)).astype(np.float32)


def nibbles(numbers: Array) -> Array:
    """Two numbers from 0 to 15 a byte, that of the even column in the low half; a last one alone has 0 beside it."""
    whole = numbers.astype(np.uint8, copy=False)
    if whole.shape[1] % 2:
        whole = np.pad(whole, ((0, 0), (0, 1)))
    return np.ascontiguousarray(whole[:, ::2] | whole[:, 1::2] << 4)


# -- E4M3 ----------------------------------------------------------------------------------------------
def _e4m3() -> Array:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent, np.ldexp(1.0 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    value[(code & 127) == 127] = np.nan
    return np.asarray(np.where(code & 128, -value, value), np.float32)


E4M3: Final = _e4m3()
"""The number of each byte, float32 [256]."""


def e4m3_bits(values: Array) -> Array:
    """The byte of the number of E4M3 nearest to each of float32 `values`, ties to the even one, 448 at most; NaN stays NaN."""
    size = np.minimum(np.abs(values), np.float32(448))
    known = np.where(np.isnan(size), np.float32(0), size)
    exponent = np.where(known > 0, np.maximum(np.frexp(known)[1] - 1, -6), -6)
    steps = np.rint(np.ldexp(known, 3 - exponent)).astype(np.int32)  # 8 to 16 of the last place, fewer below the normal ones
    code = np.where(exponent == -6, steps, steps + (exponent + 6) * 8)
    return np.where(np.isnan(size), 127, code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


# -- activations ---------------------------------------------------------------------------------------
def rounded(x: Array, packing: Packing) -> Array:
    """Rows of activations [rows, inputs] as a packing has them multiplied, float64; as they are without `activations`.

    Each `columns` of a row have the scale s = max(largest magnitude / LARGEST, LEAST_SCALE), and x becomes s * q: q is the
    nearest whole number or E4M3 to x / s, ties to the even one. Both quotients are float32 divisions, rounded as IEEE 754 says,
    so that q and s are the same bits everywhere. Where a magnitude is infinite or NaN, all of its columns are NaN."""
    return _by_scales_of(x, packing, x) if packing.activations else np.asarray(x, np.float64)


def moves(x: Array, off: Array, packing: Packing) -> Array:
    """How much numbers of rows [rows, inputs] that are rounded move where x is off by `off`, with the scales as they are: a step
    of the grid or more where a border may be crossed, else 0."""
    low, middle, high = (_by_scales_of(x, packing, x + by) for by in (-off, 0.0, off))
    return np.asarray(np.maximum(high - middle, middle - low))


def _by_scales_of(x: Array, packing: Packing, values: Array) -> Array:
    """Values rounded by the scales of x."""
    with np.errstate(invalid="ignore", over="ignore"):
        most = np.abs(_columns(x, packing)).max(axis=-1, keepdims=True, initial=0.0)  # NaN where there is one
        scale = np.maximum(most / np.float32(LARGEST[packing.rounded_to]), np.float32(LEAST_SCALE))
        scale = np.where(np.isfinite(most), scale, np.float32(np.nan))
        q = _columns(values, packing) / scale
    q = E4M3[e4m3_bits(q)] if packing.number == "fp8" else np.rint(q)
    return np.asarray((q.astype(np.float64) * scale).reshape(len(x), -1)[:, : x.shape[1]])


def _columns(x: Array, packing: Packing) -> Array:
    """Rows in float32, by the columns that have a scale of their own, [rows, groups, columns]."""
    rows, inputs = x.shape
    width = packing.columns or inputs
    padded = np.zeros((rows, -(-inputs // width) * width), np.float32)
    padded[:, :inputs] = x
    return padded.reshape(rows, -1, width)


def multiplied(x: Array, weight: Matrix) -> tuple[Array, Array]:
    """Rows and matrix as float64, of which `linear` is the product: what both stand for where the weight is packed."""
    return (rounded(x, weight.packing), weight.read(np.float64)) if isinstance(weight, PackedWeight) else (x, weight)


@dataclass(frozen=True)
class MadeAtLoad:
    """What `--weights` makes of matrices that a checkpoint has in floats."""

    packing: Packing
    why: str


MADE: Final[Mapping[str, MadeAtLoad]] = {
    "int8": MadeAtLoad(PACKINGS["int8-channel"], "activations stay as they are, which errs least"),
    "int8-a8": MadeAtLoad(PACKINGS["int8-channel-a8"], "rows are rounded, too, which errs more; CPUs multiply bytes fastest"),
    "int4": MadeAtLoad(PACKINGS["int4-group32"], "groups of 32 err least"),
    "int4-a8": MadeAtLoad(
        PACKINGS["int4-group32-a8"], "groups of rows are rounded, too, which errs little more; CPUs multiply bytes fastest"
    ),
    "fp8": MadeAtLoad(PACKINGS["fp8-channel"], "activations stay as they are, which errs least"),
    "fp8-a8": MadeAtLoad(PACKINGS["fp8-channel-a8"], "rows are rounded, too, which errs more; tensor cores of fp8 take both"),
}
"""By the value of `--weights`."""
PARTS: Final = ("head", "mtp")
"""Parts of a model that `--weights-ignore` leaves as they are: the language-model head, the MTP head."""
