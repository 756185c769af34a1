"""The NumPy kernel for the emulator, whose devices bind kernels by a provider of its own."""

from types import SimpleNamespace
from typing import Any

from polydraft import hookimpl
from polydraft.reference.provider import plain
from polydraft_emulator.kernels import EmulatorProvider
from polydraft_gated_delta.numpy_kernels import gated_delta


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    return SimpleNamespace(
        providers={"gated_delta": EmulatorProvider("gated_delta", plain(gated_delta), device)}, versions={"gated_delta": 1}
    )
