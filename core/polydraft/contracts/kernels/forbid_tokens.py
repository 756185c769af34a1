"""Defines `forbid_tokens`: takes out of a row what the request does not allow next: early stop tokens, ends of bad words.

The step program launches it last before a token is chosen, in steps of which some request wants processing, for target and
draft rows alike. It never looks at more of the text than was generated before the row's own token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, param, tensor
from polydraft.contracts.kernels.penalise_logits import Text, as_long, text, text_arrays, windows
from polydraft.contracts.sizes import CONTEXT, DRAFTS, ROWS, SLOTS, SMALL, TABLE, VOCABULARY, Sizes, fitted, launched
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN


class ForbidTokensV1(Args):
    """Arguments of `forbid_tokens`. The text of a row is the one of `penalise_logits`."""

    logits: Buffer = tensor("N V", "f32", "Logits; a forbidden token's becomes -inf.", access="inout")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    positions: Buffer = tensor("N", "i32", "Absolute position of each row in its slot's text.")
    tokens: Buffer = tensor("B L", "i32", "Token history by slot.")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far by slot.")
    min_tokens: Buffer = tensor("B", "i32", "Tokens to generate before a stop token may come, by slot.")
    stop_tokens: Buffer = tensor("B S", "i32", "Tokens that end the request, by slot; NO_TOKEN in unused places.")
    bad_words: Buffer = tensor("B X", "i32", "Runs of tokens that may not be generated, by slot; NO_TOKEN behind each.")
    bad_len: Buffer = tensor("B", "i32", "Places of `bad_words` in use, by slot.")
    ahead: int = param("Added to positions: how far the chosen token lies after the row.")


def words(places: Sequence[int]) -> Iterator[list[int]]:
    """Split a table of words, each of at least one token, at the NO_TOKEN behind each."""
    word: list[int] = []
    for token in places:
        if token == NO_TOKEN:
            yield word
            word = []
        else:
            word.append(int(token))


def golden(a: Any, n: int) -> None:
    """A stop token may not come too early, the last token of a bad word not behind the others."""
    for r in range(n):
        slot = a.row_slot[r]
        if slot < 0:
            continue
        generated = text(a, r)[1]
        if len(generated) < a.min_tokens[slot]:
            for token in a.stop_tokens[slot]:
                if token != NO_TOKEN:
                    a.logits[r, token] = -np.inf
        for word in words(a.bad_words[slot, : a.bad_len[slot]]):
            beginning = word[:-1]
            if generated[len(generated) - len(beginning) :] == beginning and len(beginning) <= len(generated):
                a.logits[r, word[-1]] = -np.inf


@dataclass(frozen=True, kw_only=True)
class Rules(Text):
    """One slot of a case: its text and what is forbidden."""

    stop: tuple[int, ...] = ()
    least: int = 0
    bad: tuple[tuple[int, ...], ...] = ()


def _case(
    name: str, slots: Sequence[Rules], rows: Sequence[tuple[int, int]], n: int | None = None, *, ahead: int = 0,
    vocab: int = 9,
) -> Case:  # fmt: skip
    tables = [[token for word in s.bad for token in (*word, NO_TOKEN)] for s in slots]
    places, stops = 1 + max(len(t) for t in tables), 1 + max(len(s.stop) for s in slots)
    stale = [(2, NO_TOKEN, 4, NO_TOKEN)[i % 4] for i in range(places)]  # words of the slot's last request
    lines = {
        "min_tokens": [s.least for s in slots],
        "stop_tokens": [[*s.stop, *[NO_TOKEN] * (stops - len(s.stop))] for s in slots],
        "bad_words": [[*table, *stale[len(table) :]] for table in tables],
        "bad_len": [len(table) for table in tables],
    }
    arrays: dict[str, Array] = {"logits": np.random.default_rng(32).normal(0, 2, (len(rows), vocab)).astype(np.float32)}
    arrays |= text_arrays(slots, rows, ahead=ahead, vocab=vocab)
    arrays |= {name: np.array(values, np.int32) for name, values in lines.items()}
    return Case(name, arrays, {"ahead": ahead}, len(rows) if n is None else n)


WINDOW = [(0, 0), (0, 1), (0, 2), (0, 3)]
"""Rows of a whole window of three drafts."""


def cases() -> Iterator[Case]:
    """Named cases of `forbid_tokens`."""
    yield _case("one_token_is_never_allowed", [Rules(bad=((5,), (0,)), drafts=(1, 2, 3))], WINDOW)
    yield _case("word_of_two_behind_the_history", [Rules(bad=((3, 5),), drafts=(4, 3, 8))], WINDOW)
    yield _case("word_begins_in_the_history_and_goes_on_in_the_drafts", [Rules(bad=((3, 4, 6),), drafts=(4, 6, 3))], WINDOW)
    yield _case("word_of_drafts_alone", [Rules(bad=((6, 7, 8),), drafts=(6, 7, 8))], WINDOW)
    yield _case("prompt_is_not_output", [Rules(bad=((2, 5), (2, 3, 6)), generated=(), drafts=(3, 2, 3))], WINDOW)
    yield _case("word_longer_than_the_output", [Rules(bad=((1, 3, 5), (3, 3, 3, 3, 3, 3)), drafts=(3, 3, 3))], WINDOW)
    yield _case("repeated_token_of_a_word", [Rules(bad=((3, 3, 4),), generated=(3, 3, 3), drafts=(3, 4, 3))], WINDOW)
    yield _case("stop_tokens_wait_for_their_time", [Rules(stop=(7, 0), least=3, drafts=(4, 4, 4))], WINDOW)
    yield _case("stop_tokens_whose_time_has_come", [Rules(stop=(7,), least=1, drafts=(4, 4, 4))], WINDOW)
    yield _case("first_token_may_not_stop", [Rules(stop=(7,), least=1, generated=()), Rules(stop=(8,))], [(0, 0), (1, 0)])
    several = [
        Rules(), Rules(bad=((4, 1),), drafts=(4, 1), stop=(6, 5), least=2), Rules(bad=((2,), (3, 8))),
        Rules(stop=(2,), least=9, drafts=(1,)),
    ]  # fmt: skip
    order = [(3, 0), (3, 1), (-9, 0), (2, 0), (1, 0), (1, 1), (1, 2), (0, 0), (3, 0)]
    yield _case("slots_with_and_without_rules", several, order, 8)
    yield _case("rows_of_a_draft_pass", several, [(1, 1), (3, 1), (2, 0)], ahead=2)
    yield _case("nothing_to_do", several, order, 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random texts over few tokens and short words of the same tokens; some rows without a slot."""
    size, vocab, ahead = (int(v) for v in rng.integers((1, 2, 0), (4, 5, 3)))
    size, vocab, most_drafts = fitted(
        sizes, B=size, V=max(vocab, 64 if sizes else 0, *(4 * sizes.get(table, 0) for table in "SX")), K=4
    )

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(int(v) for v in rng.integers(0, vocab, rng.integers(least, most + 1)))

    slots = [
        Rules(
            prompt=tokens(1, 3), generated=tokens(0, 4), drafts=tokens(0, most_drafts - 1), stop=tokens(0, 2),
            least=int(rng.integers(0, 6)),
            bad=tuple(tokens(1, 3) for _ in range(rng.integers(0, 4))),
        )
        for _ in range(size)
    ]  # fmt: skip
    if sizes:  # a word that its text has begun, and the last token
        slots[0] = as_long(rng, replace(slots[0], generated=slots[0].generated or (1,)), sizes, vocab)
        begun = [(last[-1], 0) for last in (slots[0].generated, slots[0].drafts) if last]
        slots[0] = replace(slots[0], bad=(*begun, (vocab - 1,)))
    if "S" in sizes:
        slots[0] = replace(slots[0], stop=tuple(int(v) for v in rng.integers(0, vocab, sizes["S"] - 1)), least=9)
    if "X" in sizes:  # words of one to three tokens, to the last place but one
        lengths = [int(rng.integers(1, 4)) for _ in range(sizes["X"] // 4)]
        left = sizes["X"] - 1 - sum(lengths) - len(lengths)
        lengths += [1 + left % 2, *[1] * (left // 2 - 1)]
        slots[0] = replace(slots[0], bad=tuple(tokens(length, length) for length in lengths))
    rows = windows(rng, slots, sizes)
    return _case("random", slots, rows, launched(rng, sizes, len(rows)), ahead=ahead, vocab=vocab)


CONTRACT = REGISTRY.add(
    Contract(
        name="forbid_tokens",
        version=1,
        unit="any",
        args=ForbidTokensV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Forbid stop tokens before their time, and what would complete a bad word.",
        source="min_tokens and bad_words of vLLM; FastDeploy min_dec_len and bad_tokens.",
        feature="processing",
        grows={"N": ROWS, "B": SLOTS, "K": DRAFTS, "L": CONTEXT, "V": VOCABULARY, "S": TABLE, "X": TABLE},
        independent=("N",),
    )
)
