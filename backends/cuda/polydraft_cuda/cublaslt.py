"""Matrix products by cuBLASLt: the library is found and opened once, and products are bound to their buffers.

Projections with many rows use it, where its kernels are fastest. Its heuristics choose an algorithm once per number of rows.
Nothing is allocated after binding, so products can be captured.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from polydraft.device import Launch, Stream
from polydraft.errors import DeviceError

WORKSPACE = 32 << 20
"""Bytes of scratch that algorithms may use."""
_TYPES = {"f32": 0, "f16": 2, "bf16": 14}
_COMPUTE_F32, _SCALE_F32, _TRANSPOSED, _BIAS = 68, 0, 1, 4
_TRANSA, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE, _MAX_WORKSPACE = 3, 7, 8, 26, 1


class _Choice(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def library() -> Any:
    """The opened library, or None where it is not installed."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None


def check(code: int, doing: str) -> None:
    """Raise `DeviceError` for a status that is not success."""
    if code:
        raise DeviceError(f"cuBLASLt failed in {doing} (status {code}); update nvidia-cublas: pip install -U 'polydraft[cuda]'")


@functools.cache
def _handle(index: int) -> ctypes.c_void_p:
    """One handle a device; its context is current."""
    del index
    handle = ctypes.c_void_p()
    check(library().cublasLtCreate(ctypes.byref(handle)), "opening")
    return handle


def _attribute(call: Any, of: ctypes.c_void_p, kind: int, value: Any) -> None:
    check(call(of, kind, ctypes.byref(value), ctypes.sizeof(value)), "setting an attribute")


class Product:
    """out[n, O] = x[n, I] @ weight[O, I].T (+ bias), bound to addresses; one plan a number of rows, made when first wanted."""

    def __init__(self, device: Any, x: Any, weight: Any, bias: Any, out: Any, scratch: int) -> None:
        self._device, self._x, self._weight, self._out, self._scratch = device, x, weight, out, scratch
        self._keep = bias
        self._handle = _handle(device.index)
        lib = self._lib = library()
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._operation = ctypes.c_void_p()
        check(lib.cublasLtMatmulDescCreate(ctypes.byref(self._operation), _COMPUTE_F32, _SCALE_F32), "describing a product")
        _attribute(lib.cublasLtMatmulDescSetAttribute, self._operation, _TRANSA, ctypes.c_int32(_TRANSPOSED))
        if bias is not None:
            _attribute(lib.cublasLtMatmulDescSetAttribute, self._operation, _EPILOGUE, ctypes.c_int32(_BIAS))
            _attribute(lib.cublasLtMatmulDescSetAttribute, self._operation, _BIAS_POINTER, ctypes.c_uint64(bias.pointer))
            _attribute(lib.cublasLtMatmulDescSetAttribute, self._operation, _BIAS_TYPE, ctypes.c_int32(_TYPES[bias.dtype]))
        self._outputs, self._inputs = weight.shape
        self._weight_layout = self._layout(weight.dtype, self._inputs, self._outputs)
        self._plans: dict[int, tuple[Any, ...]] = {}

    def _layout(self, dtype: str, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        size = ctypes.c_uint64
        code = self._lib.cublasLtMatrixLayoutCreate(
            ctypes.byref(layout), _TYPES[dtype], size(rows), size(columns), ctypes.c_int64(rows)
        )
        check(code, "describing a matrix")
        return layout

    def _plan(self, n: int) -> tuple[Any, ...]:
        """Layouts and algorithm for `n` rows."""
        x, out = self._layout(self._x.dtype, self._inputs, n), self._layout(self._out.dtype, self._outputs, n)
        preference, found, count = ctypes.c_void_p(), _Choice(), ctypes.c_int()
        check(self._lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "choosing an algorithm")
        _attribute(self._lib.cublasLtMatmulPreferenceSetAttribute, preference, _MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE))
        code = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            self._operation,
            self._weight_layout,
            x,
            out,
            out,
            preference,
            1,
            ctypes.byref(found),
            ctypes.byref(count),
        )
        self._lib.cublasLtMatmulPreferenceDestroy(preference)
        check(code or (0 if count.value else 15), f"choosing an algorithm for {n} rows")
        return x, out, found

    def launch(self, stream: Stream, n: int) -> None:
        """Enqueue the product of the first `n` rows."""
        if n <= 0:
            return
        plan = self._plans.get(n)
        if plan is None:
            plan = self._plans[n] = self._plan(n)
        x, out, found = plan
        self._device.counters.launches += 1
        pointer = ctypes.c_void_p
        code = self._lib.cublasLtMatmul(
            self._handle, self._operation, ctypes.byref(self._one), pointer(self._weight.pointer), self._weight_layout,
            pointer(self._x.pointer), x, ctypes.byref(self._zero), pointer(self._out.pointer), out, pointer(self._out.pointer),
            out, ctypes.byref(found.algo), pointer(self._scratch), ctypes.c_size_t(WORKSPACE),
            pointer(int(stream.handle)),  # type: ignore[attr-defined]
        )  # fmt: skip
        check(code, f"a product of {n} rows")


def bind(device: Any, x: Any, weight: Any, bias: Any, out: Any, scratch: int) -> Launch | None:
    """A launch, or None where cuBLASLt is not installed."""
    return None if library() is None else Product(device, x, weight, bias, out, scratch).launch
