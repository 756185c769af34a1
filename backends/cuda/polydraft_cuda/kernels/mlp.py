"""The gated activation of the feed-forward network."""

from __future__ import annotations

from typing import Any

from polydraft.device import Launch
from polydraft_cuda.compiler import act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.provider import Kernel, source

THREADS = 128


def swiglu(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread 16 bytes of a row."""
    del limits, workspace
    width, lanes = a.out.shape[1], 4 if a.out.dtype == "f32" else 8
    vector = int(width % lanes == 0)
    blocks = -(-width // (THREADS * (lanes if vector else 1)))
    function = device.function(source("mlp.cu"), "swiglu", VECTOR=vector, **act(a.out.dtype))
    return function.bind(lambda n: (n, blocks, 1), THREADS, a.gate_up, a.out, width, dependent=True)


KERNELS: dict[str, Kernel] = {"swiglu": Kernel(swiglu)}
