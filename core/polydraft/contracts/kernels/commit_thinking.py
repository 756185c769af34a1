"""Defines `commit_thinking`: notes where thinking has ended within the tokens that a step has committed.

The step program launches it behind `commit_window`, in steps of which some request wants processing. It is all that is kept of
thinking between steps; `limit_thinking` adds the drafts before each row. Like the commit it is never taken back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, param, tensor
from polydraft.contracts.kernels.limit_thinking import (
    END,
    FORCED,
    SYMBOLS,
    Thought,
    random_ends,
    random_thought,
    reply_begins,
    thought_arrays,
)
from polydraft.contracts.kernels.penalise_logits import as_long, text_arrays
from polydraft.contracts.sizes import CONTEXT, DRAFTS, SLOTS, SMALL, WINDOW, Sizes, fitted, launched
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT, THINKING


class CommitThinkingV1(Args):
    """Arguments of `commit_thinking`. Launch length: sequences. What ends thinking is said by `limit_thinking`.

    `num_generated` counts the tokens that the step has committed already; in the history they are the last ones."""

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    out_tokens: Buffer = tensor("B W", "i32", "Tokens that the step has committed, by sequence.")
    out_len: Buffer = tensor("B", "i32", "Number of tokens that the step has committed, by sequence.")
    tokens: Buffer = tensor("B L", "i32", "Token history by slot.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far by slot.")
    think_limit: Buffer = tensor("B", "i32", "Tokens of thinking at most by slot; -1: any number.")
    think_end: Buffer = tensor("TE", "i32", "Tokens that end thinking.")
    reply_from: Buffer = tensor(
        "B", "i32", "Place of the reply's first token by slot, among generated ones; -1: it thinks.", access="inout"
    )
    num_forced: int = param("How many tokens are spelt out where thinking reaches its limit.")


def golden(a: Any, n: int) -> None:
    """Of each sequence that thinks, look behind each new token."""
    for i, slot in enumerate(a.slot_order[:n]):
        if slot < 0 or a.out_len[i] == 0 or a.reply_from[slot] != THINKING:
            continue
        begin, known = a.prompt_len[slot], a.num_generated[slot] - a.out_len[i]
        generated = [*a.tokens[slot, begin : begin + known].tolist(), *a.out_tokens[i, : a.out_len[i]].tolist()]
        a.reply_from[slot] = reply_begins(generated, known, a.think_limit[slot], a.think_end, a.num_forced)


Seq = tuple[int, int]
"""Slot of a sequence, and its new tokens, the last ones of the slot's text."""


def _case(
    name: str, slots: Sequence[Thought], seqs: Sequence[Seq], n: int | None = None, *, end: Sequence[int] = END,
    forced: Sequence[int] = FORCED, vocab: int = 9, width: int = 1,
) -> Case:  # fmt: skip
    seqs = [*seqs, *[(PAD_SLOT, 0)] * (len(slots) - len(seqs))]
    state = {**text_arrays(slots, [], ahead=0, vocab=vocab), **thought_arrays(slots, end, forced)}
    arrays: dict[str, Array] = {name: state[name] for name in CommitThinkingV1.specs() if name in state}
    arrays["slot_order"] = np.array([slot for slot, _ in seqs], np.int32)
    arrays["out_len"] = np.array([new for _, new in seqs], np.int32)
    width = max(width, *(new for _, new in seqs))
    rows = [
        [*(slots[slot].generated[-new:] if slot >= 0 and new else end[-new:] if new else ()), *[NO_TOKEN] * width][:width]
        for slot, new in seqs
    ]
    arrays["out_tokens"] = np.array(rows, np.int32)
    return Case(name, arrays, {"num_forced": len(forced)}, len(seqs) if n is None else n)


