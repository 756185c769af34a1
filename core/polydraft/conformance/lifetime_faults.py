"""Faults of what lives long: weights that are refilled and do not change, caches and kernels that share what is one's own, memory
that refills, sleep and closed devices keep.

`faulty_backends.py` puts them around backends. Each is done with the backend's own functions, so that whoever counts the device's
memory sees it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from polydraft.conformance import fault_injection as by
from polydraft.conformance.target import Proxy, TableProxy, bare, wrap
from polydraft.contracts.packing import PackedWeight

KEPT: Final = 1 << 20
"""Bytes that sleep leaves taken."""
FEW: Final = 32
"""Places in a list that is too short."""
RICH: Final = 1 << 50
"""Bytes that no device has."""


def _table(make: Callable[[Any, Any], Any]) -> by.Break:
    """A backend whose kernel table is replaced by `make(table, device)`."""
    return lambda plugin: wrap(plugin, polydraft_kernels=lambda answer, device: make(answer, bare(device)))


# -- weights and caches ----------------------------------------------------------------------------------
def stale(ignored: Callable[[str, Any], bool]) -> by.Break:
    """Refills of weights of which `ignored(role, value)` holds do nothing."""

    class Stale(TableProxy):
        def prepare_weight(self, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
            if previous is not None and ignored(role, value):
                return previous
            return self._inner.prepare_weight(role, value, dtype, previous)

    return _table(lambda table, device: Stale(table, {}))


def neither_linear_nor_embedding(role: str, value: Any) -> bool:
    """Norms, experts and routers."""
    del value
    return role not in ("linear", "bias", "embedding")


def packed(role: str, value: Any) -> bool:
    """Matrices of few bits."""
    del role
    return isinstance(value, PackedWeight)


def refilled_once(plugin: Any) -> Any:
    """The first refill of a weight is done, and no other one."""

    class Once(TableProxy):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner, {})
            self._refilled: list[Any] = []

        def prepare_weight(self, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
            if any(one is previous for one in self._refilled):
                return previous
            self._refilled += [] if previous is None else [previous]
            return self._inner.prepare_weight(role, value, dtype, previous)

    return _table(lambda table, device: Once(table))(plugin)


def keeping_refills(plugin: Any) -> Any:
    """A refill lays the weight out once more first, and keeps that."""
    kept: list[Any] = []

    class Keeping(TableProxy):
        def prepare_weight(self, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
            if previous is not None:
                mine = value if isinstance(value, PackedWeight) else value.copy()  # which a backend may keep as it is
                kept.append(self._inner.prepare_weight(role, mine, dtype))
            return self._inner.prepare_weight(role, value, dtype, previous)

    return _table(lambda table, device: Keeping(table, {}))(plugin)


class _AsCaptured(Proxy):
    """`linear`, launched into captures with the weights that there were when it was bound."""

    def __init__(self, inner: Any, values: dict[int, tuple[Any, ...]], captures: list[bool], table: Any) -> None:
        super().__init__(inner)
        self._values, self._captures, self._table = values, captures, table

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        launch, captures = self._inner.bind(args, limits, workspace), self._captures
        _, *made = self._values[id(args.weight)]
        copy = dataclasses.replace(args, weight=self._table.prepare_weight(*made))
        captured = self._inner.bind(copy, limits, workspace)

        def run(stream: Any, n: int) -> None:
            (captured if captures[0] else launch)(stream, n)

        return run


def graphs_keep_weights(plugin: Any) -> Any:
    """Graphs go on with the weights of `linear` that they were captured with."""
    captures = [False]

    class Noting(TableProxy):
        def __init__(self, inner: Any) -> None:
            self._made: dict[int, tuple[Any, ...]] = {}
            super().__init__(inner, {"linear": _AsCaptured(inner.providers["linear"], self._made, captures, inner)})

        def prepare_weight(self, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
            weight = self._inner.prepare_weight(role, value, dtype, previous)
            self._made[id(weight)] = weight, role, value, dtype
            return weight

    with_captures = by.with_capture(lambda facility, device: by.NotedCaptures(facility, captures))
    return with_captures(_table(lambda table, device: Noting(table))(plugin))


def third_cache_is_first(plugin: Any) -> Any:
    """Two caches of a form are for themselves, and each further one is the first."""

    class Two(TableProxy):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner, {})
            self._made: dict[Any, list[Any]] = {}

        def allocate_cache(self, spec: Any) -> Any:
            made = self._made.setdefault(spec, [])
            if len(made) < 2:
                made.append(self._inner.allocate_cache(spec))
                return made[-1]
            return made[0]

    return _table(lambda table, device: Two(table))(plugin)


def third_weight_is_first(plugin: Any) -> Any:
    """Two weights of a role and shape are for themselves, and each further one is the first, filled anew."""

    class Two(TableProxy):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner, {})
            self._made: dict[Any, list[Any]] = {}

        def prepare_weight(self, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
            made = self._made.setdefault((role, value.shape, dtype), [])
            if previous is None and len(made) > 1 and not isinstance(value, PackedWeight):
                return self._inner.prepare_weight(role, value, dtype, made[0])
            weight = self._inner.prepare_weight(role, value, dtype, previous)
            if previous is None and not isinstance(value, PackedWeight):
                made.append(weight)
            return weight

    return _table(lambda table, device: Two(table))(plugin)


def layers_beyond_32(plugin: Any) -> Any:
    """Of more than 32 caches of a form each further one is the first."""

    class Few(TableProxy):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner, {})
            self._made: dict[Any, list[Any]] = {}

        def allocate_cache(self, spec: Any) -> Any:
            made = self._made.setdefault(spec, [])
            made.append(self._inner.allocate_cache(spec) if len(made) < FEW else made[0])
            return made[-1]

    return _table(lambda table, device: Few(table))(plugin)


def wrong_beside(contract: str, other: str, change: Callable[[Any, int], None]) -> by.Break:
    """A kernel that leaves something else where the table has bound another one, earlier or later."""

    class Noted(Proxy):
        def __init__(self, inner: Any, bound: list[bool]) -> None:
            super().__init__(inner)
            self._bound = bound

        def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
            self._bound.append(True)
            return self._inner.bind(args, limits, workspace)

    def providers(table: Any, device: Any) -> dict[str, Any]:
        bound: list[bool] = []

        def spoil(a: Any, n: int) -> None:
            if bound:
                change(a, n)

        return {contract: by.Spoiled(table.providers[contract], spoil, device), other: Noted(table.providers[other], bound)}

    return by.with_table(providers, without=contract)


# -- memory ----------------------------------------------------------------------------------------------
def _take(device: Any) -> Any:
    """Memory of the device, written so that it is there."""
    with by.uncounted(device):
        buffer = device.empty("mutant.kept", (KEPT,), "u8")
        device.load(buffer, np.ones(KEPT, np.uint8))
    return buffer


class KeepsAsleep(Proxy):
    """A device that takes memory each time that it goes to sleep, and keeps it."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._taken: list[Any] = []

    def sleep(self, *, keep_weights: bool) -> None:
        self._taken.append(_take(self._inner))
        self._inner.sleep(keep_weights=keep_weights)


