"""Reads one safetensors file: a memory map and its checked header.

Only `checkpoint.py` calls it. Opening a file executes, unpickles and copies nothing; tensors are converted to float32 one at a
time, on request.

Format (safetensors, by its specification): 8-byte little-endian header length, a JSON header, then the data without
holes. The `safetensors` package hands NumPy no bfloat16, hence this reader.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polydraft.errors import CheckpointError

__all__ = ["SafetensorsFile", "StoredTensor"]

_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16} | {
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "U16": "bfloat16"}
"""How floats are stored. "U16" is how Paddle writes bfloat16: as its bits."""
_RAW = {
    "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "U32": "<u4", "I32": "<i4", "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4",
}  # fmt: skip
_WHOLE = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
"""Dtypes whose every value is one of int64."""
_AGAIN = "download the file again"


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
    """One memory-mapped safetensors file; `tensors` is its header, `metadata` the texts that its writer added. Close it to
    release the map."""

    def __init__(self, path: Path) -> None:
        """Map `path` and check its header. Errors: `CheckpointError` for a missing, truncated or corrupt file."""
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be opened, got {error.strerror}, wanted a safetensors file; complete the directory"
            ) from error
        try:
            self.tensors, self.metadata = _parse_header(path, self._map if self._map is not None else b"")
        except CheckpointError:
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
        dtype = self.dtype(name)
        tensor = self.tensors[name]
        flat = out.reshape(-1)
        stored = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype]
        raw: NDArray[Any] = np.frombuffer(self._mapped(name), dtype=stored, count=flat.size, offset=tensor.begin)
        if dtype == "bfloat16":
            np.left_shift(raw, 16, out=flat.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(flat, raw)

    def piece(self, name: str, look: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[np.float32]:
        """Return what `look` picks of tensor `name`, as a fresh float32 array; nothing else of it is read. Errors: as for
        `read_into`."""
        dtype = self.dtype(name)
        picked = look(self._stored(name, {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype]))
        if dtype == "bfloat16":
            bits: NDArray[np.uint32] = np.left_shift(picked, 16, dtype=np.uint32)
            return bits.view(np.float32)
        floats: NDArray[np.float32] = picked.astype(np.float32)
        return floats

    def array(self, name: str) -> NDArray[Any]:
        """Return a copy of tensor `name` as it is stored (bfloat16 and E4M3 as their bits). Errors: `CheckpointError` for a dtype
        that is not one of these, or a closed file."""
        tensor = self.tensors[name]
        if tensor.dtype not in _RAW:
            raise CheckpointError(f"{self.path}: tensor {name} is stored as {tensor.dtype}, wanted one of {', '.join(_RAW)}")
        return self._stored(name, _RAW[tensor.dtype]).copy()

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
        """A tensor as it lies in the map."""
        tensor = self.tensors[name]
        raw: NDArray[Any] = np.frombuffer(self._mapped(name), dtype=dtype, count=math.prod(tensor.shape), offset=tensor.begin)
        return raw.reshape(tensor.shape)

    def same_bytes(self, name: str, other: SafetensorsFile, other_name: str) -> bool:
        """Return whether tensor `name` and tensor `other_name` of `other` agree in dtype, shape and every stored byte.

        Compares within the memory maps, without a copy. Errors: `CheckpointError` for a closed file.
        """
        mine, theirs = self.tensors[name], other.tensors[other_name]
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        with (
            memoryview(self._mapped(name)) as a,
            memoryview(other._mapped(other_name)) as b,
            a[mine.begin : mine.end] as left,
            b[theirs.begin : theirs.end] as right,
        ):
            return left == right

    def _mapped(self, name: str) -> mmap.mmap:
        if self._map is None:
            raise CheckpointError(f"{self.path} is closed, wanted tensor {name}; read weights before closing")
        return self._map

    def close(self) -> None:
        """Release the memory map; arrays that were read stay valid. Closing twice is fine."""
        if self._map is not None:
            self._map.close()
            self._map = None


def _parse_header(path: Path, data: bytes | mmap.mmap) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    if data[:8] == b"version ":
        raise CheckpointError(f"{path} is a Git LFS pointer, wanted the file itself; run `git lfs pull`")
    if len(data) < 8:
        raise CheckpointError(f"{path} is truncated, got {len(data)} bytes, wanted a safetensors header; {_AGAIN}")
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8 and data[8:9] not in (b"", b"{"):
        raise CheckpointError(
            f"{path} is no safetensors file, got {data[:8]!r} at its beginning, wanted the length of a JSON header; name another"
        )
    if length > len(data) - 8:
        raise CheckpointError(
            f"{path} is truncated or corrupt, got {len(data)} bytes, wanted a header of {length} bytes; {_AGAIN}"
        )
    try:
        header = json.loads(data[8 : 8 + length])
        metadata = dict(header.pop("__metadata__", None) or {})
        tensors = {name: _parse_entry(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a corrupt header, got {error!r}, wanted safetensors JSON; {_AGAIN}") from error
    _check_layout(path, tensors, 8 + length, len(data))
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
