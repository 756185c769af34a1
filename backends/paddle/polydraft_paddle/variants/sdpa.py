"""The kernel pack `paddle/sdpa`: attention of windows by Paddle's `scaled_dot_product_attention`, which picks a fused kernel of the
place where there is one.

Enabled by name or by a record of the kit. Keys and values are gathered as without it; passes with prefill on a device of its own
are left to the portable kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polydraft.hooks import hookimpl

if TYPE_CHECKING:
    from polydraft.contracts.base import Limits
    from polydraft_paddle.provider import Run


def paged_attention(a: Any, limits: Limits) -> Run:
    """Windows of all slots in one call."""
    from polydraft_paddle.kernels import host, numeric

    kernels = host if a.q.place.is_cpu_place() else numeric
    run: Run = kernels.paged_attention(a, limits, mix)
    return run


def mix(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Softmax attention of q [S, G, M, D], whose scale is in it, over k and v [S, G, C, D], with `mask` [S, G, M, C] added."""
    import paddle

    places = [t.transpose([0, 2, 1, 3]) for t in (q, k, v)]  # Paddle wants heads behind places
    scale = q.shape[-1] ** 0.5  # which it divides scores by
    attend = paddle.nn.functional.scaled_dot_product_attention
    return attend(places[0] * scale, *places[1:], attn_mask=mask, training=False).transpose([0, 2, 1, 3])


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    """`paged_attention`."""
    from polydraft_paddle.variants import pack

    return pack("paddle/sdpa", device, {"paged_attention": paged_attention})
