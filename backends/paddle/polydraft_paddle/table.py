"""The kernel table of the Paddle backend: which kernel serves which contract, and how weights and caches lie in memory.

`polydraft_kernels` returns it; `polydraft_xpu` starts from it and replaces what differs there. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from polydraft.backend import Cache, CacheSpec, Weight
from polydraft.contracts.base import Provider
from polydraft.device import Array
from polydraft.errors import ContractError
from polydraft_paddle.cache import BEHIND, FRONT, PaddleCache
from polydraft_paddle.kernels.kv_quant import QuantisedCache, words
from polydraft_paddle.ops import Tensor, refresh
from polydraft_paddle.provider import Kernel, PaddleProvider, refused

if TYPE_CHECKING:
    from polydraft_paddle.device import PaddleDevice

PADDLE_DTYPES = {"i32": "int32", "u32": "int32", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "u8": "uint8"}
"""Dtype names of the seam as Paddle's; it has no uint32, so the bits of u32 travel as int32."""


def _size(tensor: Tensor) -> int:
    return int(tensor.size) * int(tensor.element_size())


class PaddleWeight:
    """A weight in its canonical shape, whatever its strides."""

    __slots__ = ("role", "tensor")

    def __init__(self, role: str, tensor: Tensor) -> None:
        self.role, self.tensor = role, tensor

    @property
    def nbytes(self) -> int:
        """Of the weight as it is kept; not of copies in another dtype (`ops.kept_as`)."""
        return _size(self.tensor)


def providers_of(device: PaddleDevice) -> dict[str, Provider]:
    """Contract (or composite) name to provider. Where the host sees the device's memory, kernels of `host` replace portable ones,
    and state kernels are the reference's over the same memory: one call of Paddle takes as long as all that they do."""
    from polydraft.reference import state_kernels
    from polydraft_paddle.kernels import experts, host, host_attention, logprobs, numeric, processing, rejection, state

    modules = numeric, experts, processing, rejection, logprobs
    chosen: dict[str, Kernel] = {name: kernel for module in modules for name, kernel in module.KERNELS.items()}
    found: dict[str, Provider] = {}
    if device.host_visible:
        found.update({name: device.bind_kernel(kernel) for name, kernel in state_kernels.KERNELS.items()})
        chosen = {**chosen, **host.KERNELS, **host_attention.KERNELS, **experts.HOST}
    else:
        chosen = {**state.KERNELS, **chosen}
    return found | {name: PaddleProvider(kernel, device.counters, device.spec) for name, kernel in chosen.items()}


class PaddleTable:
    """The `KernelTable` of every Paddle place."""

    def __init__(self, device: PaddleDevice) -> None:
        from polydraft.contracts import COMPOSITES, REGISTRY

        self.providers: Mapping[str, Provider] = providers_of(device)
        self.versions: Mapping[str, int] = {n: 1 if n in COMPOSITES else REGISTRY[n].version for n in self.providers}
        self._device = device

    def prepare_weight(self, role: str, value: Array, dtype: str, previous: Weight | None = None) -> Weight:
        """Keep the canonical array on the device, in the activation dtype; routers and what is added to their scores stay
        float32, since 16 bits do not tell their differences. `previous` is refilled at its address."""
        if previous is None:
            dtype = "f32" if role == "router" else dtype
            by_column = role == "linear" and self._device.host_visible  # as the host's product reads it
            buffer = self._device.empty(role, value.shape[::-1] if by_column else value.shape, dtype)
            tensor = buffer.tensor.t() if by_column else buffer.tensor
            self._device.fill(tensor, value, role)
            return PaddleWeight(role, tensor)
        target = previous.tensor  # type: ignore[attr-defined]
        if tuple(target.shape) != value.shape:
            raise ContractError(
                f"weight update: got shape {value.shape}, wanted {tuple(target.shape)}; load the same architecture"
            )
        self._device.fill(target, value, role)
        refresh(target)
        return previous

    def allocate_cache(self, spec: CacheSpec) -> Cache:
        """A fresh cache, counted as one allocation; `DeviceError` when memory is short."""
        if self._device.guest is not None:
            cache: Cache = self._device.guest.allocate_cache(spec)
            return cache
        width = words(spec) if spec.kv else spec.num_kv_heads * spec.head_dim
        shape = FRONT + 2 * (spec.num_blocks * spec.block_size + BEHIND), width
        whole = self._device.empty("cache", shape, "i32" if spec.kv else spec.dtype).tensor
        with refused(self._device.spec, "the KV cache"):
            return QuantisedCache(spec, whole) if spec.kv else PaddleCache(spec, whole)
