"""Owns the list of contracts: importing a name from here loads every contract module once, in one fixed order.

The step program, backends, the conformance kit and the docs take records and the registry from this package. Importing
the package alone loads none of them, so that `polydraft.backend` and plugins stay cheap to import; whoever wants the
complete registry takes `REGISTRY` from here and not from `polydraft.contracts.base`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from polydraft.contracts.advance_draft import AdvanceDraftV1
    from polydraft.contracts.align_drafts import AlignDraftsV1
    from polydraft.contracts.argmax import ArgmaxV1
    from polydraft.contracts.base import REGISTRY
    from polydraft.contracts.begin_draft import BeginDraftV1
    from polydraft.contracts.bias_logits import BiasLogitsV1
    from polydraft.contracts.combine_draft_inputs import CombineDraftInputsV1
    from polydraft.contracts.commit_window import CommitWindowV1
    from polydraft.contracts.composite import COMPOSITES, Composite, CompositeArgs
    from polydraft.contracts.draft_logprobs import DraftLogprobsV1
    from polydraft.contracts.draft_ngram import DraftNgramV1
    from polydraft.contracts.draw_draft import DrawDraftV1
    from polydraft.contracts.embed import EmbedV1
    from polydraft.contracts.filter_probs import FilterProbsV1
    from polydraft.contracts.forbid_tokens import ForbidTokensV1
    from polydraft.contracts.force_choices import ForceChoicesV1
    from polydraft.contracts.gather_rows import GatherRowsV1
    from polydraft.contracts.gumbel_noise import GumbelNoiseV1
    from polydraft.contracts.keep_logits import KeepLogitsV1
    from polydraft.contracts.linear import LinearV1
    from polydraft.contracts.mask_logits import MaskLogitsV1
    from polydraft.contracts.pack_draft_rows import PackDraftRowsV1
    from polydraft.contracts.pack_logit_rows import PackLogitRowsV1
    from polydraft.contracts.pack_logprobs import PackLogprobsV1
    from polydraft.contracts.pack_prompt_rows import PackPromptRowsV1
    from polydraft.contracts.pack_rows import PackRowsV1
    from polydraft.contracts.paged_attention import PagedAttentionV1
    from polydraft.contracts.penalise_logits import PenaliseLogitsV1
    from polydraft.contracts.process_logits import ProcessLogitsV1
    from polydraft.contracts.reserve_blocks import ReserveBlocksV1
    from polydraft.contracts.residual_add import ResidualAddV1
    from polydraft.contracts.rms_norm import RmsNormV1
    from polydraft.contracts.rope_kv_write import RopeKvWriteV1
    from polydraft.contracts.sample import SampleV1
    from polydraft.contracts.select_last_rows import SelectLastRowsV1
    from polydraft.contracts.snapshot_output import SnapshotOutputV1
    from polydraft.contracts.spread_logits import SpreadLogitsV1
    from polydraft.contracts.swiglu import SwigluV1
    from polydraft.contracts.top_logprobs import TopLogprobsV1
    from polydraft.contracts.uniform_noise import UniformNoiseV1
    from polydraft.contracts.update_bad_words import UpdateBadWordsV1
    from polydraft.contracts.update_biases import UpdateBiasesV1
    from polydraft.contracts.update_blocks import UpdateBlocksV1
    from polydraft.contracts.update_slots import UpdateSlotsV1
    from polydraft.contracts.update_tokens import UpdateTokensV1
    from polydraft.contracts.verify_match import VerifyMatchV1
    from polydraft.contracts.verify_rejection import VerifyRejectionV1

ORDER: Final = (
    "update_slots", "update_tokens", "update_blocks", "update_biases", "update_bad_words", "reserve_blocks", "pack_rows",
    "pack_logit_rows", "embed", "rms_norm", "residual_add", "linear", "rope_kv_write", "paged_attention", "swiglu",
    "gather_rows", "process_logits", "keep_logits", "penalise_logits", "bias_logits", "forbid_tokens", "mask_logits",
    "argmax", "gumbel_noise", "sample", "uniform_noise", "filter_probs", "draw_draft", "force_choices", "verify_match",
    "verify_rejection", "commit_window", "snapshot_output", "top_logprobs", "pack_logprobs", "pack_prompt_rows",
    "draft_logprobs", "pack_draft_rows", "begin_draft", "combine_draft_inputs", "select_last_rows", "spread_logits",
    "advance_draft", "draft_ngram", "align_drafts",
)  # fmt: skip
"""Every contract module, in the order of a step; each registers one contract and owns its record, `<CamelCase>V1`."""

__all__ = [
    "COMPOSITES", "REGISTRY", "AdvanceDraftV1", "AlignDraftsV1", "ArgmaxV1", "BeginDraftV1", "BiasLogitsV1",
    "CombineDraftInputsV1", "CommitWindowV1", "Composite", "CompositeArgs", "DraftLogprobsV1", "DraftNgramV1",
    "DrawDraftV1", "EmbedV1", "FilterProbsV1", "ForbidTokensV1", "ForceChoicesV1", "GatherRowsV1", "GumbelNoiseV1",
    "KeepLogitsV1", "LinearV1", "MaskLogitsV1", "PackDraftRowsV1", "PackLogitRowsV1", "PackLogprobsV1",
    "PackPromptRowsV1", "PackRowsV1", "PagedAttentionV1", "PenaliseLogitsV1", "ProcessLogitsV1", "ReserveBlocksV1",
    "ResidualAddV1", "RmsNormV1", "RopeKvWriteV1", "SampleV1", "SelectLastRowsV1", "SnapshotOutputV1", "SpreadLogitsV1",
    "SwigluV1",
    "TopLogprobsV1", "UniformNoiseV1", "UpdateBadWordsV1", "UpdateBiasesV1", "UpdateBlocksV1", "UpdateSlotsV1",
    "UpdateTokensV1", "VerifyMatchV1", "VerifyRejectionV1",
]  # fmt: skip


def _load() -> dict[str, Any]:
    """Import every contract module in order, then the composites; return what this package exports by name."""
    names: dict[str, Any] = {}
    for name in ORDER:
        record = name.title().replace("_", "") + "V1"
        names[record] = getattr(import_module(f"polydraft.contracts.{name}"), record)
    composite = import_module("polydraft.contracts.composite")
    names.update({name: getattr(composite, name) for name in ("COMPOSITES", "Composite", "CompositeArgs")})
    names["REGISTRY"] = import_module("polydraft.contracts.base").REGISTRY
    names["REGISTRY"].arrange(ORDER)
    return names


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update(_load())
    return globals()[name]
