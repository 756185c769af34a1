"""Faults of one mode alone: over quantised rows, with packed weights, in a further dtype, with or without row-invariant kernels,
of a fused kernel.

`faulty_backends.py` puts them around backends, which are right in the mode that is tried at length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np

from polydraft.conformance import fault_injection as by
from polydraft.conformance import hidden_faults as hidden
from polydraft.conformance.target import Proxy, TableProxy, bare, wrap
from polydraft.contracts.packing import PackedWeight
from polydraft.errors import DeviceError

MARK: Final = b"left here"
"""What a launch leaves in a workspace."""
MANY: Final = 64
"""Rows, and inputs in hundreds, from which on another way of adding is chosen."""


def over_quantised_rows(contract: str, change: Callable[[Any, Any], Any]) -> by.Break:
    """Replace launches of a kernel that are bound to a cache of quantised rows."""

    class Quantised(TableProxy):
        def __init__(self, inner: Any, device: Any) -> None:
            caches: list[Any] = []
            super().__init__(inner, {contract: _Chosen(inner.providers[contract], lambda a: a.cache in caches, change, device)})
            self._caches = caches

        def allocate_cache(self, spec: Any) -> Any:
            cache = self._inner.allocate_cache(spec)
            self._caches.extend([cache] if spec.kv else [])
            return cache

    return lambda plugin: wrap(plugin, polydraft_kernels=lambda answer, device: Quantised(answer, bare(device)))


def with_packed_weights(contract: str, change: Callable[[Any, Any], Any]) -> by.Break:
    """Replace launches of a kernel that are bound to a packed weight."""

    class Packed(TableProxy):
        def __init__(self, inner: Any, device: Any) -> None:
            weights: list[Any] = []
            super().__init__(inner, {contract: _Chosen(inner.providers[contract], lambda a: a.weight in weights, change, device)})
            self._weights = weights

        def prepare_weight(self, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
            weight = self._inner.prepare_weight(role, value, dtype, previous)
            self._weights.extend([weight] if isinstance(value, PackedWeight) else [])
            return weight

    return lambda plugin: wrap(plugin, polydraft_kernels=lambda answer, device: Packed(answer, bare(device)))


class _Chosen(Proxy):
    """A provider of which launches are replaced where they are bound to what `which` says."""

    def __init__(self, inner: Any, which: Callable[[Any], bool], change: Callable[[Any, Any], Any], device: Any) -> None:
        super().__init__(inner)
        self._which, self._change, self._device = which, change, device

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        launch = self._inner.bind(args, limits, workspace)
        return self._change(launch, self._device) if self._which(args) else launch


def left_out_of_graphs(around: Callable[[Callable[[Any, Any], Any]], by.Break]) -> by.Break:
    """Launches that `around` replaces do nothing in captures."""
    captures = [False]

    def change(launch: Any, device: Any) -> Any:
        del device

        def run(stream: Any, n: int) -> None:
            if not captures[0]:
                launch(stream, n)

        return run

    return hidden.both(around(change), by.with_capture(lambda facility, device: by.NotedCaptures(facility, captures)))


def on_devices(which: Callable[[Any], bool], *, table: Any = None, device: Any = None) -> by.Break:
    """A backend of whose devices some are broken, those of whose options `which` holds: `table(table, device)` and
    `device(device)` return what takes their places."""

    def broken(plugin: Any) -> Any:
        those: list[Any] = []

        def open_device(answer: Any, options: Any, **_: Any) -> Any:
            if not which(options):
                return answer
            those.append(answer)
            return answer if device is None else device(answer)

        def kernels(answer: Any, device: Any) -> Any:
            mine = table is not None and any(one is bare(device) for one in those)
            return table(answer, bare(device)) if mine else answer

        return wrap(plugin, polydraft_open_device=open_device, polydraft_kernels=kernels)

    return broken


def first_result(contract: str) -> Callable[[Any, Any], Any]:
    """A table in which each binding of a kernel works once."""
    return lambda table, device: TableProxy(table, {contract: by.Launched(table.providers[contract], by.once, device)})


def row_invariant(options: Any) -> bool:
    """Devices of row-invariant kernels."""
    return bool(options.row_invariant)


def plain(options: Any) -> bool:
    """Devices of all others, which most users have."""
    return not options.row_invariant


def in_16_bits(options: Any) -> bool:
    """Devices whose activations have 16 bits."""
    return options.dtype in ("f16", "bf16")


class ByForm(Proxy):
    """A provider that takes a parameter from the first binding whose buffers had the same shapes and dtypes."""

    def __init__(self, inner: Any, parameter: str) -> None:
        super().__init__(inner)
        self._parameter, self._known = parameter, dict[Any, Any]()

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        name = self._parameter
        form = tuple((one, tuple(buffer.shape), buffer.dtype) for one, (buffer, _) in args.buffers().items())
        known = self._known.setdefault(form, getattr(args, name))
        return self._inner.bind(dataclasses.replace(args, **{name: known}), limits, workspace)


def by_form(contract: str, parameter: str) -> by.Break:
    """A backend with one such kernel."""
    return by.with_table(lambda table, device: {contract: ByForm(table.providers[contract], parameter)}, without=contract)


class Marking(Proxy):
    """A provider whose launches do nothing where their workspace is not as the one before has left it."""

    def __init__(self, inner: Any, device: Any) -> None:
        super().__init__(inner)
        self._device = device

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        return int(self._inner.workspace_bytes(args, limits)) + len(MARK)

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        wanted, device, buffer = int(self._inner.workspace_bytes(args, limits)), self._device, workspace.buffer
        launch, marked = self._inner.bind(args, limits, workspace if wanted else None), list[bool]()
        with by.uncounted(device):
            pin, event = device.staging("mutant.mark", buffer.shape, "u8"), device.event()

        def run(stream: Any, n: int) -> None:
            with by.uncounted(device), suppress(DeviceError):  # a capture is left alone
                event.record(stream)
                device.download(stream, pin, buffer, buffer.shape[0])
                device.synchronize()
                tail = pin.array[wanted : wanted + len(MARK)]
                if marked and bytes(tail) != MARK:
                    return
                marked.append(True)
                tail[...] = np.frombuffer(MARK, np.uint8)
                device.upload(stream, buffer, pin, buffer.shape[0])
                device.synchronize()
            launch(stream, n)

        return run


def an_ulp_among_many(a: Any, n: int) -> None:
    """The last bit of results depends on how many rows are launched."""
    if n > 1:
        a.out[:n] = np.nextafter(a.out[:n].astype(np.float32), np.float32(0))


def an_ulp_among_many_of_long_sums(a: Any, n: int) -> None:
    """The last bit of long sums depends on whether many rows are launched."""
    if n > MANY and a.x.shape[1] > 16 * MANY:
        a.out[:n] = np.nextafter(a.out[:n].astype(np.float32), np.float32(0))


class ByTurns:
    """The last bit of long sums differs from launch to launch, as where threads add as they come."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, a: Any, n: int) -> None:
        self._number += 1
        if self._number % 2 and a.x.shape[1] > 16 * MANY:
            a.out[:n] = np.nextafter(a.out[:n].astype(np.float32), np.float32(0))
