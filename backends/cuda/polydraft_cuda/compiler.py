"""Turns CUDA C++ into launches: run-time compilation with a cache on disk, loaded modules, bound functions.

Providers bind through it. Tests use it to compile every kernel for architectures that are not available, since compiling needs no
device. It does not choose kernels or shapes, and a bound launch allocates nothing.

A compiled kernel is kept in the cache folder (`POLYDRAFT_CACHE_DIR`) under a digest of its source, the headers beside it, its
defines, architecture, options, compiler and driver. A file that was cut short or altered is compiled again.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from polydraft import environment
from polydraft.device import DeviceCounters, Launch, Stream
from polydraft.errors import DeviceError
from polydraft_cuda import driver
from polydraft_cuda.probe import DRIVER

ARCHITECTURES: Final = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What every kernel is compiled for; only those in `EVIDENCE` of the package were run."""
OPTIONS: Final = ("-std=c++17", "-default-device", "-diag-suppress=177")
"""177: a variable that one set of defines leaves unused."""
STALE_S: Final = 600.0
"""Seconds after which nobody writes a file any more that is not whole yet."""
HEADERS: Final = Path(__file__).parent / "kernels"
"""Where `#include` looks first."""

Size = int | tuple[int, int, int]
Grid = Size | Callable[[int], Size]


class _Rows:
    """The launch length of each launch, as an int32 argument."""

    def __repr__(self) -> str:
        return "ROWS"


ROWS: Final = _Rows()
"""Stands for the launch length among the arguments of `Function.bind`."""


# -- compiling -------------------------------------------------------------------------------------
def compile_source(
    source: Path | str, *, defines: Mapping[str, str | float] | None = None, arch: str, driver_version: int = 0
) -> bytes:
    """Machine code (cubin) of a file, or of a text, for `arch` ("sm_90"). Needs no device; reads and fills the cache.

    Raises `DeviceError` with the compiler's first error, naming file and architecture."""
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    name = source.name if isinstance(source, Path) else "text.cu"
    options = [f"-arch={arch}", *OPTIONS, *(f"-D{key}={value}" for key, value in sorted((defines or {}).items()))]
    key = _digest(text, options, driver_version)
    cached = _Cache()
    found = cached.read(key)
    if found is None:
        found = _compile(text, name, options, arch)
        cached.write(key, found)
    return found


def _digest(text: str, options: Sequence[str], driver_version: int) -> str:
    parts = {"source": text, "headers": _headers(), "options": list(options), "nvrtc": nvrtc_version(), "driver": driver_version}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _headers() -> str:
    """Digest of what kernels include from beside them."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HEADERS.glob("*.cuh")))).hexdigest()


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        first = str(error).partition("\n")[0]
        raise DeviceError(
            f"kernels are compiled by NVRTC, which cannot be loaded ({first}); install the extra: pip install 'polydraft[cuda]'"
        ) from error
    return nvrtc


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the run-time compiler. Raises `DeviceError` where there is none."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return int(major), int(minor)


@functools.cache
def _includes() -> tuple[str, ...]:
    """Folders of headers: those of the kernels, and the toolkit's where a wheel or an installation has them."""
    folders = [str(HEADERS)]
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudart")
    except (ImportError, AttributeError, ValueError, RuntimeError, OSError):
        found = None
    return tuple(f"-I{folder}" for folder in [*folders, *([found] if found else [])])


def _compile(text: str, name: str, options: Sequence[str], arch: str) -> bytes:
    nvrtc = _nvrtc()
    program = _call(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, None, None), name)
    every = [option.encode() for option in (*options, *_includes())]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(every), every)
    try:
        if code:
            raise DeviceError(f"kernel {name} does not compile for {arch}: {_first_error(_log(nvrtc, program), int(code))}")
        size = _call(nvrtc, nvrtc.nvrtcGetCUBINSize(program), name)
        cubin = bytearray(size)
        _call(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin), name)
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(nvrtc: Any, result: Any, name: str) -> Any:
    if result[0]:
        raise DeviceError(
            f"kernel {name}: the compiler failed ({nvrtc.nvrtcResult(int(result[0])).name}); reinstall the extra cuda"
        )
    return result[1] if len(result) > 1 else None


