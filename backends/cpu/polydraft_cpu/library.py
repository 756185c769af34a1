"""Finds and calls the compiled kernels: where the shared library is, its C functions, and how an argument record becomes words.

Device, kernels and graphs call it. It computes nothing; `src/runtime.cpp` implements every function declared here.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.contracts.base import Args, ColumnsSpec, TensorSpec
from polydraft.device import Array
from polydraft.errors import ContractError, DeviceError

PATH = Path(__file__).with_name("_kernels.so")
"""The shared library that the package's build makes where there is a C++ compiler."""
NOTE = Path(__file__).with_name("_build_failure.txt")
"""What the build wrote where it could not make it."""
ABI = 10
DTYPE_CODES = {"f32": 0, "bf16": 1, "i32": 2, "u32": 3, "u8": 4, "f16": 5}
NAMED_PARAMS = {"half": 0, "interleaved": 1, "hidden_first": 0, "embedding_first": 1, "logits": 0, "probs": 1} | {
    "softmax": 0, "sigmoid": 1, "none": 0, "sum": 1, "clamp": 2, "features": 0, "experts": 1,
}  # fmt: skip
"""Parameters that are words in Python and numbers in C++."""
_WORDS = POINTER(c_int64)
HOST_FUNCTION = CFUNCTYPE(c_int64, c_int64)
"""A kernel in Python: launch length to 0, or to anything else where it failed."""
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pd_abi": (c_int64, ()),
    "pd_error": (c_char_p, ()),
    "pd_levels": (c_char_p, ()),
    "pd_open": (c_void_p, (c_char_p, c_int64, c_int64, c_int64)),
    "pd_stop": (None, (c_void_p,)),
    "pd_close": (None, (c_void_p,)),
    "pd_kernels": (c_char_p, ()),
    "pd_words": (c_int64, (c_void_p, c_char_p, c_int64)),
    "pd_bind": (c_void_p, (c_void_p, c_char_p, c_int64, _WORDS, c_int64, c_void_p)),
    "pd_bind_host": (c_void_p, (c_void_p, c_char_p, HOST_FUNCTION)),
    "pd_mend": (None, (c_void_p,)),
    "pd_launch": (c_int64, (c_void_p, c_int64)),
    "pd_record": (None, (c_void_p,)),
    "pd_recorded": (c_void_p, (c_void_p,)),
    "pd_program_bytes": (c_int64, (c_void_p,)),
    "pd_replay": (c_int64, (c_void_p, c_void_p)),
    "pd_move": (c_int64, (c_void_p, c_void_p, c_void_p, c_int64)),
    "pd_reached": (c_int64, (c_void_p, c_int64)),
    "pd_wait": (None, (c_void_p, c_int64)),
    "pd_time": (c_int64, (c_void_p, c_int64)),
    "pd_num_spans": (c_int64, (c_void_p,)),
    "pd_spans": (None, (c_void_p, c_void_p)),
    "pd_forget": (None, (c_void_p,)),
    "pd_is_bf16": (c_int64, (c_void_p, c_int64)),
    "pd_pack_rows_bf16": (None, (c_void_p, c_int64, c_void_p)),
    "pd_pack_panels": (None, (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p)),
    "pd_cache_logical": (None, (c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
    "pd_copy": (None, (c_void_p, c_void_p, c_void_p, c_int64)),
}
"""Result and argument types of every C function."""


class CacheStruct(ctypes.Structure):
    """`Cache` of ops.h."""

    _fields_ = (
        ("k", c_void_p), ("v", c_void_p), ("num_blocks", c_int64), ("block_size", c_int64), ("heads", c_int64),
        ("dim", c_int64), ("padded", c_int64), ("wide", c_int64),
    )  # fmt: skip


class WeightStruct(ctypes.Structure):
    """`Weight` of ops.h."""

    _fields_ = (
        ("data", c_void_p), ("format", c_int64), ("rows", c_int64), ("cols", c_int64), ("scale", c_void_p), ("groups", c_void_p),
        ("groups_bf16", c_int64), ("zeros", c_void_p), ("group", c_int64), ("rounding", c_int64), ("rounding_cols", c_int64),
    )  # fmt: skip


def missing() -> str:
    """Why the kernels cannot be used here, as one sentence with the next step; "" where they can."""
    if not PATH.is_file():
        why = NOTE.read_text(encoding="utf-8").strip() if NOTE.is_file() else "its build was never run"
        return (
            f"the compiled kernels are missing: {why}; install a C++17 compiler (g++ or clang++) and reinstall polydraft, "
            "or use --backend reference"
        )
    try:
        load()
    except DeviceError as error:
        return str(error)
    return ""


@functools.cache
def load() -> ctypes.CDLL:
    """Open the library once and declare its functions. Raises `DeviceError` for one that does not
    open, or is of another version."""
    try:
        library = ctypes.CDLL(str(PATH))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise DeviceError(
            f"the compiled kernels cannot be loaded: {error}; reinstall polydraft, or use --backend reference"
        ) from error
    if library.pd_abi() != ABI:
        raise DeviceError(f"the compiled kernels are of version {library.pd_abi()}, wanted {ABI}; reinstall polydraft")
    return library


def levels() -> list[str]:
    """Instruction levels of this processor that the library has kernels for, best last."""
    names: bytes = load().pd_levels()
    return names.decode().split()


@functools.cache
def served() -> tuple[str, ...]:
    """Contracts and composites that the library has kernels for, in alphabetical order; none where there is no library."""
    if missing():
        return ()
    names: bytes = load().pd_kernels()
    return tuple(sorted(set(names.decode().split())))


def last_error() -> str:
    """Why the last call failed."""
    text: bytes = load().pd_error()
    return text.decode()


# -- words -----------------------------------------------------------------------------------------
def words_of(record: Args, extra: Iterable[int] = ()) -> list[int]:
    """The words of an argument record: five a buffer (address, sizes, dtype), one a weight, cache or parameter."""
    words: list[int] = []
    for name, spec in record.specs().items():
        value = getattr(record, name)
        if isinstance(spec, TensorSpec):
            words += _buffer_words(name, value)
        elif not isinstance(spec, ColumnsSpec):  # a provider hands those over as a table behind the record
            words.append(_word(value))
    return [*words, *extra]


def _buffer_words(name: str, buffer: Any) -> list[int]:
    if buffer is None:
        return [0] * 5
    array: Array = buffer.host_array
    if not array.flags.c_contiguous or array.ndim > 3:
        raise ContractError(f"buffer {name} is not one block of at most three dimensions; allocate it with Device.empty")
    sizes = [*array.shape, 0, 0, 0][:3]
    return [array.ctypes.data, *sizes, DTYPE_CODES[buffer.dtype]]


def _word(value: Any) -> int:
    """A parameter by its kind (of several numbers, how many), or the address of a weight's or cache's struct; None and metadata
    are 0."""
    if isinstance(value, float):
        return int(struct.unpack("q", struct.pack("d", value))[0])
    if isinstance(value, str):
        return NAMED_PARAMS[value]
    if isinstance(value, tuple):
        return len(value)
    if isinstance(value, (int, np.integer)):  # bool too
        return int(value)
    return int(getattr(value, "address", 0))


__all__ = [
    "ABI", "DTYPE_CODES", "FUNCTIONS", "HOST_FUNCTION", "NOTE", "PATH", "CacheStruct", "WeightStruct", "last_error", "levels",
    "load", "missing", "words_of",
]  # fmt: skip
