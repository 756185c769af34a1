"""A complete backend in one file: a device, a kernel of its own, everything else inherited from the reference.

It needs no packaging: `polydraft generate --plugin minimal_backend.py --backend minimal "def f(x):"`. A package names its
module in the entry-point group `polydraft.backends` instead, under the name that `polydraft_backend_info` returns.
"""

from __future__ import annotations

from dataclasses import dataclass

from polydraft import BackendInfo, Capabilities, hookimpl, reference
from polydraft.backend import Cache, CacheSpec, DeviceOptions, ForwardMeta, PassBuffers, Weight
from polydraft.contracts import COMPOSITES
from polydraft.contracts.base import Limits, Workspace
from polydraft.contracts.kernels.residual_add import ResidualAddV1
from polydraft.device import Array, Launch, Stream
from polydraft.errors import DeviceError
from polydraft.reference.device import NumpyBuffer, ReferenceDevice
from polydraft.reference.forward_meta import NumpyForwardMeta
from polydraft.reference.table import NumpyTable


def contract_versions() -> dict[str, int]:
    """Name to version of what the table offers. This backend fuses nothing, so it offers no composite."""
    offered = reference.polydraft_backend_info("").contract_versions
    return {name: version for name, version in offered.items() if name not in COMPOSITES}


@hookimpl
def polydraft_backend_info() -> BackendInfo:
    return BackendInfo(
        name="minimal",
        version="0.1",
        package="minimal_backend",
        device_pattern="minimal",
        summary="the smallest complete backend, on the CPU",
        devices=("minimal",),
        capabilities=Capabilities(dtypes=("f32",), row_invariant=True, pool_temporaries=True),
        contract_versions=contract_versions(),
        evidence="double only",
    )


@hookimpl
def polydraft_open_device(spec: str, options: DeviceOptions) -> ReferenceDevice:
    # A backend of real hardware has a class of its own here: buffers, pinned staging, streams, events, copies.
    if spec not in {"", "minimal"}:
        raise DeviceError(f"device is {spec!r}, wanted 'minimal'; leave --device out")
    return ReferenceDevice("minimal", dtype=options.dtype, row_invariant=options.row_invariant)


@dataclass(frozen=True)
class ResidualAdd:
    """x := x + y over the rows of the launch: one provider, bound once to each pair of buffers."""

    device: ReferenceDevice

    def bind(self, args: ResidualAddV1, limits: Limits, workspace: Workspace | None) -> Launch:
        del limits, workspace  # what does not depend on the launch length is worked out here, once
        assert isinstance(args.x, NumpyBuffer)
        assert isinstance(args.y, NumpyBuffer)
        x, y, enqueue = args.x.host_array, args.y.host_array, self.device.enqueue

        def launch(stream: Stream, n: int) -> None:
            def add() -> None:
                x[:n] += y[:n]

            enqueue(stream, add)  # a launch only enqueues; it neither waits nor allocates

        return launch

    def workspace_bytes(self, args: ResidualAddV1, limits: Limits) -> int:
        return 0


class Table:
    """Providers by contract, and the two factories whose results only this backend looks into."""

    def __init__(self, device: ReferenceDevice) -> None:
        self._inherited = NumpyTable(device)
        self.versions = contract_versions()
        self.providers = {name: self._inherited.providers[name] for name in self.versions}
        self.providers["residual_add"] = ResidualAdd(device)

    def prepare_weight(self, role: str, value: Array, dtype: str, previous: Weight | None = None) -> Weight:
        return self._inherited.prepare_weight(role, value, dtype, previous)

    def allocate_cache(self, spec: CacheSpec) -> Cache:
        return self._inherited.allocate_cache(spec)


@hookimpl
def polydraft_kernels(device: ReferenceDevice) -> Table:
    return Table(device)


@hookimpl
def polydraft_init_forward_meta(device: ReferenceDevice, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
    return NumpyForwardMeta(device, buffers, limits)
