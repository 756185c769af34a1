"""Reports what can be known of NVIDIA devices without opening one: driver, devices, libraries, and why there is none.

`polydraft_backend_info` calls it, so it imports no CUDA library and creates no context. It does not raise: something missing is
reported as a sentence with the next step.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from dataclasses import dataclass
from typing import Final

DRIVER: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
MINIMUM_DRIVER: Final = 13000
"""CUDA version of the oldest driver that runs what the compiler of the extra builds, as 1000 * major + 10 * minor."""
MINIMUM_CAPABILITY: Final = (8, 0)
PACKAGES: Final = {"cuda.bindings": "cuda-bindings", "cuda.pathfinder": "cuda-pathfinder"}


@dataclass(frozen=True)
class Findings:
    """What was found: device names as `--device` takes them, and why they cannot be used ("" when they can)."""

    devices: tuple[str, ...] = ()
    reason: str = ""


@functools.cache
def look() -> Findings:
    """Look once a process."""
    missing = next((package for name, package in PACKAGES.items() if not _importable(name)), None)
    if missing:
        return Findings(reason=f"the package {missing} is not installed; install the extra: pip install 'polydraft[cuda]'")
    try:
        library = ctypes.CDLL(DRIVER)
    except OSError:
        return Findings(
            reason=f"no NVIDIA driver is installed ({DRIVER} cannot be loaded); install one or choose another --backend"
        )
    return _ask(library)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _ask(library: ctypes.CDLL) -> Findings:
    version, count = ctypes.c_int(), ctypes.c_int()
    code = library.cuInit(0)
    if code:
        return Findings(reason=f"the NVIDIA driver does not start (CUDA error {code}); see what nvidia-smi says")
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    return judge(version.value, [_describe(library, index) for index in range(count.value)])


def _describe(library: ctypes.CDLL, index: int) -> tuple[str, tuple[int, int]]:
    """Name and compute capability."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(100)
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, 100, device)
    for value, attribute in ((major, 75), (minor, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return name.value.decode(errors="replace"), (major.value, minor.value)


def judge(version: int, found: list[tuple[str, tuple[int, int]]]) -> Findings:
    """What a driver of this version and these devices allow."""
    devices = tuple(f"cuda:{index}" for index in range(len(found)))
    if not found:
        return Findings(reason="the NVIDIA driver sees no device; check CUDA_VISIBLE_DEVICES and nvidia-smi")
    if version < MINIMUM_DRIVER:
        return Findings(
            devices,
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, wanted "
            f"{MINIMUM_DRIVER // 1000}.{MINIMUM_DRIVER % 1000 // 10} or newer; update the driver to 580 or newer",
        )
    if all(capability < MINIMUM_CAPABILITY for _, capability in found):
        name, (major, minor) = found[0]
        return Findings(
            devices,
            f"{name} has compute capability {major}.{minor}, wanted {MINIMUM_CAPABILITY[0]}.{MINIMUM_CAPABILITY[1]} or newer; "
            "choose another --backend",
        )
    return Findings(devices)
