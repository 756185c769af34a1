"""The list of variants: kernels made of Paddle's own fused operations, each a kernel pack tested against the contract it serves.

Identity lists those written for the requested place. None of them is in use by default on a place where it has not been seen to
pass. `--kernels paddle/swiglu` names one; `polydraft conform BACKEND --device SPEC --enable-variants` tries all of them on the
device at hand and records which passed; only those are used from then on. Nothing here imports Paddle before a device is open.

Some of Paddle's fused operations cannot be variants: `top_p_sampling` draws numbers of its own, where a contract takes them as
an input; `block_multihead_attention` and its XPU form rotate, write and attend in one call over a cache of their own layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from polydraft.backend import Variant
from polydraft.errors import PluginError
from polydraft_paddle.device_name import take_apart

ELSEWHERE = "elsewhere"
"""Every place but the CPU, which has no kernel of these operations."""
LIST: tuple[tuple[str, Variant], ...] = (
    ("xpu", Variant("paddle/fused-rms-norm", ("rms_norm", "residual_add+rms_norm"), "Paddle's fused_rms_norm")),
    ("xpu", Variant("paddle/swiglu", ("swiglu",), "Paddle's swiglu")),
    (ELSEWHERE, Variant("paddle/fused-rope", ("rope_kv_write",), "Paddle's fused_rotary_position_embedding")),
    ("gpu", Variant("paddle/fused-linear", ("linear",), "Paddle's fused_linear, the bias in the product's epilogue")),
    ("", Variant("paddle/sdpa", ("paged_attention",), "Paddle's scaled_dot_product_attention over gathered windows")),
)
"""The kind of place that each was written for ("": any), in order of precedence. Those for an XPU are the other places' default
where these have the operation (`polydraft_paddle.fused`): on an XPU a trial at opening would not tell."""


def variants_of(spec: str) -> tuple[Variant, ...]:
    """The variants written for the place `spec`. Where memory and streams are CUDA's, the CUDA backend's kernels come first."""
    kind = take_apart(spec).kind
    own = tuple(v for where, v in LIST if where in ("", kind) or (where == ELSEWHERE and kind != "cpu"))
    return (of_cuda(), *own) if kind in ("gpu", "polycuda") else own


def of_cuda() -> Variant:
    """The kernels of the CUDA backend on Paddle's tensors and stream: every contract that they serve there."""
    from polydraft_cuda.kernels import versions

    return Variant("paddle/cuda", tuple(versions()), "the CUDA backend's kernels on Paddle's tensors and stream")


def pack(name: str, device: Any, kernels: Mapping[str, Any]) -> SimpleNamespace:
    """The table of the pack `name`: kernels by contract on an open Paddle device; `PluginError` for another family's device."""
    from polydraft.contracts import COMPOSITES, REGISTRY
    from polydraft_paddle.device import PaddleDevice
    from polydraft_paddle.provider import PaddleProvider

    if not isinstance(device, PaddleDevice):
        raise PluginError(f"kernel pack {name!r} is made of Paddle operations, got a device {device.spec}; name a Paddle backend")
    return SimpleNamespace(
        providers={c: PaddleProvider(kernel, device.counters, device.spec) for c, kernel in kernels.items()},
        versions={c: 1 if c in COMPOSITES else REGISTRY[c].version for c in kernels},
    )
