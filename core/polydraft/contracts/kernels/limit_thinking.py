"""Defines `limit_thinking`: what a row may choose where the length of thinking and of the reply are limited.

The step program launches it last before a token is chosen, in steps of which some request wants processing, for target and draft
rows alike. Each row knows where thinking stands from the committed state (`commit_thinking`) and the drafts before it, so no
draft behind a limit is ever accepted, and nothing is cut off afterwards.
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
from polydraft.sentinels import NO_LIMIT, NO_TOKEN, THINKING

SYMBOLS = {"TE": "tokens that end thinking", "TF": "tokens spelt out at its limit", "RS": "tokens that a reply may begin with"}


class LimitThinkingV1(Args):
    """Arguments of `limit_thinking`. The text of a row is the one of `penalise_logits`; limits and places count generated tokens.

    A slot thinks while its `reply_from` is -1, up to the first place at most `think_limit` whose tokens before it end with
    `think_end`; or else through `think_limit` tokens and those of `think_forced` behind them. `reply_from` is never larger than
    `num_generated`. Where a slot has limits for its reply, its first stop token is a token.
    """

    logits: Buffer = tensor(
        "N V", "f32", "Logits; those of tokens that are not allowed become -inf, a forced token's too low one becomes 0.",
        access="inout",
    )  # fmt: skip
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    positions: Buffer = tensor("N", "i32", "Absolute position of each row in its slot's text.")
    tokens: Buffer = tensor("B L", "i32", "Token history by slot.")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far by slot.")
    reply_from: Buffer = tensor("B", "i32", "Place of the reply's first token by slot; -1: it thinks.")
    think_limit: Buffer = tensor("B", "i32", "Tokens of thinking at most by slot; -1: any number.")
    reply_limit: Buffer = tensor("B", "i32", "Tokens of the reply at most by slot, before a stop token; -1: any number.")
    reply_starts: Buffer = tensor("B RS", "i32", "Tokens that the reply may begin with, by slot.")
    num_reply_starts: Buffer = tensor("B", "i32", "Places of `reply_starts` in use, by slot; 0: any token.")
    stop_tokens: Buffer = tensor("B S", "i32", "Tokens that end the request, by slot; the first one is forced behind the reply.")
    think_end: Buffer = tensor("TE", "i32", "Tokens that end thinking.")
    think_forced: Buffer = tensor("TF", "i32", "Tokens that are spelt out where thinking reaches its limit.")
    ahead: int = param("Added to positions: how far the chosen token lies after the row.")


def reply_begins(generated: Sequence[int], beyond: int, limit: int, end: Sequence[int], num_forced: int) -> int:
    """The place where the reply begins behind more than `beyond` tokens of `generated`; -1 where these still think."""
    for place in range(beyond + 1, len(generated) + 1):
        ends = place >= len(end) and list(generated[place - len(end) : place]) == list(end)
        if place == limit + num_forced if limit != NO_LIMIT and place > limit else ends:
            return place
    return THINKING


def golden(a: Any, n: int) -> None:
    """Find out where the row stands, then allow one token, some, or all."""
    for r in range(n):
        slot = a.row_slot[r]
        if slot < 0:
            continue
        generated, limit, reply = text(a, r)[1], a.think_limit[slot], a.reply_from[slot]
        place = len(generated)
        if reply == THINKING:
            reply = reply_begins(generated, a.num_generated[slot], limit, a.think_end, len(a.think_forced))
        if reply == THINKING:
            if limit != NO_LIMIT and place >= limit:
                _force(a.logits[r], a.think_forced[place - limit])
        elif a.reply_limit[slot] != NO_LIMIT and place >= reply + a.reply_limit[slot]:
            _force(a.logits[r], a.stop_tokens[slot, 0])
        elif place == reply and a.num_reply_starts[slot]:
            starts = a.reply_starts[slot, : a.num_reply_starts[slot]]
            for v in range(a.logits.shape[1]):
                if v not in starts:
                    a.logits[r, v] = -np.inf


def _force(row: Any, token: int) -> None:
    """Leave one token, whatever forbade it before; a NaN stays."""
    own = row[token]
    row[:] = -np.inf
    row[token] = 0.0 if own == -np.inf else own


@dataclass(frozen=True, kw_only=True)
class Thought(Text):
    """One slot of a case: its text and its limits."""

    reply_from: int = THINKING
    limit: int = NO_LIMIT
    reply: int = NO_LIMIT
    starts: tuple[int, ...] = ()
    stop: tuple[int, ...] = (7, 2)


END, FORCED = (4, 5), (6, 4, 5, 8)
"""What ends thinking, and what is spelt out at its limit, in named cases."""


def thought_arrays(slots: Sequence[Thought], end: Sequence[int], forced: Sequence[int]) -> dict[str, Array]:
    """The limits in the state. Behind what a slot may begin its reply with lie tokens of the slot's last request."""
    width = 1 + max(len(s.starts) for s in slots)
    lines = {
        "reply_from": [s.reply_from for s in slots],
        "think_limit": [s.limit for s in slots],
        "reply_limit": [s.reply for s in slots],
        "reply_starts": [[*s.starts, *[(i + 1) % 9] * (width - len(s.starts))] for i, s in enumerate(slots)],
        "num_reply_starts": [len(s.starts) for s in slots],
        "think_end": end,
        "think_forced": forced,
    }
    return {name: np.array(values, np.int32) for name, values in lines.items()}


