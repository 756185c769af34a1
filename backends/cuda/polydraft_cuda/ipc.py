"""Arrays on a GPU that another process of the same machine reads: what a trainer gives to an engine beside it.

The trainer calls `share` and sends what it returns, which is plain data, by whatever way; the engine reads the arrays through
`SharedTensors`. The driver's handles name whole allocations (cuIpcGetMemHandle), so an array is a handle and an offset. The
trainer must not free or change the arrays before the engine has read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final

import numpy as np

from polydraft.device import Array
from polydraft.errors import CheckpointError, DeviceError
from polydraft_cuda import driver
from polydraft_cuda.device import CudaDevice

HOST_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8), "uint8": np.dtype(np.uint8), "int32": np.dtype(np.int32), "int64": np.dtype(np.int64),
}  # fmt: skip
"""What may be shared, and as what it arrives on a host."""
FIELDS: Final = {"handle", "offset", "shape", "dtype"}


def share(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each array on the current GPU what another process needs to read it: "handle" (hexadecimal), "offset" (bytes), "shape",
    and "dtype". An array is PyTorch's, or has `__cuda_array_interface__`; it must be contiguous and lie in an allocation of
    cudaMalloc or cuMemAlloc (PyTorch's with its default allocator). Raises `CheckpointError` for others."""
    cuda = driver.module()
    found: dict[str, dict[str, Any]] = {}
    for name, value in tensors.items():
        pointer, shape, dtype = _described(name, value)
        base, _ = driver.check(cuda.cuMemGetAddressRange(pointer), f"looking for the allocation of {name}")
        try:
            handle = driver.check(cuda.cuIpcGetMemHandle(base), f"sharing {name}")
        except DeviceError as error:
            raise CheckpointError(f"tensor {name} cannot be shared ({error}); copy it to memory of cudaMalloc") from error
        found[name] = {
            "handle": driver.bytes_of_handle(handle).hex(), "offset": pointer - int(base), "shape": list(shape), "dtype": dtype,
        }  # fmt: skip
    return found


def _described(name: str, value: Any) -> tuple[int, tuple[int, ...], str]:
    """Address, shape and dtype."""
    if hasattr(value, "data_ptr"):
        if not (getattr(value, "is_cuda", False) and value.is_contiguous()):
            raise CheckpointError(f"tensor {name} is on {value.device} or not contiguous, wanted one on a GPU; use contiguous()")
        dtype = str(value.dtype).rpartition(".")[2]
        pointer, shape = int(value.data_ptr()), tuple(map(int, value.shape))
    elif (interface := getattr(value, "__cuda_array_interface__", None)) is not None:
        if interface.get("strides") is not None:
            raise CheckpointError(f"tensor {name} has strides, wanted a contiguous one; copy it")
        dtype = np.dtype(interface["typestr"]).name
        pointer, shape = int(interface["data"][0]), tuple(map(int, interface["shape"]))
    else:
        raise CheckpointError(f"tensor {name} is {type(value).__name__}, wanted an array on a GPU; give PyTorch's or CuPy's")
    if dtype not in HOST_DTYPES:
        raise CheckpointError(f"tensor {name} is {dtype}, wanted {', '.join(HOST_DTYPES)}; convert it")
    return pointer, shape, dtype


class _Lent:
    """One array of another process, as `MemoryCheckpoint` takes arrays."""

    def __init__(self, device: CudaDevice, pointer: int, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        self._device, self._pointer = device, pointer

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        del copy  # it always is one
        size = math.prod(self.shape) * HOST_DTYPES[self.dtype].itemsize
        found: Array = self._device.read(self._pointer, (size,), "u8").view(HOST_DTYPES[self.dtype]).reshape(self.shape)
        return found if dtype is None else found.astype(dtype)

    def float(self) -> Array:
        """As float32, of bfloat16, which NumPy lacks."""
        bits: Array = self.__array__().astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)


class SharedTensors(Mapping[str, _Lent]):
    """The arrays of what `share` returned in another process, readable until it is closed. Reading copies to the host, behind
    what is queued."""

    def __init__(self, device: CudaDevice, shared: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises `CheckpointError` for what is malformed or reaches beyond its allocation, and `DeviceError` where the driver
        refuses a handle: one of this very process, of another GPU, or of memory that is gone."""
        self._device, self._opened = device, dict[str, int]()
        self._tensors: dict[str, _Lent] = {}
        try:
            for name, one in shared.items():
                self._tensors[name] = self._lent(name, one)
        except BaseException:
            self.close()
            raise

    def _lent(self, name: str, one: Mapping[str, Any]) -> _Lent:
        handle, offset, shape, dtype = _checked(name, one)
        if handle not in self._opened:
            self._opened[handle] = self._device.open_handle(bytes.fromhex(handle), f"opening tensor {name}")
        start = self._opened[handle]
        _, size = self._device.call("cuMemGetAddressRange", start)
        if offset + math.prod(shape) * HOST_DTYPES[dtype].itemsize > int(size):
            raise CheckpointError(f"shared tensor {name} reaches beyond its allocation of {int(size):,} bytes; share it again")
        return _Lent(self._device, start + offset, shape, dtype)

    def __getitem__(self, name: str) -> _Lent:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> SharedTensors:  # noqa: PYI034  typing.Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of them."""
        self._device.make_current()
        for pointer in self._opened.values():
            self._device.cuda.cuIpcCloseMemHandle(pointer)
        self._opened.clear()
        self._tensors.clear()


def _checked(name: str, one: Any) -> tuple[str, int, tuple[int, ...], str]:
    """The fields of one array."""
    if not isinstance(one, Mapping) or set(one) != FIELDS:
        raise CheckpointError(
            f"shared tensor {name} is {one!r:.80}, wanted {', '.join(sorted(FIELDS))}; send what share() returns"
        )
    handle, offset, shape, dtype = one["handle"], one["offset"], one["shape"], one["dtype"]
    whole = [offset, *shape] if isinstance(shape, (list, tuple)) else [None]
    hexadecimal = isinstance(handle, str) and len(handle) == 2 * driver.HANDLE_BYTES and set(handle) <= set("0123456789abcdef")
    if not (hexadecimal and dtype in HOST_DTYPES and all(type(size) is int and size >= 0 for size in whole)):
        raise CheckpointError(f"shared tensor {name} is malformed ({dict(one)!r:.120}); send what share() returns")
    return handle, offset, tuple(shape), dtype