def _log(nvrtc: Any, program: Any) -> str:
    log = bytearray(_call(nvrtc, nvrtc.nvrtcGetProgramLogSize(program), "log"))
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.decode(errors="replace").rstrip("\0\n")


def _first_error(log: str, code: int) -> str:
    lines = log.splitlines()
    errors = [line for line in lines if "error" in line]
    return (errors or lines or [f"the compiler gave code {code} and no reason"])[0].strip()


class _Cache:
    """Compiled kernels on disk, each behind the digest of its bytes. A folder that cannot be used is none: then every process
    compiles for itself."""

    def __init__(self) -> None:
        self.folder = environment.cache_folder() / "cuda"

    def read(self, key: str) -> bytes | None:
        try:
            stored = (self.folder / f"{key}.cubin").read_bytes()
        except OSError:
            return None
        digest, cubin = stored[:32], stored[32:]
        return cubin if hashlib.sha256(cubin).digest() == digest else None

    def write(self, key: str, cubin: bytes) -> None:
        """In one step, so that a process that is killed, or two at once, leave a whole file or none."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(cubin).digest() + cubin)
            Path(name).replace(self.folder / f"{key}.cubin")
        except OSError:
            return

    def _sweep(self) -> None:
        """Remove what processes that were killed while they wrote have left."""
        for part in self.folder.glob("*.part"):
            if time.time() - part.stat().st_mtime > STALE_S:
                part.unlink(missing_ok=True)


# -- launching -------------------------------------------------------------------------------------
class Module:
    """Machine code loaded into the current context; lives as long as the process."""

    def __init__(self, cubin: bytes, name: str) -> None:
        self._driver, self._name = driver.module(), name
        self._module = driver.check(self._driver.cuModuleLoadData(cubin), f"loading kernel {name}")

    def function(self, name: str) -> Any:
        """Handle of an `extern "C"` kernel. All of them want the same division of a multiprocessor's memory: it would have to
        be emptied between two kernels that do not."""
        doing, kinds = f"kernel {name} of {self._name}", self._driver.CUfunction_attribute
        function = driver.check(self._driver.cuModuleGetFunction(self._module, name.encode()), doing)
        carveout = kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        driver.check(self._driver.cuFuncSetAttribute(function, carveout, 100), doing)
        return function


class Function:
    """One kernel of a device, to be bound to its arguments."""

    def __init__(
        self,
        handle: Any,
        name: str,
        counters: DeviceCounters,
        recover: Callable[[], None],
        dependent: bool,
        failure: Callable[[int, str], DeviceError] = driver.failure,
    ) -> None:
        self._handle, self.name, self._counters, self._recover, self._dependent = handle, name, counters, recover, dependent
        self._failure = failure
        self._driver = driver.module()

    def bind(
        self, grid: Grid, block: Size, *arguments: Any, shared: int = 0, cluster: int | None = None, dependent: bool = False
    ) -> Launch:
        """Pack `arguments` once and return `launch(stream, n)`: one driver call, checked, counted.

        `grid` is a number of blocks, three of them, or a function of the launch length; a grid of 0 launches nothing.
        Arguments: whatever has a `pointer` (None: a null pointer), int (int32), float (float32), `ROWS`, or a ctypes value as
        it is. `shared`: bytes of dynamic shared memory. `cluster`: blocks of a thread-block cluster. `dependent`: may begin
        while the kernel before it ends (programmatic dependent launch), where the device can do that."""
        if shared > 48 * 1024:
            kind = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.check(self._driver.cuFuncSetAttribute(self._handle, kind, shared), f"kernel {self.name}")
        rows = ctypes.c_int32()
        values = [rows if argument is ROWS else _value(argument) for argument in arguments]
        packed = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(value) for value in values))
        config = _configuration(_size(block), shared, cluster, dependent and self._dependent)
        if not callable(grid):
            config.x, config.y, config.z = size = _size(grid)
            assert all(size), "a grid that is always empty launches nothing"
        return self._launch(grid, config, rows, packed, (values, arguments))

    def most_clusters(self, block: Size, shared: int, cluster: int) -> int:
        """Clusters of `cluster` such blocks that the device can hold at once."""
        kind = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.check(self._driver.cuFuncSetAttribute(self._handle, kind, shared), f"kernel {self.name}")
        config, found = _configuration(_size(block), shared, cluster, False), ctypes.c_int()
        config.x = cluster
        call = ctypes.CDLL(DRIVER).cuOccupancyMaxActiveClusters
        code = call(ctypes.byref(found), ctypes.c_void_p(int(self._handle)), ctypes.byref(config))
        if code:
            raise driver.failure(code, f"asking for clusters of {self.name}")
        return found.value

    def _launch(self, grid: Grid, config: _Config, rows: ctypes.c_int32, packed: Any, keep: Any) -> Launch:
        counters, name, recover, function = self._counters, self.name, self._recover, ctypes.c_void_p(int(self._handle))
        call, parameters, record = _launcher(), ctypes.cast(packed, ctypes.c_void_p), ctypes.byref(config)
        varies, failure = grid if callable(grid) else None, self._failure

        def launch(stream: Stream, n: int) -> None:
            if varies is not None:
                size = varies(n)
                if isinstance(size, int):
                    config.x = size
                    if not size:
                        return
                else:
                    config.x, config.y, config.z = size
                    if not all(size):
                        return
            rows.value = n
            config.stream = stream.address  # type: ignore[attr-defined]
            counters.launches += 1
            code = call(record, function, parameters, None)
            if code in driver.CONTEXT:  # this thread, or a library on it, has another device current
                recover()
                code = call(record, function, parameters, None)
            if code:
                raise failure(code, f"launch of {name}")

        launch.__dict__["keep"] = keep
        return launch


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`: a number that says what it is, and 64 bytes of value."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("x", ctypes.c_uint32),
        ("y", ctypes.c_uint32),
        ("z", ctypes.c_uint32),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint32),
    )


CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
"""Attributes of a launch, in the driver's numbers."""


