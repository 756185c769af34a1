"""A kernel pack as somebody else wrote it for specification 1.0, over the frozen backend beside it. Nobody edits it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from polydraft import hookimpl


class Swiglu:
    """One pass over each row."""

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        gate_up, out = args.gate_up.array, args.out.array
        width = out.shape[1]

        def launch(stream: Any, n: int) -> None:
            for row in range(n):
                gate = gate_up[row, :width]
                with np.errstate(over="ignore"):
                    out[row] = gate / (1 + np.exp(-gate)) * gate_up[row, width:]

        return launch

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        return 64


class ResidualAddAndNorm:
    """The composite residual_add+rms_norm as one kernel."""

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        add, norm = args.parts
        x, y, out, weight = add.x.array, add.y.array, norm.out.array, norm.weight.value
        gain, eps = 1 + weight if norm.plus_one else weight, np.float32(norm.eps)

        def launch(stream: Any, n: int) -> None:
            x[:n] += y[:n]
            out[:n] = x[:n] / np.sqrt(np.mean(x[:n] * x[:n], axis=-1, keepdims=True) + eps) * gain

        return launch

    def workspace_bytes(self, args: Any, limits: Any) -> int:
        return 0


@hookimpl
def polydraft_kernels() -> Any:
    providers = {"swiglu": Swiglu(), "residual_add+rms_norm": ResidualAddAndNorm()}
    return SimpleNamespace(providers=providers, versions=dict.fromkeys(providers, 1))
