"""The kernel pack `paddle/sdpa`: attention of windows by Paddle's `scaled_dot_product_attention`.

Enabled by name or by a record of the kit; Paddle picks a fused kernel of the place where there is one. Keys and values are
gathered as without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polydraft.hooks import hookimpl

if TYPE_CHECKING:
    from polydraft.contracts.base import Limits
    from polydraft_paddle.provider import Run


def paged_attention(a: Any, limits: Limits) -> Run:
    """Windows of all slots in one call."""
    from polydraft_paddle.kernels import host_attention, numeric

    if a.q.place.is_cpu_place():
        return host_attention.paged_attention(a, limits, attend_masked)
    return numeric.paged_attention(a, limits, attend_rows)


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Softmax attention of q [S, G, M, D], whose scale is in it, over k and v [S, G, C, D], with `mask` [S, G, M, C] added."""
    import paddle

    q = q * q.shape[-1] ** 0.5  # which Paddle divides scores by
    call = paddle.nn.functional.scaled_dot_product_attention
    places = (t.transpose([0, 2, 1, 3]) for t in (q, k, v))  # Paddle wants heads behind places
    return call(*places, attn_mask=mask, training=False).transpose([0, 2, 1, 3])


def attend_masked(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, float]:
    """The same, and a number that is not finite where a key or a value was broken."""
    from polydraft_paddle.kernels.host_attention import total

    mixed = attend(q, k, v, mask)
    return mixed, total(k) + total(mixed)


def attend_rows(q: Any, k: Any, v: Any, keys: Any, keep: Any) -> None:
    """The same with keys that are visible or not; a NaN among those makes the row NaN. Rows that see nothing become zero."""
    import paddle

    mask = paddle.where(keys.visible, paddle.zeros_like(keys.hidden), keys.hidden)
    q = paddle.where(keys.visible.any(axis=-1, keepdim=True), q, paddle.zeros_like(q))
    broken = paddle.isnan(k)
    mixed = attend(q, paddle.where(broken, paddle.zeros_like(k), k), v, mask)
    seen = broken.any(axis=[2, 3], keepdim=True)
    keep(paddle._C_ops.where, seen.expand_as(mixed), paddle.full_like(mixed, float("nan")), mixed)


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    """`paged_attention`."""
    from polydraft_paddle.variants import pack

    return pack("paddle/sdpa", device, {"paged_attention": paged_attention})