def _configuration(block: tuple[int, int, int], shared: int, cluster: int | None, dependent: bool) -> _Config:
    attributes = []
    if cluster is not None:
        attributes.append(_Attribute(CLUSTER_DIMENSION, (cluster, 1, 1)))
    if dependent:
        attributes.append(_Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, (1,)))
    return _Config(1, 1, 1, block, shared, None, (_Attribute * len(attributes))(*attributes), len(attributes))


@functools.cache
def _launcher() -> Callable[..., int]:
    """The driver's launch, called without the checks and conversions of its bindings: a step makes hundreds of these."""
    call = ctypes.CDLL(DRIVER).cuLaunchKernelEx
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    call.restype = ctypes.c_int
    return call


def _size(size: Size) -> tuple[int, int, int]:
    return (size, 1, 1) if isinstance(size, int) else size


def _value(argument: Any) -> Any:
    """The ctypes value of an argument."""
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    pointer = getattr(argument, "pointer", None)
    return ctypes.c_void_p(pointer) if pointer is not None else argument


def sequence(*launches: Launch) -> Launch:
    """One launch that runs several in order."""

    def launch(stream: Stream, n: int) -> None:
        for one in launches:
            one(stream, n)

    return launch


def act(dtype: str) -> dict[str, int]:
    """Defines for the activation dtype of a kernel."""
    return {"ACT": {"f32": 0, "bf16": 1, "f16": 2}[dtype]}


def all_sources() -> Iterable[Path]:
    """Every kernel file of the package."""
    return sorted(HEADERS.glob("*.cu"))
