"""A plugin for benchmarks: synthetic acceptance by slot and place, which may change while an engine runs.

The chances of `accept_schedule` hold for all requests and for good. This kernel pack for the CUDA backend looks at a table
instead, `device.chances` [slots, drafts] float32, which whoever drives the engine fills by `Device.load`, before the first step
and between any two.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from polydraft import hookimpl

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 32


class Forced:
    """The provider of `force_choices` on one device."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        """A thread a sequence."""
        from polydraft_cuda.compiler import ROWS

        del limits
        device, a = self.device, args
        if not hasattr(device, "chances"):
            device.chances = device.zeros("bench.chances", a.drafts.shape, "f32")
        launch = device.function(SOURCE, "force_choices").bind(
            lambda n: -(-n // THREADS), THREADS, a.slot_order, a.logit_start, a.logit_len, a.drafts, a.drafts.shape[1],
            a.uniforms, device.chances, a.choices, int(a.num_valid), ROWS,
        )  # fmt: skip
        launch.__dict__["bound"] = args, workspace
        return launch

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        """None."""
        del args, limits
        return 0


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    """One kernel, in place of the backend's."""
    return SimpleNamespace(providers={"force_choices": Forced(device)}, versions={"force_choices": 1})
