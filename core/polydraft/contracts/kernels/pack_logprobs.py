"""Defines `pack_logprobs`: log probabilities of a step as one record of exactly the columns that somebody asked for.

The runner launches it behind `top_logprobs`; the record is copied to pinned memory beside the snapshot. It never computes a
number: every float goes by its bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, param, tensor
from polydraft.contracts.layout import (
    LOGPROB_VERSION,
    MAX_COLUMNS,
    MAX_FLAG,
    record_words,
)
from polydraft.contracts.sizes import SLOTS, SMALL, TOP, WINDOW, Sizes, fitted, launched
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT


class PackLogprobsV2(Args):
    """Arguments of `pack_logprobs`. Launch length: sequences.

    Sequences that want no log probabilities have no entry; the others follow each other in launch order without a gap. The
    record has as many columns as the most that a scheduled slot wants, plus the emitted token's; a slot that wants fewer has
    NO_TOKEN and 0 behind its own, as `top_logprobs` left them. Words behind the record's last are not written.
    Preconditions: `flag` is at most 255, E at most 65535, `extra` of a sequence with an entry at most K.
    """

    slot_order: Buffer = tensor("N", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    num_top: Buffer = tensor("B", "i32", "Most likely tokens wanted beside the emitted one, by slot; -1: no log probabilities.")
    ids: Buffer = tensor("N W E", "i32", "Token of each column; NO_TOKEN where there is none.")
    logprobs: Buffer = tensor("N W E", "f32", "Log probability of each column.")
    ranks: Buffer = tensor("N W", "i32", "Rank of each emitted token.")
    extra: Buffer = tensor("N", "i32", "Drafts this round verified (-1: no decode round); of prompt rows, a position.")
    drafts: Buffer | None = tensor("B K", "i32", "Drafts by slot; left out: there are none.", optional=True)
    draft_logprobs: Buffer | None = tensor("B K", "f32", "Log probability of each draft, by slot.", optional=True)
    draft_top_ids: Buffer | None = tensor(
        "B K E", "i32", "Columns of each draft, by slot; left out: rows have none of their drafts.", optional=True
    )
    draft_tops: Buffer | None = tensor("B K E", "f32", "Log probability of each of `draft_top_ids`.", optional=True)
    record: Buffer = tensor("Z", "i32", "Header, then an entry a sequence: see `LogprobHeader`.", access="out", pad="any")
    flag: int = param("What the record is, in its first word.")


def golden(a: Any, n: int) -> None:
    """Count the entries and the columns, then write word after word."""
    wanted = [(i, int(slot)) for i, slot in enumerate(a.slot_order[:n]) if slot >= 0 and a.num_top[slot] >= 0]
    columns = max((int(a.num_top[slot]) + 1 for _, slot in wanted), default=0)
    width = a.ids.shape[1]
    assert 0 <= a.flag <= MAX_FLAG, "the first word of the header has no room for this flag"
    assert columns <= MAX_COLUMNS, "the first word of the header has no room for so many columns"
    size = record_words(len(wanted), width, columns, drafts=a.draft_top_ids is not None)
    words = [a.flag | columns << 8, LOGPROB_VERSION, len(wanted), width, size]
    for i, slot in wanted:
        words += [slot, a.extra[i]]
        for j in range(width):
            verified = a.drafts is not None and j < a.extra[i]
            words += [a.ranks[i, j], a.drafts[slot, j] if verified else NO_TOKEN]
            words.append(_bits(a.draft_logprobs[slot, j]) if verified else 0)
            words += a.ids[i, j, :columns].tolist()
            words += [_bits(value) for value in a.logprobs[i, j, :columns]]
            if a.draft_top_ids is not None:
                words += a.draft_top_ids[slot, j, :columns].tolist() if verified else [NO_TOKEN] * columns
                words += [_bits(value) for value in a.draft_tops[slot, j, :columns]] if verified else [0] * columns
    a.record[: len(words)] = words


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _case(
    name: str, order: Sequence[int], num_top: Sequence[int], *, n: int | None = None, width: int = 3, columns: int = 4,
    flag: int = 3, prompt: bool = False, seed: int = 1, spare: int = 3, tops: bool = False,
) -> Case:  # fmt: skip
    """Numbers that differ from place to place; what they mean is nothing to this kernel. `spare` words follow the record."""
    rng = np.random.default_rng(seed)
    count, size = len(order), len(num_top)
    arrays: dict[str, Any] = {"slot_order": np.array(order, np.int32), "num_top": np.array(num_top, np.int32)}
    shape = count, width, columns
    arrays["ids"] = rng.permutation(4 * count * width * columns + 1)[: count * width * columns].astype(np.int32).reshape(shape)
    arrays["ids"][rng.random(shape) < 0.1] = NO_TOKEN
    arrays["logprobs"] = -rng.exponential(4, shape).astype(np.float32)
    arrays["logprobs"][rng.random(shape) < 0.1] = -np.inf
    arrays["ranks"] = rng.integers(0, 99, (count, width)).astype(np.int32)
    arrays["extra"] = rng.integers(0, 400, count).astype(np.int32)
    arrays["drafts"] = arrays["draft_logprobs"] = None
    drafts = max(width - 1, 1)
    if not prompt:
        arrays["extra"] = rng.integers(-1, width, count).astype(np.int32)
        arrays["extra"][: min(2, count)] = width - 1
        arrays["drafts"] = rng.integers(500, 900, (size, drafts)).astype(np.int32)
        arrays["draft_logprobs"] = -rng.exponential(3, (size, drafts)).astype(np.float32)
    arrays["draft_top_ids"] = arrays["draft_tops"] = None
    if tops:
        shape = size, drafts, columns
        arrays["draft_top_ids"] = rng.integers(NO_TOKEN, 900, shape).astype(np.int32)
        arrays["draft_tops"] = -rng.exponential(3, shape).astype(np.float32)
    words = record_words(count, width, columns, drafts=tops) + spare
    return Case(name, arrays, {"flag": flag}, count if n is None else n, {"record": ((words,), "i32")})


def cases() -> Iterator[Case]:
    """Named cases of `pack_logprobs`."""
    yield _case("another_order_than_slots", (3, 0, 4, 1), (3, 1, -1, 2, 0))
    yield _case("those_who_want_none_leave_no_gap", (3, 0, 2, 1), (1, -1, 3, 2))
    yield _case("fewer_columns_than_there_is_room_for", (1, 0), (1, 0), columns=6)
    yield _case("the_most_of_slots_that_are_scheduled", (1, 2), (5, 1, 0), columns=6)
    yield _case("only_the_emitted_token", (0, 1), (0, 0))
    yield _case("order_shorter_than_the_launch", (1, PAD_SLOT, PAD_SLOT), (2, 1))
    yield _case("beyond_the_launch_length", (1, 0, 2), (1, 0, 3), n=2)
    yield _case("nobody_wants_it", (0, 1), (-1, -1))
    yield _case("largest_flag", (0, 1), (3, 3), flag=255)
    yield _case("more_columns_than_a_byte_holds", (0, 1), (299, 2), width=1, columns=300)
    yield _case("prompt_rows_have_no_drafts", (1, 1, 0), (2, 3), width=1, prompt=True, flag=5)
    yield _case("window_of_one", (1, 0), (2, 3), width=1)
    yield _case("record_that_fills_its_buffer", (1, 0), (3, 3), spare=0)
    yield _case("columns_of_drafts", (3, 0, 4, 1), (3, 1, -1, 2, 0), tops=True, flag=4)
    yield _case("columns_of_drafts_that_fill_the_record", (1, 0), (3, 2), tops=True, spare=0, columns=5)
    yield _case("columns_of_drafts_beyond_the_launch_length", (1, 0, 2), (1, 0, 3), tops=True, n=2)
    yield _case("nothing_to_do", (1, 0), (2, 2), n=0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random numbers and a random launch order, some sequences past its end."""
    size, width, columns = (int(v) for v in rng.integers((1, 1, 1), (6, 5, 6)))
    size, width, columns = fitted(sizes, N=size, W=width, E=columns)
    prompt = bool(rng.random() < 0.2) and "W" not in sizes
    order = [int(s) if rng.random() < 0.9 else PAD_SLOT for s in rng.permutation(size)]
    num_top = [int(k) for k in rng.integers(-1, columns, size)]
    if sizes:
        order[0], num_top[0] = 0, columns - 1
    n, seed = launched(rng, sizes, size, least=0), int(rng.integers(2**31))
    return _case(
        "random", order, num_top, n=n, width=1 if prompt else width, columns=columns, flag=int(rng.integers(256)),
        prompt=prompt, seed=seed, tops=not prompt and bool(rng.random() < 0.4),
    )  # fmt: skip


CONTRACT = REGISTRY.add(
    Contract(
        name="pack_logprobs",
        version=2,
        unit="any",
        args=PackLogprobsV2,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Pack log probabilities into one record with as many columns as were asked for.",
        source="FastDeploy save_output with logprobs, without its fixed 512 slots, 6 tokens and 21 columns.",
        constraints=("0 <= flag <= 255", "E <= 65535"),
        feature="logprobs",
        grows={"N": SLOTS, "W": WINDOW, "E": TOP},
    )
)
