"""The emulator: the worst accelerator that the protocols of polydraft allow, for proving overlap and graphs without one.

Nothing runs until somebody waits for it, and then in a seeded legal order; device memory cannot be read by the host and holds
poison until it is written; cache rows lie in a permuted layout; captures forbid what they must; operations take modelled time,
are held back or fail where the device string says so. It computes in the reference's row-invariant arithmetic.

    LLM(backend="emulator", device="emulator:0?seed=7&policy=reversed")
    LLM(plugin=Emulator("emulator:0?seed=7"), device="emulator:0?rows=seeded&fault=copy@12")

`options.py` has the table of options. An error names the device string that brings it about again.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from polydraft import hookimpl
from polydraft._version import __version__
from polydraft.backend import BackendInfo, Capabilities

if TYPE_CHECKING:
    from polydraft.backend import Collectives, DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft.device import GraphCapture
    from polydraft.ranks import Group
    from polydraft_emulator.device import EmulatorDevice

__all__ = ["Emulator"]


class Emulator:
    """The backend plugin with options of its own: those of the device string given here, under those of `--device`.

    Raises `ConfigError` for an unknown option. The module itself is the plugin without options."""

    def __init__(self, spec: str = "") -> None:
        from polydraft_emulator.options import parse

        self.options = parse(spec)

    def __repr__(self) -> str:
        return f"Emulator({str(self.options)!r})"

    @hookimpl
    def polydraft_backend_info(self, spec: str) -> BackendInfo:
        """Identity; always available, since NumPy is a dependency of core. The device string decides row order and what cannot be
        captured. Raises `ConfigError` for an unknown option."""
        from polydraft.contracts import COMPOSITES, REGISTRY
        from polydraft.contracts.kv_quant import KV_DTYPES
        from polydraft.contracts.packing import PACKINGS
        from polydraft.reference.table import kernel_names
        from polydraft_emulator.options import ROWS, parse

        options = parse(spec, self.options)
        capabilities = Capabilities(
            dtypes=("f32",),
            asynchronous=True,
            graph_capture=True,
            uncapturable=options.refused_names,
            row_invariant=True,
            row_order=ROWS[options.rows],
            pool_temporaries=True,
            kv_dtypes=KV_DTYPES,
            weight_packings=tuple(PACKINGS),
            expert_packings=tuple(PACKINGS),
            sliding_window=True,
            ranks="threads",
            ordered_sums=True,
        )
        return BackendInfo(
            name="emulator",
            version=__version__,
            package="polydraft-emulator",
            device_pattern="emulator:<index>?option=value&...",
            summary="the worst legal accelerator, in NumPy on the CPU: lazy, reordered, poisoned and replayable by seed",
            devices=(str(options),),
            capabilities=capabilities,
            contract_versions=MappingProxyType(
                {name: 1 if name in COMPOSITES else REGISTRY[name].version for name in kernel_names()}
            ),
            evidence="emulator",
        )

    @hookimpl
    def polydraft_open_device(self, spec: str, options: DeviceOptions) -> EmulatorDevice:
        """Open a fresh device. Raises `ConfigError` for an unknown option."""
        from polydraft_emulator.device import EmulatorDevice
        from polydraft_emulator.options import parse

        return EmulatorDevice(parse(spec, self.options), dtype=options.dtype)

    @hookimpl
    def polydraft_kernels(self, device: EmulatorDevice) -> KernelTable:
        """Every contract of the reference, bound to the device."""
        from polydraft_emulator.kernels import EmulatorTable

        return EmulatorTable(device)

    @hookimpl
    def polydraft_graph_capture(self, device: EmulatorDevice) -> GraphCapture:
        """Capture and replay with its rules."""
        from polydraft_emulator.graph import EmulatorCapture

        return EmulatorCapture(device, frozenset(device.options.refused_names))  # type: ignore[return-value]

    @hookimpl
    def polydraft_init_forward_meta(self, device: EmulatorDevice, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
        """Gather indices into the device's own cache layout."""
        from polydraft_emulator.forward_meta import EmulatorForwardMeta

        return EmulatorForwardMeta.of_pass(device, buffers, limits)  # type: ignore[return-value]

    @hookimpl
    def polydraft_collectives(self, device: EmulatorDevice, group: Group) -> Collectives:
        """Those of host memory, each one operation among others, as the device string has ranks behave. Raises `ConfigError` for
        an unknown behaviour."""
        from polydraft.backend import Collectives
        from polydraft.contracts import COLLECTIVES
        from polydraft_emulator.ranks import collectives_of

        made = collectives_of(group, device.options.seed, device.options.ranks)
        providers = {name: device.bind_kernel(kernel) for name, kernel in made.items()}
        return Collectives(providers, {one.name: one.version for one in COLLECTIVES})


_PLAIN = Emulator()
polydraft_backend_info = _PLAIN.polydraft_backend_info
polydraft_open_device = _PLAIN.polydraft_open_device
polydraft_kernels = _PLAIN.polydraft_kernels
polydraft_graph_capture = _PLAIN.polydraft_graph_capture
polydraft_init_forward_meta = _PLAIN.polydraft_init_forward_meta
polydraft_collectives = _PLAIN.polydraft_collectives
