"""Owns the list of contracts: importing a name from here loads every contract module once, in one fixed order.

The step program, backends, the conformance kit and the docs take records and the registry from this package. Importing
the package alone loads none of them, so that `polydraft.backend` and plugins stay cheap to import; whoever wants the
complete registry takes `REGISTRY` from here and not from `polydraft.contracts.base`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from polydraft.contracts.advance_draft import AdvanceDraftV1
    from polydraft.contracts.base import REGISTRY
    from polydraft.contracts.begin_draft import BeginDraftV1
    from polydraft.contracts.commit_window import CommitWindowV1
    from polydraft.contracts.composite import COMPOSITES, Composite, CompositeArgs
    from polydraft.contracts.pack_draft_rows import PackDraftRowsV1
    from polydraft.contracts.pack_logit_rows import PackLogitRowsV1
    from polydraft.contracts.pack_rows import PackRowsV1
    from polydraft.contracts.reserve_blocks import ReserveBlocksV1
    from polydraft.contracts.snapshot_output import SnapshotOutputV1
    from polydraft.contracts.update_blocks import UpdateBlocksV1
    from polydraft.contracts.update_slots import UpdateSlotsV1
    from polydraft.contracts.update_tokens import UpdateTokensV1
    from polydraft.contracts.verify_match import VerifyMatchV1

_ORDER: Final = (
    "update_slots", "update_tokens", "update_blocks", "reserve_blocks", "pack_rows", "pack_logit_rows",
    "embed", "rms_norm", "residual_add", "linear", "rope_kv_write", "paged_attention", "swiglu", "gather_rows",
    "process_logits", "argmax", "gumbel_noise", "sample", "verify_match", "commit_window", "snapshot_output",
    "pack_draft_rows", "begin_draft", "combine_draft_inputs", "select_last_rows", "advance_draft",
)  # fmt: skip
"""Every contract module, in the order of a step; each holds one contract and its record, `<CamelCase>V1`."""

__all__ = [
    "COMPOSITES", "REGISTRY", "Composite", "CompositeArgs", "AdvanceDraftV1", "BeginDraftV1", "CommitWindowV1", "PackDraftRowsV1", "PackLogitRowsV1", "PackRowsV1",
    "ReserveBlocksV1", "SnapshotOutputV1", "UpdateBlocksV1", "UpdateSlotsV1", "UpdateTokensV1", "VerifyMatchV1",
]  # fmt: skip


def _load() -> dict[str, Any]:
    """Import every contract module in order; return the registry and the records by name."""
    names: dict[str, Any] = {"REGISTRY": import_module("polydraft.contracts.base").REGISTRY}
    composite = import_module("polydraft.contracts.composite")
    names.update({name: getattr(composite, name) for name in ("COMPOSITES", "Composite", "CompositeArgs")})
    for name in _ORDER:
        if find_spec(f"polydraft.contracts.{name}") is None:
            continue
        module = import_module(f"polydraft.contracts.{name}")
        record = name.title().replace("_", "") + "V1"
        names[record] = getattr(module, record)
    return names


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update(_load())
    return globals()[name]
