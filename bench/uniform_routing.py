"""A plugin for benchmarks: experts are drawn uniformly without replacement, whatever the router says.

    polydraft bench --backend cuda --shape bench/shapes/ernie21.json --plugin bench/uniform_routing.py

With random weights nearly all rows choose the same experts, so a benchmark would read a fraction of what a trained model reads.
The router's product and the launch are as ever; only what is chosen differs. Texts mean nothing.
"""

from __future__ import annotations

from typing import Any

from polydraft import hookimpl
from polydraft.contracts import REGISTRY
from polydraft_cuda.kernels.experts import route_experts
from polydraft_cuda.kernels.provider import CudaProvider, Kernel


class Table:
    """The one kernel of the pack."""

    def __init__(self, device: Any) -> None:
        kernel = Kernel(lambda device, a, limits, workspace: route_experts(device, a, limits, workspace, uniform=True))
        self.providers = {"route_experts": CudaProvider(kernel, device)}
        self.versions = {"route_experts": REGISTRY["route_experts"].version}


@hookimpl
def polydraft_kernels(device: Any) -> Table:
    """For devices of the CUDA backend."""
    return Table(device)
