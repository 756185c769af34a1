"""The kernel table of one GPU: a provider for each contract, the pass over programs, and the factories of weights and caches.

`polydraft_kernels` returns it. It never compiles: a kernel does when it is bound.
"""

from __future__ import annotations

from collections.abc import Mapping

from polydraft.backend import Cache, CacheSpec, Weight
from polydraft.contracts.base import Provider
from polydraft.contracts.packing import Matrix, PackedWeight
from polydraft_cuda.device import CudaDevice
from polydraft_cuda.kernels import kernels, packed, versions
from polydraft_cuda.kernels.provider import CudaProvider, Kernel
from polydraft_cuda.program_pass import CudaPass
from polydraft_cuda.storage import allocate_cache, prepare_weight


class CudaTable:
    """The `KernelTable` of one device."""

    def __init__(self, device: CudaDevice) -> None:
        def provider(kernel: Kernel) -> CudaProvider:
            return CudaProvider(kernel, device)

        self._device = device
        self.providers: Mapping[str, Provider] = {name: provider(kernel) for name, kernel in kernels().items()}
        self.versions: Mapping[str, int] = versions()
        self.program_pass = CudaPass(device, provider)

    def prepare_weight(self, role: str, value: Matrix, dtype: str, previous: Weight | None = None) -> Weight:
        """Round to `dtype` and copy to the device, a packed matrix as it is; `previous` is refilled at its address."""
        if isinstance(value, PackedWeight):
            return packed.prepare(self._device, role, value, dtype, previous)
        return prepare_weight(self._device, role, value, dtype, previous)

    def allocate_cache(self, spec: CacheSpec) -> Cache:
        """One layer's blocks. Raises `DeviceError` with what would fit."""
        return allocate_cache(self._device, spec)