class KeepsAwake(Proxy):
    """A device that takes memory each time that it wakes, and keeps it."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._taken: list[Any] = []

    def wake(self) -> None:
        self._inner.wake()
        self._taken.append(_take(self._inner))


class SleepsLightly(Proxy):
    """A device that gives nothing back at level 1."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._asleep = False

    def sleep(self, *, keep_weights: bool) -> None:
        if not keep_weights:
            self._asleep = True
            self._inner.sleep(keep_weights=False)

    def wake(self) -> None:
        if self._asleep:
            self._inner.wake()
        self._asleep = False


def closed_in_name(plugin: Any) -> Any:
    """Closing a device frees nothing."""
    kept: list[Any] = []

    class Kept(Proxy):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self._buffers: list[Any] = []

        def empty(self, name: str, shape: Any, dtype: str) -> Any:
            self._buffers.append(self._inner.empty(name, shape, dtype))
            return self._buffers[-1]

        def close(self) -> None:
            kept.append((self._inner, self._buffers))

    return by.with_device(Kept)(plugin)


def outliving(plugin: Any) -> Any:
    """Weights and caches stay when their device is closed."""
    kept: list[Any] = []

    class Kept(TableProxy):
        def prepare_weight(self, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
            kept.append(self._inner.prepare_weight(role, value, dtype, previous))
            return kept[-1]

        def allocate_cache(self, spec: Any) -> Any:
            kept.append(self._inner.allocate_cache(spec))
            return kept[-1]

    return _table(lambda table, device: Kept(table, {}))(plugin)


def _on_waking(change: Callable[[Any], Any]) -> by.Break:
    """A device that kept its weights while it slept puts `change(value)` in place of each, `value` being what it was made from;
    None: it stays."""

    def broken(plugin: Any) -> Any:
        made: dict[Any, list[tuple[Any, ...]]] = {}

        class Noting(TableProxy):
            def __init__(self, inner: Any, device: Any) -> None:
                super().__init__(inner, {})
                self._device = device

            def prepare_weight(self, role: str, value: Any, dtype: str, previous: Any = None) -> Any:
                weight = self._inner.prepare_weight(role, value, dtype, previous)
                changed = change(value) if previous is None else None
                if changed is not None:
                    made.setdefault(self._device, []).append((self._inner, role, changed, dtype, weight))
                return weight

        class Changing(Proxy):
            _kept = False

            def sleep(self, *, keep_weights: bool) -> None:
                self._kept = keep_weights
                self._inner.sleep(keep_weights=keep_weights)

            def wake(self) -> None:
                self._inner.wake()
                for table, *one in made.get(self._inner, []) if self._kept else ():
                    table.prepare_weight(*one)

        return by.with_device(Changing)(_table(Noting)(plugin))

    return broken


first_weights_come_back = _on_waking(lambda value: value if isinstance(value, PackedWeight) else np.array(value))
"""What a device keeps of its weights while it sleeps is what they were when they were made."""
packed_weights_lost_asleep = _on_waking(
    lambda value: dataclasses.replace(value, scales=np.zeros_like(value.scales)) if isinstance(value, PackedWeight) else None
)
"""Scales of packed weights do not survive sleep at level 1."""


def asleep_together(plugin: Any) -> Any:
    """A device that goes to sleep takes what other devices have along."""
    opened: list[Any] = []

    class Together(Proxy):
        def sleep(self, *, keep_weights: bool) -> None:
            self._inner.sleep(keep_weights=keep_weights)
            for other in opened:
                if other is not self._inner:
                    other.sleep(keep_weights=False)
                    other.wake()

        def close(self) -> None:
            opened[:] = [one for one in opened if one is not self._inner]
            self._inner.close()

    def open_device(answer: Any, options: Any, **_: Any) -> Any:
        if options.sleep:
            opened.append(answer)
        return Together(answer)

    return wrap(plugin, polydraft_open_device=open_device)


class FewGraphs(Proxy):
    """A facility with room for 32 graphs: each further one is the first."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._graphs: list[Any] = []

    def capture(self, stream: Any, fn: Callable[[], None]) -> Any:
        graph = self._inner.capture(stream, fn)
        self._graphs.append(graph if len(self._graphs) < FEW else self._graphs[0])
        return self._graphs[-1]


class Rich(Proxy):
    """A device that says that there is memory enough, whatever is taken."""

    def free_memory(self) -> int:
        return RICH
