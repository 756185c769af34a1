"""A backend in bring-up whose memory is opaque: its contents are only accessible through `write` and `read`.

It has the device, one kernel that unpacks what it needs by itself, and a cache that no delegated kernel can use. Tests of
bring-up and of the kit use it. It holds no array: memory is bytes with a shape beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft import BackendInfo, Capabilities, hookimpl
from polydraft.backend import PassBuffers
from polydraft.contracts.base import Limits
from polydraft.plugins.bring_up import BringUpDevice, BringUpMeta, BringUpTable, contract_versions


@dataclass
class Memory:
    """Bytes, and how many make up a row."""

    data: bytearray
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=int)) * self.dtype.itemsize


class BytesDevice(BringUpDevice):
    """Fresh memory holds 0xA5 everywhere."""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Memory:
        return Memory(bytearray(b"\xa5" * (int(np.prod(shape, dtype=int)) * dtype.itemsize)), shape, dtype)

    def write(self, memory: Memory, value: np.ndarray[Any, Any]) -> None:
        memory.data[: len(value) * memory.row_bytes()] = value.tobytes()

    def read(self, memory: Memory, into: np.ndarray[Any, Any]) -> None:
        into.reshape(-1).view(np.uint8)[...] = np.frombuffer(memory.data[: len(into) * memory.row_bytes()], np.uint8)

    def wait(self) -> None:
        pass


def swiglu(a: Any, n: int) -> None:
    """The one own kernel, float by float."""
    gate_up = np.frombuffer(bytes(a.gate_up.data), np.float32).reshape(a.gate_up.shape)[:n]
    gate, up = np.split(gate_up, 2, axis=1)
    with np.errstate(over="ignore"):
        out = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
    a.out.data[: n * a.out.row_bytes()] = out.tobytes()


KERNELS = {"swiglu": swiglu}


def info() -> BackendInfo:
    """Its identity."""
    return BackendInfo(
        name="bytes",
        version="1",
        package="bytes",
        device_pattern="bytes",
        summary="memory without arrays",
        devices=("bytes",),
        capabilities=Capabilities(bring_up=True, pool_temporaries=True),
        contract_versions=contract_versions(KERNELS),
    )


@hookimpl
def polydraft_backend_info() -> BackendInfo:
    return info()


@hookimpl
def polydraft_open_device() -> BytesDevice:
    return BytesDevice("bytes")


@hookimpl
def polydraft_kernels(device: BytesDevice) -> BringUpTable:
    return BringUpTable(device, own=KERNELS)


@hookimpl
def polydraft_init_forward_meta(device: BytesDevice, buffers: PassBuffers, limits: Limits) -> BringUpMeta:
    return BringUpMeta(device, buffers, limits)


class Foreign:
    """A cache of nobody's."""

    nbytes = 0

    def read_logical(self) -> Any:
        raise NotImplementedError

    def write_logical(self, k: Any, v: Any) -> None:
        pass


def foreign_cache(spec: object) -> Any:
    return Foreign()
