"""The kernel pack `paddle/fused-rope`: queries and keys rotated by Paddle's fused operation, then filed as without it.

Enabled by name or by a record of the kit. Heads that rotate in part are the portable kernel's: the operation turns whole ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polydraft.hooks import hookimpl

if TYPE_CHECKING:
    from polydraft.contracts.base import Limits
    from polydraft_paddle.provider import Run


def rope_kv_write(a: Any, limits: Limits) -> Run:
    """Rotate q and k in one operation, keep q, write k and v to the paged cache."""
    import numpy as np
    import paddle

    from polydraft.contracts.kernels.rope_kv_write import turns
    from polydraft_paddle.kernels import numeric

    if 2 * len(a.frequencies) != a.head_dim:
        return numeric.rope_kv_write(a, limits)
    half = np.arange(a.head_dim // 2)
    pair = np.concatenate([half, half]) if a.style == "half" else half.repeat(2)
    cos, sin = (
        paddle.to_tensor(table[:, pair].astype(np.float32)[None, :, None], place=a.qkv.place)
        for table in turns(a, limits.max_len)
    )

    def rotate(qkv: Any, layout: Any) -> tuple[Any, Any]:
        ids = layout.positions.astype("int64").unsqueeze(0)
        fused = paddle.incubate.nn.functional.fused_rotary_position_embedding
        qk = qkv[:, : -a.num_kv_heads].unsqueeze(0)
        turned = fused(qk, sin=sin, cos=cos, position_ids=ids, use_neox_rotary_style=a.style != "half")
        q, k = turned[0].squeeze(0).split([a.num_heads, a.num_kv_heads], axis=1)
        return q, paddle.concat([k, qkv[:, -a.num_kv_heads :]], axis=1)

    return numeric.rotate_and_keep(a, rotate)


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    """`rope_kv_write`."""
    from polydraft_paddle.variants import pack

    return pack("paddle/fused-rope", device, {"rope_kv_write": rope_kv_write})
