"""Reads one safetensors file, whose header is checked when it is opened.

Only `checkpoint.py` calls it. Opening a file executes, unpickles and copies nothing; tensors are converted to float32 one at a
time, on request. What is wanted is read when it is wanted, and not mapped: a file that another process cuts short meanwhile, such
as a trainer that writes its next weights over it, is then an error, where touching a map is a signal that ends the process.

Format (safetensors, by its specification): 8-byte little-endian header length, a JSON header, then the data without
holes. The `safetensors` package hands NumPy no bfloat16, hence this reader.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft import json_text
from polydraft.errors import CheckpointError

__all__ = ["SafetensorsFile", "StoredTensor"]

_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16} | {
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "U16": "bfloat16"}
"""How floats are stored. "U16" is how Paddle writes bfloat16: as its bits."""
_FLOATS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""What these are read as."""
_RAW = {
    "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "U32": "<u4", "I32": "<i4", "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4",
}  # fmt: skip
_WHOLE = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
"""Dtypes whose every value is one of int64."""
_AGAIN = "download the file again"
_PIECE = 1 << 18
"""Elements that are read at once: as many bytes as a processor's cache holds."""


@dataclass(frozen=True)
class StoredTensor:
    """Where and how one tensor lies in its file."""

    dtype: str
    """The format's own spelling, for example "BF16"."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the file."""
    end: int
    """Byte after the last one."""