def _case(
    name: str, slots: Sequence[Thought], rows: Sequence[tuple[int, int]], n: int | None = None, *, ahead: int = 0,
    vocab: int = 9, end: Sequence[int] = END, forced: Sequence[int] = FORCED, logits: Array | None = None,
) -> Case:  # fmt: skip
    if logits is None:
        logits = np.random.default_rng(33).normal(0, 2, (len(rows), vocab)).astype(np.float32)
    stops = 1 + max(len(s.stop) for s in slots)
    arrays = {"logits": logits, **text_arrays(slots, rows, ahead=ahead, vocab=vocab), **thought_arrays(slots, end, forced)}
    arrays["stop_tokens"] = np.array([[*s.stop, *[NO_TOKEN] * (stops - len(s.stop))] for s in slots], np.int32)
    return Case(name, arrays, {"ahead": ahead}, len(rows) if n is None else n)


WINDOW = [(0, 0), (0, 1), (0, 2), (0, 3)]
"""Rows of a whole window of three drafts."""


def cases() -> Iterator[Case]:
    """Named cases of `limit_thinking`."""
    yield _case("limit_is_reached_by_the_drafts", [Thought(limit=3, drafts=(1, 1, 6))], WINDOW)
    yield _case(
        "forced_tokens_go_on_where_the_history_has_them", [Thought(generated=(3, 6, 4), limit=1, drafts=(5, 8, 1))], WINDOW
    )
    yield _case("end_among_the_drafts", [Thought(limit=9, reply=1, starts=(2, 8), drafts=(4, 5, 8))], WINDOW)
    yield _case("end_begins_in_the_history", [Thought(generated=(1, 4), limit=9, starts=(3,), drafts=(5, 3, 3))], WINDOW)
    yield _case("end_exactly_at_the_limit", [Thought(limit=3, starts=(3, 0), drafts=(4, 5, 3))], WINDOW)
    yield _case(
        "end_behind_the_limit_does_not_count", [Thought(generated=(1, 4), limit=2, starts=(3,), drafts=(5, 4, 5))], WINDOW
    )
    yield _case(
        "end_in_the_prompt_does_not_count", [Thought(prompt=(1, 4), generated=(5,), starts=(3,), drafts=(5, 1, 1))], WINDOW
    )
    yield _case("end_that_breaks_off", [Thought(limit=9, starts=(3,), drafts=(4, 4, 5))], WINDOW)
    yield _case("end_in_the_history_is_over", [Thought(generated=(4, 5), limit=4, drafts=(1, 2, 3), starts=(3,))], WINDOW)
    yield _case(
        "reply_begins_behind_the_forced_tokens",
        [Thought(generated=(6, 4), limit=0, reply=1, starts=(1, 3), drafts=(5, 8, 3))],
        WINDOW,
    )
    yield _case("no_thinking_at_all", [Thought(generated=(), limit=0, drafts=(6, 4, 5))], WINDOW)
    yield _case("reply_reaches_its_limit", [Thought(reply_from=0, reply=3, drafts=(1, 1, 1))], WINDOW)
    yield _case("reply_of_no_tokens", [Thought(limit=9, reply=0, starts=(3,), drafts=(4, 5, 7))], WINDOW)
    yield _case(
        "reply_that_has_begun_is_free", [Thought(reply_from=1, generated=(4, 5), limit=2, starts=(3,), drafts=(4, 5, 1))], WINDOW
    )
    yield _case("reply_begins_with_the_first_row", [Thought(reply_from=1, starts=(3, 0, 8), drafts=(3, 3, 3))], WINDOW)
    yield _case("thinks_without_a_limit", [Thought(reply=2, drafts=(4, 5, 1)), Thought(drafts=(4, 5, 1))], [*WINDOW, (1, 2)])
    yield _case("one_token_ends_and_is_forced", [Thought(limit=2, starts=(1,), drafts=(3, 4, 1))], WINDOW, end=(4,), forced=(4,))
    forbidden = np.full((4, 9), -np.inf, np.float32)
    forbidden[:, 2], forbidden[1, 4], forbidden[3] = 1.5, np.nan, np.nan
    yield _case(
        "forced_tokens_were_forbidden_before", [Thought(generated=(), limit=0, drafts=(6, 4, 5))], WINDOW, logits=forbidden
    )
    several = [
        Thought(reply_from=0), Thought(limit=2, drafts=(4, 1)), Thought(reply_from=0, reply=1),
        Thought(starts=(8, 2), generated=(1, 4), drafts=(5,), stop=(3,)),
    ]  # fmt: skip
    order = [(3, 0), (3, 1), (-9, 0), (2, 0), (1, 0), (1, 1), (1, 2), (0, 0), (3, 1)]
    yield _case("slots_with_and_without_limits", several, order, 8)
    yield _case("rows_of_a_draft_pass", several, [(1, 1), (3, 1), (2, 0)], ahead=2)
    yield _case("nothing_to_do", several, order, 0)


