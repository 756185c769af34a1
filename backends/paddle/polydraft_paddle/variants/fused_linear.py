"""The kernel pack `paddle/fused-linear`: products whose bias Paddle adds in the epilogue of the matrix product.

Enabled by name or by a record of the kit. Products without a bias are Paddle's `matmul`, as without this pack.
"""

from __future__ import annotations

from typing import Any

from polydraft.hooks import hookimpl


def linear(a: Any, n: int) -> None:
    """x @ W.T + b in one operation."""
    import paddle

    from polydraft_paddle.ops import put

    x = a.x[:n]
    if a.bias is None:
        put(a.out[:n], paddle.matmul(x, a.weight, transpose_y=True))
    else:
        put(a.out[:n], paddle.incubate.nn.functional.fused_linear(x, a.weight, a.bias, transpose_weight=True))


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    """`linear`."""
    from polydraft_paddle.provider import plain
    from polydraft_paddle.variants import pack

    return pack("paddle/fused-linear", device, {"linear": plain(linear)})