def cases() -> Iterator[Case]:
    """Named cases of `commit_thinking`."""
    yield _case("end_is_the_last_token", [Thought(generated=(1, 4, 5))], [(0, 1)])
    yield _case(
        "end_lies_before_the_last_token", [Thought(generated=(1, 4, 5, 2)), Thought(generated=(4, 5, 4, 5, 4))], [(1, 4), (0, 2)]
    )
    prompts = [Thought(prompt=(1,), generated=(4, 5)), Thought(prompt=(2, 3, 1), generated=(4, 5)), Thought(generated=(1, 4, 5))]
    yield _case("end_begins_in_the_history", prompts, [(1, 1), (2, 1), (0, 1)])
    yield _case("end_before_the_new_tokens", [Thought(generated=(4, 5, 2, 2))], [(0, 1)])
    yield _case("end_that_breaks_off", [Thought(generated=(4, 4, 1, 5)), Thought(generated=(5, 4))], [(0, 4), (1, 2)])
    yield _case("end_reaches_into_the_prompt", [Thought(prompt=(1, 4), generated=(5,))], [(0, 1)])
    yield _case(
        "end_at_the_limit_and_behind_it",
        [Thought(generated=(1, 4, 5), limit=3), Thought(generated=(1, 4, 5), limit=2)],
        [(0, 3), (1, 3)],
    )
    yield _case(
        "forced_tokens_are_all_there",
        [Thought(generated=(1, 6, 4, 5, 8), limit=1), Thought(generated=(6, 4, 5, 8, 1), limit=0)],
        [(1, 3), (0, 2)],
    )
    yield _case("forced_tokens_are_not_all_there", [Thought(generated=(1, 6, 4, 5), limit=1)], [(0, 3)])
    yield _case(
        "one_token_ends_and_is_forced",
        [Thought(generated=(1, 4), limit=1), Thought(generated=(4, 4))],
        [(0, 1), (1, 2)],
        end=(4,),
        forced=(4,),
    )
    yield _case(
        "reply_has_begun",
        [Thought(generated=(4, 5, 4, 5), reply_from=2), Thought(generated=(4, 5), reply_from=0)],
        [(0, 2), (1, 2)],
    )
    mixed = [Thought(generated=(4, 5)), Thought(generated=(1, 4, 5)), Thought(generated=(4, 5)), Thought(generated=(3, 4, 5))]
    yield _case("sequences_without_new_tokens", mixed, [(2, 0), (1, 2), (0, 0), (3, 1)])
    yield _case("order_shorter_than_the_launch", mixed, [(3, 1), (PAD_SLOT, 2), (-9, 2)])
    yield _case("beyond_the_launch_length", mixed, [(1, 2), (0, 2), (3, 3), (2, 2)], 2)
    yield _case("nothing_to_do", mixed, [(0, 2), (1, 2)], 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random texts over few tokens, whose last ones are new."""
    size, vocab = fitted(sizes, B=int(rng.integers(1, 6)), V=int(rng.integers(4, 7)))
    end, forced = random_ends(rng, sizes, vocab)
    slots, new = [random_thought(rng, vocab, 1, end, forced) for _ in range(size)], [0] * size
    for i, slot in enumerate(slots):
        new[i] = int(rng.integers(0, len(slot.generated) + 1))
        told = slot.reply_from if slot.reply_from <= len(slot.generated) - new[i] else THINKING
        slots[i] = replace(slot, reply_from=told)
    if sizes:  # a long text that has just ended its thinking
        slots[0] = as_long(rng, replace(slots[0], reply_from=THINKING, limit=-1), sizes, vocab)
        before = [(end[-1] + 1) % vocab] * (sizes.get("W", 0)) + [*slots[0].generated[: -len(end)]]
        slots[0] = replace(slots[0], generated=(*before, *end))
        new[0] = sizes.get("W", 1)
    order = [int(slot) if rng.random() < 0.9 else PAD_SLOT for slot in rng.permutation(size)]
    order = [0, *[slot or PAD_SLOT for slot in order[1:]]] if sizes else order
    most = sizes.get("W", max(new))
    seqs = [(slot, min(new[slot], most) if slot >= 0 else 0) for slot in order]
    return _case("random", slots, seqs, launched(rng, sizes, size), end=end, forced=forced, vocab=vocab, width=sizes.get("W", 1))


CONTRACT = REGISTRY.add(
    Contract(
        name="commit_thinking",
        version=1,
        unit="seqs",
        args=CommitThinkingV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Note where thinking has ended within the tokens that a step has committed.",
        source="FastDeploy limit_think_status and reasoning_status, which are advanced over accepted tokens.",
        feature="thinking",
        equivalent_mutants={
            "plus(reply_from)": "only whether it is -1 is read, and this leaves every sign as it is",
            "unpad(out_tokens)": "below out_len there are tokens, and the rest is not read",
        },
        symbols={"TE": SYMBOLS["TE"]},
        grows={"B": SLOTS, "W": WINDOW, "L": CONTEXT, "TE": DRAFTS},
    )
)
