"""Defines `align_drafts`: drafts taken from a guess that the host made before this step's tokens were known.

A proposer that drafts on the host launches it behind `begin_draft`. The guess runs on from a text that the step has made longer
meanwhile; where the new tokens are those of the guess, what follows them in it are the drafts, and elsewhere there are none. It
never runs a model and leaves slots alone that do not draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.sizes import CONTEXT, DRAFTS, SLOTS, SMALL, TABLE, Sizes, fitted
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT


class AlignDraftsV1(Args):
    """Arguments of `align_drafts`. Launch length: sequences. With known = prompt_len + num_generated, the guess says the tokens
    at positions guess_start to guess_start + guess_len - 1, and it holds when known is at least guess_start and its tokens
    before position known are the text's. Only then the next ones are drafts."""

    draft_slot: Buffer = tensor("B", "i32", "Slot that drafts, by sequence; PAD_SLOT: this sequence does not draft.")
    draft_budget: Buffer = tensor("B", "i32", "Drafts it may make, by sequence.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far, by slot.")
    tokens: Buffer = tensor("B L", "i32", "History by slot; places at or beyond known hold anything.")
    guess: Buffer = tensor("B G", "i32", "Guessed tokens by sequence; places at or beyond guess_len hold anything.")
    guess_start: Buffer = tensor("B", "i32", "Position of the first guessed token, by sequence.")
    guess_len: Buffer = tensor("B", "i32", "Guessed tokens, by sequence; 0 for none.")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot, emptied before; the first draft_len are written.", access="inout")
    draft_len: Buffer = tensor("B", "i32", "Drafts taken by slot: budget, or fewer where the guess ends first.", access="inout")


def golden(a: Any, n: int) -> None:
    """Compare what both know, then copy."""
    for i in range(n):
        slot = a.draft_slot[i]
        if slot < 0:
            continue
        known = a.prompt_len[slot] + a.num_generated[slot]
        text = [int(token) for token in a.tokens[slot, :known]]
        guess = [int(token) for token in a.guess[i, : a.guess_len[i]]]
        new = known - a.guess_start[i]
        found = guess[new : new + a.draft_budget[i]] if new >= 0 and guess[:new] == text[known - new :] else []
        for j, token in enumerate(found):
            a.drafts[slot, j] = token
        a.draft_len[slot] = len(found)


@dataclass(frozen=True)
class Guess:
    """One slot of a case: its known tokens, the guess from position `start` on, the budget, and whether it drafts."""

    known: tuple[int, ...]
    start: int
    guess: tuple[int, ...]
    generated: int = 1
    budget: int = 3
    drafts: bool = True


def _case(
    name: str, guesses: Sequence[Guess], *, order: Sequence[int] | None = None, n: int | None = None, num_drafts: int = 4
) -> Case:
    order = list(range(len(guesses))) if order is None else list(order)
    guesses = [*guesses, *[Guess((0,), 0, (), drafts=False)] * (len(order) - len(guesses))]  # as many slots as sequences
    order += [PAD_SLOT] * (len(guesses) - len(order))
    slots, width = len(guesses), max(len(g.guess) for g in guesses) + 1
    tokens = np.full((slots, max(len(g.known) for g in guesses) + 2), 7, np.int32)  # what lies beyond looks like text
    said = np.full((slots, width), 7, np.int32)
    starts, lens = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    for slot, guess in enumerate(guesses):
        tokens[slot, : len(guess.known)] = guess.known
    for i, slot in enumerate(order):
        if slot >= 0:
            said[i, : len(guesses[slot].guess)], starts[i] = guesses[slot].guess, guesses[slot].start
            lens[i] = len(guesses[slot].guess)
    active = [slot if slot >= 0 and guesses[slot].drafts else PAD_SLOT for slot in order]
    arrays = {
        "draft_slot": active,
        "draft_budget": [guesses[slot].budget if slot >= 0 else 0 for slot in active],
        "prompt_len": [len(g.known) - g.generated for g in guesses],
        "num_generated": [g.generated for g in guesses],
        "draft_len": [0] * slots,
        "guess_start": starts,
        "guess_len": lens,
    }
    drafts = np.full((slots, num_drafts), NO_TOKEN, np.int32)
    every = {key: np.array(value, np.int32) for key, value in arrays.items()}
    return Case(name, {**every, "tokens": tokens, "guess": said, "drafts": drafts}, {}, len(order) if n is None else n)


