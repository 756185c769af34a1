"""Exchanges device memory with other libraries without copying: DLPack and `__cuda_array_interface__`, in both directions.

Buffers export themselves through it, and `adopt` makes a buffer from an array of CuPy, Paddle, torch or JAX. Streams are
respected: the receiver waits, on the device, for the work queued on the memory. The host does not wait.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from polydraft.device import DTYPES
from polydraft.errors import DeviceError
from polydraft_cuda import driver

if TYPE_CHECKING:
    from polydraft_cuda.device import CudaBuffer, CudaDevice

KDLCUDA = 2
_CODES = {"i32": (0, 32), "u32": (1, 32), "u8": (1, 8), "f32": (2, 32), "f16": (2, 16), "bf16": (4, 16)}
"""DLPack type code and bits of each dtype."""
_TYPESTR = {"i32": "<i4", "u32": "<u4", "u8": "|u1", "f32": "<f4", "f16": "<f2", "bf16": "<u2"}
LEGACY, PER_THREAD = 1, 2
"""What both protocols call the two default streams."""


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = (("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", _Deleter))
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_exported: dict[int, Any] = {}
"""What consumers still hold: the record, its arrays and the buffer, by the record's address."""

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


def _delete(record: Any) -> None:
    """What a consumer calls when it is done."""
    _exported.pop(ctypes.addressof(record.contents), None)


def _destruct(capsule: int) -> None:
    """A capsule that nobody consumed gives its record back; a consumed one has another name, and its consumer does."""
    if _is_valid(capsule, b"dltensor"):
        _exported.pop(_pointer_of(capsule, b"dltensor"), None)


_deleter, _destructor = _Deleter(_delete), _Destructor(_destruct)


# -- out -------------------------------------------------------------------------------------------
def export_dlpack(buffer: CudaBuffer, stream: int | None) -> Any:
    """A DLPack capsule. The consumer's `stream` (None: the legacy default stream; -1: it sees to the order itself) waits."""
    device = buffer.device
    if stream != -1:
        wait_on(device, LEGACY if stream in (None, 0) else int(stream), device.stream.handle)
    shape = (ctypes.c_int64 * max(len(buffer.shape), 1))(*buffer.shape)
    code, bits = _CODES[buffer.dtype]
    record = _DLManagedTensor()
    record.tensor = _DLTensor(buffer.pointer, KDLCUDA, device.index, len(buffer.shape), code, bits, 1, shape, None, 0)
    record.deleter = _deleter
    address = ctypes.addressof(record)
    _exported[address] = record, shape, buffer
    return _api.PyCapsule_New(address, b"dltensor", _destructor)


def cuda_array_interface(buffer: CudaBuffer) -> dict[str, Any]:
    """Version 3 of the protocol, with the stream that a consumer has to wait for."""
    stream = int(buffer.device.stream.handle)
    return {
        "shape": buffer.shape,
        "typestr": _TYPESTR[buffer.dtype],
        "data": (buffer.pointer, False),
        "strides": None,
        "version": 3,
        "stream": stream or LEGACY,
    }


# -- in --------------------------------------------------------------------------------------------
class AdoptedBuffer:
    """A buffer over memory of another library, which stays its owner; `keep` holds it alive."""

    def __init__(self, device: CudaDevice, name: str, pointer: int, shape: tuple[int, ...], dtype: str, keep: Any) -> None:
        self.device, self.name, self.pointer, self.shape, self.dtype = device, name, pointer, shape, dtype
        self.nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        self._keep = keep


def adopt(device: CudaDevice, name: str, array: Any) -> AdoptedBuffer:
    """A buffer over `array` (anything with `__dlpack__` or `__cuda_array_interface__`), after whatever its owner has queued.

    Raises `DeviceError` when it lies on another device, is not contiguous, or has a dtype that the seam does not know."""
    if hasattr(array, "__dlpack__"):
        found = _from_dlpack(device, name, array)
    elif hasattr(array, "__cuda_array_interface__"):
        found = _from_interface(device, name, array)
    else:
        raise DeviceError(
            f"{name}: got a {type(array).__name__}, wanted an array with __dlpack__ or __cuda_array_interface__; convert it"
        )
    pointer, shape, dtype, strides, keep = found
    if strides is not None and strides != _contiguous(shape):
        raise DeviceError(f"{name}: got strides {strides} for shape {shape}, wanted a contiguous array; make it contiguous")
    return AdoptedBuffer(device, name, pointer, shape, dtype, keep)


Found = tuple[int, tuple[int, ...], str, "tuple[int, ...] | None", Any]
"""Address, shape, dtype, strides in elements, and what keeps the memory alive."""


def _from_dlpack(device: CudaDevice, name: str, array: Any) -> Found:
    kind, index = array.__dlpack_device__()
    if (int(kind), int(index)) != (KDLCUDA, device.index):
        raise DeviceError(
            f"{name}: got an array on DLPack device {(int(kind), int(index))}, wanted {(KDLCUDA, device.index)}; move it"
        )
    capsule = array.__dlpack__(stream=int(device.stream.handle))
    address = _api.PyCapsule_GetPointer(capsule, b"dltensor")
    record = _DLManagedTensor.from_address(address)
    tensor = record.tensor
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    dtype = next((n for n, (code, bits) in _CODES.items() if (tensor.code, tensor.bits, tensor.lanes) == (code, bits, 1)), None)
    if dtype is None:
        raise DeviceError(f"{name}: got DLPack type {(tensor.code, tensor.bits)}, wanted one of {', '.join(_CODES)}; convert it")
    _api.PyCapsule_SetName(capsule, b"used_dltensor")
    return int(tensor.data or 0) + tensor.byte_offset, shape, dtype, strides, _Borrowed(record)


class _Borrowed:
    """Holds a producer's record, and gives it back with the last reference."""

    def __init__(self, record: Any) -> None:
        self._record = record

    def __del__(self) -> None:
        if self._record.deleter:
            self._record.deleter(ctypes.byref(self._record))


def _from_interface(device: CudaDevice, name: str, array: Any) -> Found:
    interface = array.__cuda_array_interface__
    typestr, shape = interface["typestr"], tuple(interface["shape"])
    dtype = next((n for n, text in _TYPESTR.items() if text == typestr), None)
    if dtype is None:
        raise DeviceError(f"{name}: got type {typestr}, wanted one of {', '.join(_TYPESTR.values())}; convert it")
    stream = interface.get("stream")
    if stream is not None:
        wait_on(device, int(device.stream.handle), int(stream))
    strides = interface.get("strides")
    size = DTYPES[dtype].itemsize
    return int(interface["data"][0]), shape, dtype, strides and tuple(s // size for s in strides), array


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def wait_on(device: CudaDevice, waiting: Any, producing: Any) -> None:
    """Make stream `waiting` wait for what is queued on `producing`; both are handles, in the numbers of both protocols."""
    event = device.event()
    call: Callable[..., Any] = device.call
    call("cuEventRecord", event.handle, _stream(device, producing), doing="handing memory over")
    call("cuStreamWaitEvent", _stream(device, waiting), event.handle, 0, doing="handing memory over")


def _stream(device: CudaDevice, handle: Any) -> Any:
    return device.cuda.CUstream(handle) if isinstance(handle, int) else handle


__all__ = ["AdoptedBuffer", "adopt", "cuda_array_interface", "driver", "export_dlpack", "wait_on"]
