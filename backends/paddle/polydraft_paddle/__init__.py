"""The Paddle backend: every contract in portable Paddle operations, for the CPU and every place that Paddle knows.

A new chip with a Paddle runtime runs MTP with it on day one, and gets fast kernel by kernel through kernel packs. Paddle is
imported when a device is opened, not before.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from polydraft._version import __version__
from polydraft.backend import BackendInfo, Capabilities
from polydraft.hooks import hookimpl

if TYPE_CHECKING:
    from polydraft.backend import DeviceOptions, ForwardMeta, KernelTable, PassBuffers
    from polydraft.contracts.base import Limits
    from polydraft_paddle.device import PaddleDevice

CAPABILITIES = Capabilities(dtypes=("f32",), pool_temporaries=True)
CONTRACTS = (
    "update_slots", "update_tokens", "update_blocks", "update_biases", "update_bad_words", "reserve_blocks", "pack_rows",
    "pack_logit_rows", "embed", "rms_norm", "residual_add", "linear", "rope_kv_write", "paged_attention", "swiglu", "gather_rows",
    "process_logits", "argmax", "penalise_logits", "bias_logits", "forbid_tokens", "gumbel_noise", "sample", "uniform_noise",
    "filter_probs", "draw_draft", "force_choices", "verify_match", "verify_rejection", "commit_window", "snapshot_output",
    "pack_draft_rows", "begin_draft", "combine_draft_inputs", "select_last_rows", "advance_draft", "draft_ngram",
)  # fmt: skip
"""What `table.py` serves, listed here because identity may not import Paddle."""


@hookimpl
def polydraft_backend_info() -> BackendInfo:
    """Identity, and whether a usable Paddle is installed, without importing it."""
    from polydraft.contracts import REGISTRY
    from polydraft_paddle.installation import unusable

    reason = unusable()
    return BackendInfo(
        name="paddle",
        version=__version__,
        package="polydraft",
        device_pattern="cpu, gpu:<index>, xpu:<index> or <custom device>:<index>",
        summary="portable Paddle operations: the CPU, and any place that Paddle knows",
        available=not reason,
        reason=reason,
        devices=() if reason else ("cpu",),
        capabilities=CAPABILITIES,
        evidence="silicon",
        contract_versions=MappingProxyType({name: REGISTRY[name].version for name in CONTRACTS}),
    )


@hookimpl
def polydraft_open_device(spec: str, options: DeviceOptions) -> PaddleDevice:
    """Import Paddle and open the place."""
    from polydraft_paddle.installation import import_paddle, refuse_unknown_place

    import_paddle()
    refuse_unknown_place(spec or "cpu")
    from polydraft_paddle.device import PaddleDevice

    return PaddleDevice(spec or "cpu", dtype=options.dtype)


@hookimpl
def polydraft_kernels(device: PaddleDevice) -> KernelTable:
    """Every contract."""
    from polydraft_paddle.table import PaddleTable

    return PaddleTable(device)


@hookimpl
def polydraft_init_forward_meta(device: PaddleDevice, buffers: PassBuffers, limits: Limits) -> ForwardMeta:
    """Groups of rows where the host can see them."""
    from polydraft_paddle.forward_meta import PaddleForwardMeta

    return PaddleForwardMeta(device, buffers, limits)