def random_thought(rng: np.random.Generator, vocab: int, drafts: int, end: Sequence[int], forced: Sequence[int]) -> Thought:
    """A slot whose text is made of the ends of thinking and a few tokens, at any place of its state machine."""

    def tokens(least: int, most: int) -> tuple[int, ...]:
        parts = [list(end), list(forced), [int(rng.integers(0, vocab))], [int(rng.integers(0, vocab))]]
        some = [token for _ in range(most) for token in parts[rng.integers(0, 4)]]
        return tuple(some[: rng.integers(least, most + 1)])

    slot = Thought(
        prompt=tokens(1, 3), generated=tokens(0, 5), drafts=tokens(0, drafts), limit=int(rng.integers(-1, 6)),
        reply=int(rng.integers(-1, 4)), starts=tuple(int(v) for v in rng.integers(0, vocab, rng.integers(0, 3))),
        stop=tuple(int(v) for v in rng.integers(0, vocab, rng.integers(1, 3))),
    )  # fmt: skip
    return (
        following(slot, end, forced)
        if rng.random() < 0.8
        else replace(slot, reply_from=int(rng.integers(0, len(slot.generated) + 1)))
    )


def following(slot: Thought, end: Sequence[int], forced: Sequence[int]) -> Thought:
    """The slot with what it has generated already told to its state."""
    generated = list(slot.generated)
    if slot.limit != NO_LIMIT and reply_begins(generated[: slot.limit], 0, slot.limit, end, len(forced)) == THINKING:
        generated[slot.limit :] = [*forced, *generated[slot.limit + len(forced) :]][: max(len(generated) - slot.limit, 0)]
    return replace(slot, generated=tuple(generated), reply_from=reply_begins(generated, 0, slot.limit, end, len(forced)))


def random_ends(rng: np.random.Generator, sizes: Sizes, vocab: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What ends thinking, and what is spelt out at its limit."""
    ends, more = (int(v) for v in rng.integers((1, 0), (3, 3)))
    ends = sizes.get("TE", 2 if "L" in sizes else ends)
    forced = sizes.get("TF", ends + more)
    end, others = ([int(v) for v in rng.integers(0, vocab, count)] for count in (ends, forced))
    return tuple(end), tuple([*others, *end][-forced:] if forced > ends else others)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random texts over few tokens; some rows without a slot."""
    size, vocab, ahead = (int(v) for v in rng.integers((1, 4, 0), (4, 7, 3)))
    size, vocab, most_drafts = fitted(sizes, B=size, V=vocab, K=4)
    end, forced = random_ends(rng, sizes, vocab)
    slots = [random_thought(rng, vocab, most_drafts - 1, end, forced) for _ in range(size)]
    if sizes:  # a long text whose drafts end its thinking
        thinks = replace(slots[0], reply_from=THINKING, limit=NO_LIMIT, reply=NO_LIMIT, starts=(vocab - 1,))
        slot = as_long(rng, replace(thinks, drafts=thinks.drafts or (0,)), sizes, vocab)
        whole, other = [*slot.generated, *slot.drafts], (end[-1] + 1) % vocab
        whole = [other if token == end[-1] else token for token in whole[: max(len(whole) - len(end), 0)]] + list(end)
        known = len(whole) - 1 if "L" in sizes else min(len(slot.generated), len(whole) - 1)
        slots[0] = replace(slot, generated=tuple(whole[:known]), drafts=tuple(whole[known:]))
    if "TF" in sizes:  # and one that has come to the last tokens at its limit
        before = slots[0].generated
        slots[0] = replace(slots[0], limit=len(before), generated=(*before, *forced[:-1]))
    if "RS" in sizes:
        starts = tuple(int(v) for v in rng.integers(0, vocab - 1, sizes["RS"] - 1))
        slots[0] = replace(slots[0], reply_from=len(slots[0].generated), starts=starts)
    rows = windows(rng, slots, sizes)
    least = min(len(slots[0].drafts) + 1, len(rows)) if sizes else 1  # so that the row behind the end of thinking is among them
    n = launched(rng, sizes, len(rows), least=least)
    return _case("random", slots, rows, n, ahead=ahead, vocab=vocab, end=end, forced=forced)


CONTRACT = REGISTRY.add(
    Contract(
        name="limit_thinking",
        version=1,
        unit="any",
        args=LimitThinkingV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Force what ends thinking and the reply at their limits, and allow but some tokens where the reply begins.",
        source="FastDeploy speculate_limit_thinking_content_length, reasoning_phase_token_constraint; vLLM's thinking budget.",
        equivalent_mutants={
            "unpad(stop_tokens)": "of a slot whose reply has a limit the first one is a token, and no other is read"
        },
        feature="thinking",
        symbols=SYMBOLS,
        grows={
            "N": ROWS,
            "B": SLOTS,
            "K": DRAFTS,
            "L": CONTEXT,
            "V": VOCABULARY,
            "RS": TABLE,
            "TE": DRAFTS,
            "TF": DRAFTS,
        },
        independent=("N",),
    )
)
