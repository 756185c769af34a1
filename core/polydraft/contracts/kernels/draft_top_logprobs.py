"""Defines `draft_top_logprobs`: files the most likely tokens of the distribution that each draft was chosen from, beside it.

The verifier launches it behind `draft_logprobs` in engines that report them; `pack_logprobs` of the next step takes them along
with the round that verifies the draft. It never files a draft itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, param, tensor
from polydraft.contracts.kernels.argmax import best_first, spaced
from polydraft.contracts.kernels.draw_draft import distribution
from polydraft.contracts.kernels.top_logprobs import log_softmax
from polydraft.contracts.sizes import DRAFTS, SLOTS, SMALL, TOP, VOCABULARY, Sizes, fitted, launched, several
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN


class DraftTopLogprobsV1(Args):
    """Arguments of `draft_top_logprobs`. A slot has at most one row and fewer than K drafts; a row whose draft is a token has no
    NaN and no +inf. Tokens are ordered by what is given of them, of equals the lower id first. `num_top` is below E; where it is
    larger than V, columns behind the vocabulary are written as if not wanted."""

    logits: Buffer = tensor("N V", "f32", "Logits that the draft was chosen from, or the probabilities it was drawn with.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    tokens: Buffer = tensor("N", "i32", "The draft of each row; NO_TOKEN: none could be chosen.")
    draft_len: Buffer = tensor("B", "i32", "Drafts that each slot has already.")
    num_top: Buffer = tensor("B", "i32", "Most likely tokens wanted beside the emitted one, by slot; -1: no log probabilities.")
    draft_top_ids: Buffer = tensor(
        "B K E", "i32", "Of each draft by slot: itself, then the most likely tokens, best first; NO_TOKEN behind those wanted.",
        access="inout",
    )  # fmt: skip
    draft_tops: Buffer = tensor(
        "B K E", "f32", "Log probability of each of those; 0 where there is none, -inf of a token that could not be drawn.",
        access="inout",
    )  # fmt: skip
    given: Literal["logits", "probs"] = param('What `logits` holds: "logits" or "probs".')


def _logs(a: Any, row: Array) -> list[float]:
    if a.given == "logits":
        return log_softmax(row)
    return [math.log(share) if share > 0 else -math.inf for share in row.tolist()]


def golden(a: Any, n: int) -> None:
    """Row by row; the columns are filed behind those of the drafts that the slot has."""
    for r, slot in enumerate(a.row_slot[:n]):
        token = a.tokens[r]
        if slot < 0 or a.num_top[slot] < 0 or token == NO_TOKEN:
            continue
        place, logs = a.draft_len[slot], _logs(a, a.logits[r])
        a.draft_top_ids[slot, place], a.draft_tops[slot, place] = NO_TOKEN, 0.0
        for column, v in enumerate([token, *best_first(a.logits[r])[: a.num_top[slot]]]):
            a.draft_top_ids[slot, place, column], a.draft_tops[slot, place, column] = v, logs[v]


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """1 + the largest finite magnitude of the row; of probabilities, 1 + that of their logarithms."""
    magnitude = np.ones((*a.draft_tops.shape[:2], 1))
    for r, slot in enumerate(a.row_slot[:n]):
        if slot >= 0 and a.num_top[slot] >= 0 and a.tokens[r] != NO_TOKEN:
            values = np.array(a.logits[r] if a.given == "logits" else _logs(a, a.logits[r]))
            magnitude[slot, a.draft_len[slot]] += np.abs(values[np.isfinite(values)]).max(initial=0.0)
    return {"draft_tops": magnitude}


Row = tuple[int, int]
"""Slot and draft of a row."""


def _case(
    name: str, values: Array, rows: Sequence[Row], draft_len: Sequence[int], num_top: Sequence[int], *, n: int | None = None,
    given: str = "logits", num_drafts: int = 3, columns: int = 4,
) -> Case:  # fmt: skip
    arrays: dict[str, Any] = {"logits": np.asarray(values, np.float32)}
    arrays["row_slot"], arrays["tokens"] = np.array(rows, np.int32).T.copy()
    arrays |= {"draft_len": np.array(draft_len, np.int32), "num_top": np.array(num_top, np.int32)}
    rng, shape = np.random.default_rng(55), (len(draft_len), num_drafts, columns)
    arrays |= {
        "draft_top_ids": rng.integers(0, 9, shape).astype(np.int32),
        "draft_tops": rng.uniform(-9, 0, shape).astype(np.float32),
    }
    return Case(name, arrays, {"given": given}, len(rows) if n is None else n)


def cases() -> Iterator[Case]:
    """Named cases of `draft_top_logprobs`."""
    rng = np.random.default_rng(56)
    logits = spaced(rng, 4, 8)
    rows = [(2, 5), (0, 1), (3, 7), (1, 0)]
    yield _case("each_slot_files_behind_what_it_has", logits, rows, [1, 0, 2, 1], [3, 3, 1, 2])
    yield _case("only_the_draft", logits, rows, [1, 0, 2, 1], [0, 0, 0, 0])
    yield _case("some_slots_want_none", logits, rows, [1, 0, 2, 1], [2, -1, 1, -1])
    yield _case("sequences_that_are_done", logits, [(-1, 3), (1, 2), (-1, 4), (0, 6)], [1, 0], [2, 3])
    yield _case("no_draft_could_be_chosen", logits, [(0, NO_TOKEN), (1, 2), (2, NO_TOKEN), (3, 4)], [0, 1, 0, 2], [1] * 4)
    yield _case("beyond_the_launch_length", logits, rows, [1, 0, 2, 1], [1, 1, 1, 1], n=2)
    ties = np.zeros((4, 8), np.float32)
    ties[0, [2, 5, 6]], ties[1, [1, 4]], ties[2] = 2.0, -3.0, -1.5
    for k in (1, 2, 3):
        yield _case(f"lower_ids_first_among_equals_for_{k}", ties, rows, [0, 0, 0, 0], [k] * 4)
    far = logits.copy()
    far[0, 5], far[1, 2:], far[2] = 80, -np.inf, far[2] - 200
    yield _case("far_apart_and_forbidden", far, rows, [0, 0, 0, 0], [3, 3, 3, 3])
    yield _case("more_than_the_vocabulary", logits[:2, :2].copy(), [(0, 1), (1, 0)], [1, 0], [3, 2], columns=6)
    probs = np.stack([distribution(rng, 8) for _ in rows])
    drawn = [(slot, int(np.argmax(p))) for (slot, _), p in zip(rows, probs, strict=True)]
    yield _case("drawn_from_probabilities", probs, drawn, [1, 0, 2, 1], [2, 3, 1, 0], given="probs")
    certain = np.eye(8, dtype=np.float32)[:2]
    yield _case("certain_draft", certain, [(0, 0), (1, 1)], [0, 0], [3, 2], given="probs", num_drafts=1)
    yield _case("more_columns_than_a_tile", spaced(rng, 2, 1030), [(0, 1029), (1, 512)], [0, 1], [6, 7], columns=8)
    yield _case("nothing_to_do", logits, rows, [1, 0, 2, 1], [1, 1, 1, 1], n=0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random rows for slots in random order, some without a slot or a draft."""
    size, num_drafts, vocab, columns = (int(v) for v in rng.integers((1, 1, 2, 1), (6, 4, 14, 5)))
    size, num_drafts, columns = fitted(sizes, B=several(sizes, size), K=num_drafts, E=columns)
    (vocab,) = fitted(sizes, V=max(vocab, columns))
    given = "probs" if rng.random() < 0.5 and "V" not in sizes else "logits"
    values = np.stack([distribution(rng, vocab) for _ in range(size)]) if given == "probs" else spaced(rng, size, vocab)
    slots = [int(s) if rng.random() < 0.8 else -1 for s in rng.permutation(size)]
    tokens = [int(rng.choice(np.flatnonzero(row > 0) if given == "probs" else vocab)) for row in values]
    rows = [(slot, token if rng.random() < 0.9 else NO_TOKEN) for slot, token in zip(slots, tokens, strict=True)]
    draft_len = [int(v) for v in rng.integers(num_drafts // 2 if "K" in sizes else 0, num_drafts, size)]
    num_top = [int(k) for k in rng.integers(-1, columns, size)]
    if sizes:
        rows[0], num_top[-1] = (size - 1, tokens[0] if given == "probs" else vocab - 1), columns - 1
        rows[1:] = [(-1, token) if slot == size - 1 else (slot, token) for slot, token in rows[1:]]
    n = launched(rng, sizes, size)
    return _case("random", values, rows, draft_len, num_top, n=n, given=given, num_drafts=num_drafts, columns=columns)


CONTRACT = REGISTRY.add(
    Contract(
        name="draft_top_logprobs",
        version=1,
        unit="any",
        args=DraftTopLogprobsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="File the most likely tokens of the distribution of each draft beside the draft.",
        source="FastDeploy enable_draft_logprob (message flag 4), of every draft of a round instead of the first.",
        tolerance={"draft_tops": 4.0},
        scale=scale,
        equivalent_mutants={"reverse-all(N)": "a row is filed by its slot, so the order of rows is free"},
        constraints=('given in ("logits", "probs")',),
        feature="logprobs",
        grows={"B": SLOTS, "K": DRAFTS, "V": VOCABULARY, "E": TOP},
    )
)
