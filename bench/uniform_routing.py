"""A plugin for benchmarks: experts are drawn uniformly without replacement, whatever the router says.

    polydraft bench --backend cuda --shape bench/shapes/ernie21.json --plugin bench/uniform_routing.py

With random weights nearly all rows choose the same experts, so a benchmark would read a fraction of what a trained model reads.
The router's product and the launches are as ever; only what is chosen differs. Texts mean nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from polydraft import hookimpl


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    """For devices of the CUDA backend, whose kernels are told; there are none of its own."""
    device.uniform_routing = True
    return SimpleNamespace(providers={}, versions={})
