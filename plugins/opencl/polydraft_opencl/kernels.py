"""The kernels: how `*.cl` are bound to buffers, and what core asks of a table beside them.

The kernel of a contract has its name, and the parameters of a kernel the names of the contract's fields: `bind` sets them once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import tau
from typing import Any, Final

import numpy as np
import pyopencl as cl

from polydraft.backend import CacheSpec
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Limits, Provider, Workspace
from polydraft.device import Array, Launch
from polydraft_opencl import CONTRACTS
from polydraft_opencl.device import LANES, OpenCLBuffer, OpenCLDevice

WHOLE: Final = ("pack_rows", "pack_logit_rows")
"""Done by one work-item, which gets the launch length as its last parameter."""
WORK_ITEMS: Final[Mapping[str, Callable[[Any], int]]] = {
    **dict.fromkeys(("embed", "gather_rows", "select_last_rows", "swiglu", "linear"), lambda a: a.out.shape[1]),
    "residual_add": lambda a: a.x.shape[1],
    "process_logits": lambda a: a.logits.shape[1] - a.num_valid,
    "gumbel_noise": lambda a: (a.noise.shape[1] + 1) // 2,
    "rope_kv_write": lambda a: a.num_heads + 2 * a.num_kv_heads,
    **dict.fromkeys(("rms_norm", "argmax", "sample", "scatter"), lambda a: LANES),
    "combine_draft_inputs": lambda a: 2 * LANES,
    "paged_attention": lambda a: a.num_heads * LANES,
}
"""Work-items of a row or sequence, in groups of LANES; one by itself where a contract is not named."""


def parameters(name: str, value: Any) -> dict[str, Any]:
    """What kernels may ask of one field of a record, by the name of their parameter."""
    if isinstance(value, OpenCLBuffer):
        rows, width = (*value.shape, 1)[:2]
        return {name: value.memory, f"{name}_rows": np.int32(rows), f"{name}_width": np.int32(width)}
    if isinstance(value, OpenCLCache):
        return {f"{name}_k": value.k.memory, f"{name}_v": value.v.memory}
    return {name: np.float32(value) if isinstance(value, float) else np.int32(value) if isinstance(value, int) else value}


class OpenCLCache:
    """One layer's keys and values, a buffer each."""

    def __init__(self, device: OpenCLDevice, spec: CacheSpec) -> None:
        self._device = device
        shape = (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.k, self.v = device.empty("cache.k", shape, "f32"), device.empty("cache.v", shape, "f32")
        self.nbytes = self.k.nbytes + self.v.nbytes

    def read_logical(self) -> tuple[Array, Array]:
        return self._device.read(self.k), self._device.read(self.v)

    def write_logical(self, k: Array, v: Array) -> None:
        self._device.load(self.k, k)
        self._device.load(self.v, v)


@dataclass(frozen=True)
class OpenCLProvider:
    """One kernel."""

    device: OpenCLDevice
    name: str

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """None: kernels work in local memory."""
        del args, limits
        return 0

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Set all parameters but the launch length, once."""
        del limits, workspace
        values = {"n": 0, **{field.name: getattr(args, field.name) for field in fields(args)}}
        if self.name == "rope_kv_write":
            turns = np.array([round(frequency / tau * 2**64) % 2**64 for frequency in args.frequencies], np.uint64)
            values["turns"] = self.device.empty("turns", (len(turns), 2), "u32")
            self.device.load(values["turns"], turns.view(np.uint32).reshape(-1, 2))
            values["interleaved"] = args.style == "interleaved"
        if self.name == "combine_draft_inputs":
            values["hidden_first"] = args.order == "hidden_first"
        each = [values]
        if self.name == "scatter":  # a kernel for each column: none can take a list of buffers
            each = [{**values, "column": i, "target": column} for i, column in enumerate(args.columns)]
        kernels = [self._kernel(one) for one in each]  # what they were set to lives as long as the device
        device, whole, items = self.device, self.name in WHOLE, WORK_ITEMS.get(self.name, lambda a: 1)(args)
        local = (1 if items == 1 else LANES, 1)
        width = -(-items // local[0]) * local[0]

        def launch(stream: Any, n: int) -> None:
            device.counters.launches += 1
            for kernel in kernels:
                if whole:
                    kernel.set_arg(kernel.num_args - 1, np.int32(n))
                if width and (n or whole):
                    cl.enqueue_nd_range_kernel(stream.queue, kernel, (width, 1 if whole else n), local)

        return launch

    def _kernel(self, values: Mapping[str, Any]) -> Any:
        """The kernel with its parameters set by name."""
        kernel = cl.Kernel(self.device.program, self.name)
        known = {key: word for name, value in values.items() for key, word in parameters(name, value).items()}
        kernel.set_args(*(known[name] for name in self.device.parameters[self.name]))
        return kernel


class OpenCLTable:
    """As `KernelTable`: one provider a contract, weights as they are, caches in two buffers."""

    def __init__(self, device: OpenCLDevice) -> None:
        self._device = device
        self.versions: Mapping[str, int] = {name: REGISTRY[name].version for name in CONTRACTS}
        self.providers: Mapping[str, Provider] = {name: OpenCLProvider(device, name) for name in CONTRACTS}

    def prepare_weight(self, role: str, value: Array, dtype: str, previous: OpenCLBuffer | None = None) -> OpenCLBuffer:
        weight = previous or self._device.empty(role, value.shape, dtype)
        self._device.load(weight, value)
        return weight

    def allocate_cache(self, spec: CacheSpec) -> OpenCLCache:
        return OpenCLCache(self._device, spec)