def cases() -> Iterator[Case]:
    """Named cases of `align_drafts`."""
    yield _case("nothing_to_do", [Guess((1, 2), 2, (3,))], n=0)
    yield _case("nothing_new", [Guess((1, 2), 2, (3, 4, 5, 6))])
    yield _case("two_tokens_as_guessed", [Guess((1, 2, 3, 4), 2, (3, 4, 5, 6))])
    yield _case("another_token_than_guessed", [Guess((1, 2, 3, 9), 2, (3, 4, 5, 6)), Guess((1, 2, 8, 4), 2, (3, 4, 5, 6))])
    yield _case("the_guess_is_used_up", [Guess((1, 2, 3), 2, (3,)), Guess((1, 2, 3, 4), 2, (3,)), Guess((1, 2, 3, 7), 2, (3,))])
    yield _case("the_guess_ends_before_the_budget", [Guess((5, 6, 7), 2, (7, 7), budget=4)])
    yield _case("budget_cuts", [Guess((1,), 1, (2, 3, 4, 5), budget=2), Guess((1,), 1, (2, 3, 4, 5), budget=1)])
    yield _case("no_guess", [Guess((1, 2, 7), 2, ()), Guess((1, 2), 2, ())])
    yield _case("a_guess_from_behind_the_text", [Guess((1, 2), 3, (7, 7)), Guess((1, 2), 5, (7, 7, 7))])
    yield _case("a_guess_of_the_whole_text", [Guess((1, 2), 0, (1, 2, 3), generated=2), Guess((1, 2), 0, (2, 2, 3))])
    yield _case("the_prompt_counts", [Guess((1, 2, 3), 1, (2, 3, 4), generated=0), Guess((4, 5, 6), 2, (6, 9), generated=2)])
    yield _case(
        "idle_sequences_between_drafting_ones",
        [
            Guess((1, 2, 1), 2, (1, 5)),
            Guess((3, 4, 3), 2, (3, 6), drafts=False),
            Guess((5, 6, 5), 2, (5, 8, 9), generated=2),
            Guess((8, 9, 8), 2, (9, 1)),
        ],
        order=[2, PAD_SLOT, 1, 0, PAD_SLOT, 3],
        n=5,
    )


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random texts over few tokens, most guesses right at first; some slots idle, launch order shuffled."""
    num_drafts, count = fitted(sizes, K=4, B=int(rng.integers(1, 6)) + 1)
    longest, widest = max(sizes.get("L", 0) - 2, 2 * sizes.get("G", 20)), sizes.get("G", num_drafts + 4) - 1
    guesses = []
    for i in range(count - 1):
        text = tuple(int(t) for t in rng.integers(0, 3, rng.integers(2, 12)))
        known, start, most = int(rng.integers(1, len(text) + 1)), int(rng.integers(0, len(text))), int(rng.integers(0, 7))
        if sizes and i in (0, count - 2):  # those that are as long as was asked
            text = tuple(int(t) for t in rng.integers(0, 200_000, longest + widest))
            known, start, most = longest, longest - max(widest // 2 if "G" in sizes else 1, widest - num_drafts), widest
        guess = [t if rng.random() < 0.9 or start > 12 else 2 - t for t in text[start : start + most]]
        budget, drafts = int(rng.integers(1, num_drafts + 1)), bool(rng.random() < 0.8)
        if sizes and i in (0, count - 2):
            budget, drafts = num_drafts, True
        guesses.append(Guess(text[:known], start, tuple(guess), int(rng.integers(0, known)), budget, drafts))
    order = [int(slot) for slot in rng.permutation(len(guesses))] + [PAD_SLOT]
    return _case("random", guesses, order=order, n=len(guesses) + int(rng.integers(0, 2)), num_drafts=num_drafts)


CONTRACT = REGISTRY.add(
    Contract(
        name="align_drafts",
        version=1,
        unit="seqs",
        args=AlignDraftsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Draft what follows in a guess of the host, where the guess has held so far.",
        source="Own: drafts from the host without a wait, as suffix decoding (Oliaro et al. 2024) makes them.",
        equivalent_mutants={"swap(prompt_len,num_generated)": "only their sum is used"},
        feature="drafting",
        grows={"B": SLOTS, "K": DRAFTS, "L": CONTEXT, "G": TABLE},
    )
)
