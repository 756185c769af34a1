"""The kernel pack `paddle/fused-rms-norm`: RMSNorm, alone and behind a residual add, by Paddle's fused operation.

Enabled by name or by a record of the kit. It never changes how rows are laid out.
"""

from __future__ import annotations

from typing import Any

from polydraft.hooks import hookimpl


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    """`rms_norm` and `residual_add+rms_norm`."""
    from polydraft_paddle.kernels.host import add_and_norm, rms_norm
    from polydraft_paddle.variants import pack

    return pack("paddle/fused-rms-norm", device, {"rms_norm": rms_norm, "residual_add+rms_norm": add_and_norm})