class SafetensorsFile:
    """One safetensors file; `tensors` is its header, `metadata` the texts that its writer added. Close it to release the
    descriptor."""

    def __init__(self, path: Path) -> None:
        """Open `path` and check its header. Errors: `CheckpointError` for a missing, truncated or corrupt file."""
        self.path = path
        try:
            file = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be opened, got {error.strerror}, wanted a safetensors file; complete the directory"
            ) from error
        self._descriptor, self._open = file.fileno(), weakref.finalize(self, file.close)
        try:
            size = os.fstat(self._descriptor).st_size
            self.tensors, self.metadata = _parse_header(path, size, self._bytes)
        except BaseException:
            self.close()
            raise

    def dtype(self, name: str) -> str:
        """Return the NumPy-style name of the stored dtype. Errors: `CheckpointError` for one that is not read."""
        stored = self.tensors[name].dtype
        if stored not in _NAMES:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {stored}, wanted F32, F16 or BF16; convert the checkpoint to bfloat16"
            )
        return _NAMES[stored]

    def read_into(self, name: str, out: NDArray[np.float32]) -> None:
        """Convert tensor `name` into the C-contiguous float32 array `out` of the same number of elements.

        Exact for all three stored dtypes: bfloat16 is the upper half of a float32. Synchronous; no temporary array.
        Errors: `CheckpointError` for an unsupported dtype or a closed file.
        """
        dtype, flat = self.dtype(name), out.reshape(-1)
        for begin, raw in self._parts(name, _FLOATS[dtype]):
            part = flat[begin : begin + raw.size]
            if dtype == "bfloat16":
                np.left_shift(raw, 16, out=part.view(np.uint32), dtype=np.uint32)
            else:
                np.copyto(part, raw)

    def piece(self, name: str, look: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[np.float32]:
        """Return what `look` picks of tensor `name`, an index or a view of it, as a fresh float32 array; nothing else of it is
        read, but for what lies between its places. Errors: as for `read_into`."""
        dtype = self.dtype(name)
        picked = self._picked(name, _FLOATS[dtype], look)
        if dtype == "bfloat16":
            bits: NDArray[np.uint32] = np.left_shift(picked, 16, dtype=np.uint32)
            return bits.view(np.float32)
        floats: NDArray[np.float32] = picked.astype(np.float32, copy=False)
        return floats

    def array(self, name: str) -> NDArray[Any]:
        """Return a copy of tensor `name` as it is stored (bfloat16 and E4M3 as their bits). Errors: `CheckpointError` for a dtype
        that is not one of these, or a closed file."""
        tensor = self.tensors[name]
        if tensor.dtype not in _RAW:
            raise CheckpointError(f"{self.path}: tensor {name} is stored as {tensor.dtype}, wanted one of {', '.join(_RAW)}")
        return self._stored(name, _RAW[tensor.dtype])

    def integers(self, name: str) -> NDArray[np.int64]:
        """Return tensor `name` of whole numbers or truth values (1 and 0) as a fresh int64 array of its shape. Errors:
        `CheckpointError` for a tensor of any other dtype, or a closed file."""
        tensor = self.tensors[name]
        if tensor.dtype not in _WHOLE:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {tensor.dtype}, wanted whole numbers or truth values "
                f"({', '.join(_WHOLE)}); convert it"
            )
        return self._stored(name, _WHOLE[tensor.dtype]).astype(np.int64)

    def _stored(self, name: str, dtype: str) -> NDArray[Any]:
        """A fresh copy of a tensor as it is stored."""
        out: NDArray[Any] = np.empty(self.tensors[name].shape, dtype)
        flat = out.reshape(-1)
        for begin, raw in self._parts(name, dtype):
            flat[begin : begin + raw.size] = raw
        return out

    def _picked(self, name: str, dtype: str, look: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
        """What `look` picks of a tensor as it is stored: of some of its places at a time, what lies from the first to the last
        is read."""
        tensor = self.tensors[name]
        place: NDArray[Any] = np.empty(tensor.shape, dtype)  # never written, so it takes addresses and no memory
        picked = look(place)
        if picked.size and (not np.may_share_memory(picked, place) or min(picked.strides, default=1) <= 0):
            return look(self._stored(name, dtype))
        order = sorted(range(picked.ndim), key=lambda axis: -picked.strides[axis])
        laid = picked.transpose(order)[..., np.newaxis]
        out: NDArray[Any] = np.empty(laid.shape, dtype)
        first = tensor.begin + picked.__array_interface__["data"][0] - place.__array_interface__["data"][0]
        most = _PIECE * laid.itemsize
        outer = next(axis for axis, stride in enumerate(laid.strides) if stride <= most)
        rows = most // max(laid.strides[outer], 1)
        for index in np.ndindex(laid.shape[:outer]):
            for row in range(0, laid.shape[outer], rows):
                part, here = laid[index][row : row + rows], (*index, row)
                span = sum((n - 1) * stride for n, stride in zip(part.shape, part.strides, strict=True)) + part.itemsize
                raw = self._bytes(first + sum(i * stride for i, stride in zip(here, laid.strides, strict=False)), span)
                out[index][row : row + rows] = np.ndarray(part.shape, dtype, raw, 0, part.strides)
        return out[..., 0].transpose(np.argsort(order))

    def same_bytes(self, name: str, other: SafetensorsFile, other_name: str) -> bool:
        """Return whether tensor `name` and tensor `other_name` of `other` agree in dtype, shape and every stored byte.

        Compares them piece by piece. Errors: `CheckpointError` for a closed file.
        """
        mine, theirs = self.tensors[name], other.tensors[other_name]
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        pairs = zip(self._parts(name, "u1"), other._parts(other_name, "u1"), strict=True)
        return all(np.array_equal(left, right) for (_, left), (_, right) in pairs)

    def _parts(self, name: str, dtype: str) -> Iterator[tuple[int, NDArray[Any]]]:
        """A tensor as it is stored, in parts: (number of its first element, elements)."""
        tensor, size = self.tensors[name], np.dtype(dtype).itemsize
        count = (tensor.end - tensor.begin) // size
        if not self._open.alive:
            raise CheckpointError(f"{self.path} is closed, wanted tensor {name}; read weights before closing")
        for begin in range(0, count, _PIECE):
            raw = self._bytes(tensor.begin + begin * size, min(_PIECE, count - begin) * size)
            yield begin, np.frombuffer(raw, dtype)

    def _bytes(self, begin: int, count: int) -> bytes:
        """So many bytes of the file from `begin` on. Raises `CheckpointError` where it has no such ones any more."""
        found = b""
        try:
            while len(found) < count:
                more = os.pread(self._descriptor, count - len(found), begin + len(found))
                if not more:
                    raise CheckpointError(
                        f"{self.path} was cut short while it was read, got {os.fstat(self._descriptor).st_size} bytes, wanted "
                        f"at least {begin + count}; give it once it is written"
                    )
                found = found + more if found else more
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read, got {error.strerror}; {_AGAIN}") from error
        return found

    def close(self) -> None:
        """Release the descriptor; arrays that were read stay valid. Closing twice is fine."""
        self._open()


def _parse_header(
    path: Path, size: int, read: Callable[[int, int], bytes]
) -> tuple[dict[str, StoredTensor], dict[str, str]]:  # fmt: skip
    """Tensors and metadata of a file of `size` bytes; `read(begin, count)` gives some."""
    start = read(0, min(size, 9))
    if start[:8] == b"version ":
        raise CheckpointError(f"{path} is a Git LFS pointer, wanted the file itself; run `git lfs pull`")
    if size < 8:
        raise CheckpointError(f"{path} is truncated, got {size} bytes, wanted a safetensors header; {_AGAIN}")
    length = int.from_bytes(start[:8], "little")
    if length > size - 8 and start[8:9] not in (b"", b"{"):
        raise CheckpointError(
            f"{path} is no safetensors file, got {start[:8]!r} at its beginning, wanted the length of a JSON header; name another"
        )
    if length > size - 8:
        raise CheckpointError(f"{path} is truncated or corrupt, got {size} bytes, wanted a header of {length} bytes; {_AGAIN}")
    header = json_text.checked(read(8, length), dict, f"the header of {path}", _AGAIN, error=CheckpointError)
    try:
        metadata = dict(header.pop("__metadata__", None) or {})
        tensors = {name: _parse_entry(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a corrupt header, got {error!r}, wanted safetensors JSON; {_AGAIN}") from error
    _check_layout(path, tensors, 8 + length, size)
    return tensors, metadata


def _parse_entry(entry: dict[str, Any], base: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (begin, end, *shape)):
        raise ValueError(f"shape {list(shape)} at {begin}:{end}")
    return StoredTensor(str(entry["dtype"]), shape, base + begin, base + end)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], begin: int, size: int) -> None:
    """Check that the tensors fill the file from `begin` to `size` bytes without hole, overlap or wrong extent."""
    cursor = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != cursor:
            raise CheckpointError(
                f"{path} has a corrupt header: tensor {name} starts at byte {tensor.begin}, wanted {cursor}; {_AGAIN}"
            )
        cursor = tensor.end
        if cursor > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {cursor}, got a file of {size} bytes; {_AGAIN}"
            )
        bits = _BITS.get(tensor.dtype)
        wanted = None if bits is None else math.prod(tensor.shape) * bits // 8
        if wanted not in (None, tensor.end - tensor.begin):
            raise CheckpointError(
                f"{path} has a corrupt header: tensor {name} ({tensor.dtype}, shape {list(tensor.shape)}) "
                f"takes {tensor.end - tensor.begin} bytes, wanted {wanted}; {_AGAIN}"
            )
    if cursor != size:
        raise CheckpointError(f"{path} is corrupt, got {size} bytes, wanted {cursor} by its header; {_AGAIN}")
