"""Defines `draft_logprobs`: files the log probability with which each draft was drawn, beside the draft.

The verifier launches it behind every choice of drafts in steps of which some slot wants log probabilities; `pack_logprobs` of
the next step takes the number along with the round that verifies the draft. It never files a draft itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, param, tensor
from polydraft.contracts.kernels.argmax import spaced
from polydraft.contracts.kernels.draw_draft import distribution
from polydraft.contracts.kernels.top_logprobs import log_softmax
from polydraft.contracts.sizes import DRAFTS, SLOTS, SMALL, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN


class DraftLogprobsV1(Args):
    """Arguments of `draft_logprobs`. A slot has at most one row and fewer than K drafts; a row whose draft is a token has no
    NaN and no +inf, and where `given` is "probs" the draft's own is above 0."""

    logits: Buffer = tensor("N V", "f32", "Logits that the draft was chosen from, or the probabilities it was drawn with.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    tokens: Buffer = tensor("N", "i32", "The draft of each row; NO_TOKEN: none could be chosen.")
    draft_len: Buffer = tensor("B", "i32", "Drafts that each slot has already.")
    num_top: Buffer = tensor("B", "i32", "Most likely tokens wanted beside the emitted one, by slot; -1: no log probabilities.")
    draft_logprobs: Buffer = tensor("B K", "f32", "Log probability of each draft of each slot.", access="inout")
    given: Literal["logits", "probs"] = param('What `logits` holds: "logits" or "probs".')


def golden(a: Any, n: int) -> None:
    """Row by row; the number is filed behind those of the drafts that the slot has."""
    for r, slot in enumerate(a.row_slot[:n]):
        token = a.tokens[r]
        if slot >= 0 and a.num_top[slot] >= 0 and token != NO_TOKEN:
            row = a.logits[r]
            a.draft_logprobs[slot, a.draft_len[slot]] = math.log(row[token]) if a.given == "probs" else log_softmax(row)[token]


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """1 + the largest finite magnitude of the row; of probabilities, 1 + that of the logarithm."""
    magnitude = np.ones(a.draft_logprobs.shape)
    for r, slot in enumerate(a.row_slot[:n]):
        if slot >= 0 and a.num_top[slot] >= 0 and a.tokens[r] != NO_TOKEN:
            values = a.logits[r] if a.given == "logits" else np.log(a.logits[r, [a.tokens[r]]])
            magnitude[slot, a.draft_len[slot]] += np.abs(values[np.isfinite(values)]).max(initial=0.0)
    return {"draft_logprobs": magnitude}


Row = tuple[int, int]
"""Slot and draft of a row."""


def _case(
    name: str, values: Array, rows: Sequence[Row], draft_len: Sequence[int], num_top: Sequence[int], *, n: int | None = None,
    given: str = "logits", num_drafts: int = 3,
) -> Case:  # fmt: skip
    arrays: dict[str, Any] = {"logits": np.asarray(values, np.float32)}
    arrays["row_slot"], arrays["tokens"] = np.array(rows, np.int32).T.copy()
    arrays |= {"draft_len": np.array(draft_len, np.int32), "num_top": np.array(num_top, np.int32)}
    old = np.random.default_rng(53).uniform(-9, 0, (len(draft_len), num_drafts)).astype(np.float32)
    return Case(name, {**arrays, "draft_logprobs": old}, {"given": given}, len(rows) if n is None else n)


def cases() -> Iterator[Case]:
    """Named cases of `draft_logprobs`."""
    rng = np.random.default_rng(54)
    logits = spaced(rng, 4, 8)
    rows = [(2, 5), (0, 1), (3, 7), (1, 0)]
    yield _case("each_slot_files_behind_what_it_has", logits, rows, [1, 0, 2, 1], [0, 3, 1, 0])
    yield _case("some_slots_want_none", logits, rows, [1, 0, 2, 1], [0, -1, 1, -1])
    yield _case("sequences_that_are_done", logits, [(-1, 3), (1, 2), (-1, 4), (0, 6)], [1, 0], [0, 0])
    yield _case("no_draft_could_be_chosen", logits, [(0, NO_TOKEN), (1, 2), (2, NO_TOKEN), (3, 4)], [0, 1, 0, 2], [0] * 4)
    yield _case("beyond_the_launch_length", logits, rows, [1, 0, 2, 1], [0, 0, 0, 0], n=2)
    far = logits.copy()
    far[0, 5], far[1, 2:], far[2] = 80, -np.inf, far[2] - 200
    yield _case("far_apart_and_forbidden", far, rows, [0, 0, 0, 0], [0, 0, 0, 0])
    probs = np.stack([distribution(rng, 8) for _ in rows])
    drawn = [(slot, int(np.argmax(p))) for (slot, _), p in zip(rows, probs, strict=True)]
    yield _case("drawn_from_probabilities", probs, drawn, [1, 0, 2, 1], [0, 3, 1, 0], given="probs")
    certain = np.eye(8, dtype=np.float32)[:2]
    yield _case("certain_draft", certain, [(0, 0), (1, 1)], [0, 0], [0, 0], given="probs", num_drafts=1)
    yield _case("nothing_to_do", logits, rows, [1, 0, 2, 1], [0, 0, 0, 0], n=0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows for slots in random order, some without a slot or a draft."""
    size, num_drafts, vocab = (int(v) for v in rng.integers((1, 1, 2), (6, 4, 14)))
    size, num_drafts, vocab = fitted(sizes, B=several(sizes, size), K=num_drafts, V=vocab)
    given = "probs" if rng.random() < 0.5 else "logits"
    values = np.stack([distribution(rng, vocab) for _ in range(size)]) if given == "probs" else spaced(rng, size, vocab)
    slots = [int(s) if rng.random() < 0.8 else -1 for s in rng.permutation(size)]
    tokens = [int(rng.choice(np.flatnonzero(row > 0) if given == "probs" else vocab)) for row in values]
    rows = [(slot, token if rng.random() < 0.9 else NO_TOKEN) for slot, token in zip(slots, tokens, strict=True)]
    draft_len = [int(v) for v in rng.integers(num_drafts // 2 if "K" in sizes else 0, num_drafts, size)]
    num_top = [int(k) for k in rng.integers(-1, 2, size)]
    n = launched(rng, sizes, size)
    return _case("random", values, rows, draft_len, num_top, n=n, given=given, num_drafts=num_drafts)


CONTRACT = REGISTRY.add(
    Contract(
        name="draft_logprobs",
        version=1,
        unit="any",
        args=DraftLogprobsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="File the log probability of each draft beside the draft.",
        source="FastDeploy enable_draft_logprob, filed with the draft so that it stays with its round.",
        tolerance={"draft_logprobs": 4.0},
        scale=scale,
        equivalent_mutants={
            "plus(num_top)": "only its sign is read, and this leaves every sign as it is",
            "reverse-all(N)": "a row is filed by its slot, so the order of rows is free",
        },
        constraints=('given in ("logits", "probs")',),
        feature="logprobs",
        grows={"B": SLOTS, "K": DRAFTS, "V": VOCABULARY},
    )
)
