"""Finds what the Python packages of custom devices provide besides the runtime that Paddle loads: pinned memory, or why there is
none, and options of the device's name.

The Paddle device calls it when it is opened and for staging, a provider when it binds. It does not import Paddle, and a place
without a companion is not an error.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Final, Literal

from polydraft.errors import ConfigError, DeviceError
from polydraft_paddle.device_name import take_apart

PACKAGES: Final = {"polycuda": "polydraft_paddle_cuda", "polyemu": "polydraft_paddle_emu"}
"""Kind of place to the package that comes with its runtime."""


def companion(spec: str) -> Any:
    """The package of the place `spec`, or None."""
    name = PACKAGES.get(take_apart(spec).kind, "")
    return importlib.import_module(name) if name and importlib.util.find_spec(name) else None


def reason(spec: str) -> str:
    """Why a kind of place has no device on this machine, in its package's words; "" where it has one, or nobody knows."""
    package = companion(spec)
    return str(package.reason()) if package is not None else ""


def graph_memory(spec: str) -> int:
    """Bytes that captured graphs hold on the place, as far as its package tells them apart from other memory; else 0."""
    package = companion(spec)
    return int(package.graph_memory()) if package is not None else 0


def host_memory(spec: str, nbytes: int) -> Any:
    """Page-locked memory of `nbytes` bytes for copies to and from the place, as something with the buffer protocol; None where
    nobody offers any. Raises `DeviceError` when it is short."""
    package = companion(spec)
    if package is None:
        return None
    try:
        return package.pinned_memory(take_apart(spec).number, nbytes)
    except MemoryError as error:
        raise DeviceError(f"device {spec}: {error}; lower --max-num-seqs or --max-batched-tokens") from error


def activations(spec: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the `usual` activation dtypes that the place has by its package's word, all where there is none. Raises as
    `f32_matmul`."""
    package = companion(spec)
    if not hasattr(package, "activations"):
        return usual
    try:
        found = package.activations(take_apart(spec).options)
    except ValueError as error:
        raise ConfigError(f"device {spec}: {error}") from error
    return usual if found is None else tuple(dtype for dtype in usual if dtype in found)


def f32_matmul(spec: str) -> Literal["f32", "tf32"]:
    """What float32 products on the place round their factors to, as its package says; "f32" where there is none. Raises
    `ConfigError` for options of the device's name that it does not know."""
    package = companion(spec)
    if not hasattr(package, "f32_matmul"):
        return "f32"
    try:
        return "tf32" if package.f32_matmul(take_apart(spec).options) == "tf32" else "f32"
    except ValueError as error:
        raise ConfigError(f"device {spec}: {error}") from error


def configure(spec: str, *, refuse_waits: bool) -> None:
    """Hand the options of the device's name to the package of the place, which is being opened, and tell it whether launches may
    make the host wait. Raises `DeviceError` for options where nobody knows any, or that cannot be met."""
    package, options = companion(spec), take_apart(spec).options
    if not hasattr(package, "configure"):
        if options:
            raise DeviceError(f"device {spec}: got the options {options!r}, wanted none; a place of this kind has none")
        return
    try:
        package.configure(options, refuse_waits=refuse_waits)
    except ValueError as error:
        raise DeviceError(f"device {spec}: {error}") from error


def collectives_of(spec: str) -> Any:
    """What the package of the place knows of its library of collectives, which Paddle has no words for; None where there is none.
    `be_patient(seconds)` says how long collectives of communicators to come wait for other ranks; `expect(kind, launch, step, n,
    nbytes)` what this thread queues next, for ranks to compare, `step` being an address on the device; `joined()` is the
    communicator that this process joined last: `abandon()` ends its collectives, which then wait for nobody, and `gave_up()` is
    None, or what this rank had come for when it gave up and the rank that it waited for or that came for something else."""
    return getattr(companion(spec), "collectives", None)


def watched(spec: str, contract: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a launch of `contract`, with the package of the place told of its beginning and end where it wants to know: the
    device then raises `DeviceError` behind a launch in which the host waited and must not."""
    package = companion(spec)
    launches = package.launches() if hasattr(package, "launches") else None
    if launches is None:
        return call

    def run(*arguments: Any) -> Any:
        launches.begin(contract)
        try:
            return call(*arguments)
        finally:
            if waited := launches.end():
                raise DeviceError(
                    f"{contract} makes the host wait on device {spec}: {waited}; use operations that the device only queues"
                )

    return run
