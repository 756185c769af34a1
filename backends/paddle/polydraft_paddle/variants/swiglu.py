"""The kernel pack `paddle/swiglu`: the gated activation by Paddle's fused operation.

Enabled by name or by a record of the kit. It never changes how rows are laid out.
"""

from __future__ import annotations

from typing import Any

from polydraft.hooks import hookimpl


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    """`swiglu`."""
    from polydraft_paddle.kernels.host import fused_swiglu
    from polydraft_paddle.variants import pack

    return pack("paddle/swiglu", device, {"swiglu": fused_swiglu})
