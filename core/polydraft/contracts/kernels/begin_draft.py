"""Defines `begin_draft`: the draft state of a round, derived afresh from the committed state.

The runner launches it after `commit_window`, before the draft's first pass is read out. It never looks at what an earlier
round drafted, and it leaves slots alone that had no rows in this step (their drafts are still waiting).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, param, tensor
from polydraft.contracts.kernels.pack_draft_rows import SCENES
from polydraft.contracts.scenes import random_scene
from polydraft.contracts.sizes import DRAFTS, SLOTS, SMALL, Sizes
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT, Phase


class BeginDraftV1(Args):
    """Buffers and parameters of `begin_draft`. Launch length: sequences. The `draft_*` outputs are by sequence index.

    The budget leaves room for the token that the target adds to the drafts: with `known = prompt_len + num_generated` it
    is `min(num_drafts, max_total - known - 1)`. Without any, drafts are emptied and nobody drafts.
    """

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    seq_len: Buffer = tensor("B", "i32", "Packed rows of each sequence in this step.")
    phase: Buffer = tensor("B", "i32", "`Phase` by slot, after the commit.")
    kv_len: Buffer = tensor("B", "i32", "Committed rows of the target's cache, by slot.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far, by slot.")
    max_total: Buffer = tensor("B", "i32", "Prompt and generated tokens allowed, by slot.")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot; emptied (NO_TOKEN) where the slot had rows.", access="inout")
    draft_len: Buffer = tensor("B", "i32", "Number of drafts by slot; 0 where the slot had rows.", access="inout")
    draft_slot: Buffer = tensor("B", "i32", "Slot that drafts in this round.", access="out", pad=PAD_SLOT)
    draft_position: Buffer = tensor("B", "i32", "Position of its newest committed row.", access="out", pad=0)
    draft_budget: Buffer = tensor("B", "i32", "Drafts it may make.", access="out", pad=0)
    num_drafts: int = param("Drafts that the step makes for a slot at most.")


def golden(a: Any, n: int) -> None:
    """A slot drafts when it goes on decoding and has room for a draft and the token after it."""
    for i, slot in enumerate(a.slot_order[:n]):
        a.draft_slot[i], a.draft_position[i], a.draft_budget[i] = PAD_SLOT, 0, 0
        if slot < 0 or a.seq_len[i] == 0:
            continue
        for j in range(a.drafts.shape[1]):
            a.drafts[slot, j] = NO_TOKEN
        a.draft_len[slot] = 0
        budget = min(a.num_drafts, a.max_total[slot] - a.prompt_len[slot] - a.num_generated[slot] - 1)
        if a.phase[slot] == Phase.DECODE and budget > 0:
            a.draft_slot[i], a.draft_position[i], a.draft_budget[i] = slot, a.kv_len[slot] - 1, budget


def cases() -> Iterator[Case]:
    """Named cases of `begin_draft`."""
    for name, scene in SCENES.items():
        yield scene.case(name, BeginDraftV1)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """A random scene."""
    return random_scene(rng, sizes, after=True).case("random", BeginDraftV1)


CONTRACT = REGISTRY.add(
    Contract(
        name="begin_draft",
        version=1,
        unit="seqs",
        args=BeginDraftV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Start a round of drafting from the committed state.",
        source="EAGLE (Li et al. 2024) and DeepSeek-V3 (2024); FastDeploy draft_model_preprocess.",
        equivalent_mutants={
            "unpad(slot_order)": "a sequence past the end has no rows",
            "swap(prompt_len,num_generated)": "only their sum is used",
        },
        constraints=("0 <= num_drafts <= K",),
        feature="dense",
        grows={"B": SLOTS, "K": DRAFTS},
    )
)
