"""Access to the CUDA driver: its Python module, checked results, and one error sentence for each kind of failure.

All other modules of the backend call the driver through this one. It does not open, allocate or launch anything itself.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any, Final

from polydraft.errors import DeviceError

HANDLE_BYTES: Final = 64
"""Of the driver's handle of an allocation, which other processes open."""
OUT_OF_MEMORY = 2
CONTEXT = frozenset({201, 400, 709})
"""Codes of a call on a thread whose current context is another one: invalid context, handle, or a destroyed context."""
LOST = {
    214: "an uncorrectable memory error",
    220: "an NVLink error",
    700: "an access to an illegal address",
    702: "a kernel that ran too long",
    710: "a failed device-side assertion",
    714: "a hardware stack error",
    715: "an illegal instruction",
    716: "a misaligned address",
    717: "an address in a space that an instruction does not reach",
    718: "an invalid program counter",
    719: "a failed launch",
    721: "a kernel that exceeded a limit",
    999: "an unknown error",
}
"""Codes after which nothing runs on a device any more, in words."""
_PROBLEMS = {
    3: "the driver has been shut down",
    100: "no CUDA device is visible",
    101: "there is no such device",
    209: "the kernel image has no code for this architecture",
    218: "the driver cannot read the compiled kernel; update the driver",
    222: "the driver is older than the compiler that built the kernel; update the driver",
    701: "the kernel needs more registers or shared memory than the device has",
    803: "the driver's kernel module and its library have different versions; reboot or reinstall the driver",
    804: "this device does not allow forward compatibility; update the driver",
    901: "the capture was invalidated by a call that cannot be captured",
    906: "a call on another stream would have joined the capture",
    908: "the call cannot be captured, or captured work was not joined",
}


def module() -> ModuleType:
    """`cuda.bindings.driver`, imported on first use. Raises `DeviceError` naming the extra that brings it."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"the cuda backend needs the package cuda-bindings, which cannot be imported ({error}); "
            "install the extra: pip install 'polydraft[cuda]'"
        ) from error
    return driver  # type: ignore[no-any-return, unused-ignore]


def bytes_of_handle(handle: Any) -> bytes:
    """What other processes need of a CUipcMemHandle. Found by its address: its field is not in all versions of the bindings
    (13.5 has none)."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_of_bytes(told: bytes) -> Any:
    """The CUipcMemHandle of another process."""
    if len(told) != HANDLE_BYTES:
        raise ValueError(f"a handle has {len(told)} bytes, wanted {HANDLE_BYTES}")
    handle = module().CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), told, HANDLE_BYTES)
    return handle


def check(result: Any, doing: str = "a driver call") -> Any:
    """The value of a driver call's result tuple: None, the one value, or a tuple of several. Raises `DeviceError`."""
    code = result[0]
    if code:
        raise failure(int(code), doing)
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def failure(code: int, doing: str) -> DeviceError:
    """The error of a failed driver call: what was done, what happened, and what to do."""
    if code == OUT_OF_MEMORY:
        return DeviceError(f"{doing}: the device is out of memory; lower --num-blocks, --max-num-seqs or --max-batched-tokens")
    if code in LOST:
        return DeviceError(
            f"{doing}: the device was lost to {LOST[code]} (CUDA error {code}); nothing runs on it in this process any more, "
            "start a new one, and where it happens again run with --sanitize or under compute-sanitizer"
        )
    problem = _PROBLEMS.get(code, "the driver refused")
    return DeviceError(f"{doing}: {problem} (CUDA error {code}, {_name(code)})")


def _name(code: int) -> str:
    try:
        driver = module()
        return str(driver.CUresult(code).name)
    except (ValueError, DeviceError):
        return "unknown"
