"""Owns the gated activation of the feed-forward network, alone or as one launch with the projection before it."""

from __future__ import annotations

from typing import Any

from polydraft.device import Launch, Stream
from polydraft_cuda.compiler import act
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels.joins import projection_of
from polydraft_cuda.kernels.provider import Kernel, source

THREADS = 128


def swiglu(device: CudaDevice, a: Any, limits: Any, workspace: Any) -> Launch:
    """A thread 16 bytes of a row."""
    del limits, workspace
    width, lanes = a.out.shape[1], 4 if a.out.dtype == "f32" else 8
    vector = int(width % lanes == 0)
    blocks = -(-width // (THREADS * (lanes if vector else 1)))
    function = device.function(source("mlp.cu"), "swiglu", VECTOR=vector, **act(a.out.dtype))
    alone = function.bind(lambda n: (blocks, n, 1), THREADS, a.gate_up, a.out, width, dependent=True)
    projection = projection_of(device, a.gate_up)
    if projection is None or not projection.join(a.out):
        return alone
    takes = projection.takes

    def launch(stream: Stream, n: int) -> None:
        if not takes(n):
            alone(stream, n)

    return launch


KERNELS: dict[str, Kernel] = {"swiglu": Kernel(swiglu, joins=True)}
