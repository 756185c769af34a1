"""Defines `pack_prompt_rows`: which packed rows predict a prompt token that somebody wants the log probability of.

The runner launches it at the end of a step that prefills such a prompt, before the head runs over those rows. It never
selects the row behind the last prompt token: what that predicts is output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Case, Contract, tensor
from polydraft.contracts.sizes import CONTEXT, SLOTS, SMALL, Sizes, fitted
from polydraft.device import Buffer
from polydraft.sentinels import NO_ROW, NO_TOKEN, PAD_SLOT


class PackPromptRowsV1(Args):
    """Arguments of `pack_prompt_rows`. Launch length: prompt rows, at least as many as there are."""

    slot_order: Buffer = tensor("B", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    seq_start: Buffer = tensor("B", "i32", "First packed row of each sequence.")
    seq_len: Buffer = tensor("B", "i32", "Packed rows of each sequence.")
    positions: Buffer = tensor("R", "i32", "Absolute position of each packed row.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_top: Buffer = tensor("B", "i32", "Most likely tokens wanted beside each prompt token, by slot; -1: none at all.")
    tokens: Buffer = tensor("B L", "i32", "Token history by slot.")
    prompt_row: Buffer = tensor("NL", "i32", "Packed row of each prompt row.", access="out", pad=NO_ROW)
    prompt_slot: Buffer = tensor("NL", "i32", "Slot of each prompt row.", access="out", pad=PAD_SLOT)
    prompt_position: Buffer = tensor("NL", "i32", "Position of the token that the row predicts.", access="out", pad=0)
    prompt_token: Buffer = tensor("NL 1", "i32", "The prompt token at that position.", access="out", pad=NO_TOKEN)


def golden(a: Any, n: int) -> None:
    """Walk the rows of all sequences in launch order."""
    a.prompt_row[:n], a.prompt_slot[:n], a.prompt_position[:n], a.prompt_token[:n] = NO_ROW, PAD_SLOT, 0, NO_TOKEN
    place = 0
    for i, slot in enumerate(a.slot_order):
        if slot < 0 or a.num_top[slot] < 0:
            continue
        for row in range(a.seq_start[i], a.seq_start[i] + a.seq_len[i]):
            position = a.positions[row] + 1
            if position < a.prompt_len[slot]:
                a.prompt_row[place], a.prompt_slot[place], a.prompt_position[place] = row, slot, position
                a.prompt_token[place] = a.tokens[slot, position]
                place += 1


Rows = tuple[int, int, int]
"""Slot, first position and number of the packed rows of a sequence."""


def _case(
    name: str, seqs: Sequence[Rows], prompt_len: Sequence[int], num_top: Sequence[int], *, pads: int = 0, tail: int = 2,
    n: int | None = None, length: int = 12,
) -> Case:  # fmt: skip
    """Sequences in launch order; `pads` places of the order are past its end, `tail` prompt rows have nothing to carry."""
    size = len(prompt_len)
    order = [slot for slot, *_ in seqs] + [PAD_SLOT] * (size - len(seqs))
    lens = [count for *_, count in seqs] + [0] * (size - len(seqs))
    positions = [first + k for _, first, count in seqs for k in range(count)]
    there = sum(
        first + k + 1 < prompt_len[slot] for slot, first, count in seqs for k in range(count) if num_top[slot] >= 0
    )  # fmt: skip
    rows = there + tail
    arrays = {
        "slot_order": order, "seq_len": lens, "seq_start": np.cumsum(lens) - lens, "positions": [*positions, *[0] * (pads + 1)],
        "prompt_len": prompt_len, "num_top": num_top,
        "tokens": max(100, 2 * length) * np.arange(size)[:, None] + np.arange(length),
    }  # fmt: skip
    outputs: dict[str, tuple[tuple[int, ...], str]] = {f"prompt_{o}": ((rows,), "i32") for o in ("row", "slot", "position")}
    outputs["prompt_token"] = ((rows, 1), "i32")
    values = {key: np.array(value, np.int32) for key, value in arrays.items()}
    return Case(name, values, {}, rows if n is None else n, outputs)


def cases() -> Iterator[Case]:
    """Named cases of `pack_prompt_rows`."""
    yield _case("whole_prompts", [(1, 0, 4), (0, 0, 3)], [3, 4], [0, 2])
    yield _case("the_row_behind_the_prompt_is_output", [(0, 0, 5)], [5], [1], tail=0)
    yield _case("chunk_of_a_prompt", [(2, 3, 3), (0, 0, 2)], [9, 5, 8], [1, 1, 1])
    yield _case("some_slots_want_none", [(0, 0, 3), (1, 0, 3), (2, 0, 3)], [6, 6, 6], [0, -1, 3])
    yield _case("windows_beside_prompts", [(1, 6, 3), (0, 2, 4)], [9, 5], [0, 0])
    yield _case("resumed_request_prefills_beyond_its_prompt", [(0, 0, 7), (1, 0, 2)], [4, 5], [0, 0])
    yield _case("sequence_without_rows", [(1, 0, 0), (0, 0, 3), (2, 4, 0)], [5, 5, 5], [0, 0, 0])
    yield _case("order_shorter_than_the_batch", [(2, 1, 2)], [5, 5, 5], [0, 0, 0], pads=2)
    yield _case("longer_launch_than_rows", [(1, 0, 2), (0, 0, 2)], [4, 4], [0, 0], tail=4, n=6)
    yield _case("nothing_to_do", [(0, 3, 2)], [4], [0], n=0, tail=3)
    yield _case("nobody_wants_it", [(0, 0, 3), (1, 0, 2)], [5, 5], [-1, -1], tail=3)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random chunks of random prompts."""
    size, length = fitted(sizes, B=int(rng.integers(1, 6)), L=12)
    prompt_len = [int(v) for v in rng.integers(1, length - 1, size)]
    order = rng.permutation(size)[: rng.integers(size // 2 + 1 if sizes else 0, size + 1)]
    firsts = [int(rng.integers(prompt_len[slot] // 2 if sizes else 0, prompt_len[slot] + 1)) for slot in order]
    seqs = [(int(slot), first, int(rng.integers(0, min(length - first, 512)))) for slot, first in zip(order, firsts, strict=True)]
    num_top = [int(k) for k in rng.integers(-1, 3, size)]
    if sizes:  # the last rows of a prompt that fills the history
        prompt_len[seqs[0][0]], num_top[seqs[0][0]] = length - 1, 0
        seqs[0] = (seqs[0][0], length - 6, 5)
    return _case("random", seqs, prompt_len, num_top, pads=int(rng.integers(0, 3)), tail=int(rng.integers(0, 3)), length=length)


CONTRACT = REGISTRY.add(
    Contract(
        name="pack_prompt_rows",
        version=1,
        unit="prompt_rows",
        args=PackPromptRowsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Select the rows that predict prompt tokens of which log probabilities are wanted.",
        source="Prompt log probabilities as vLLM and OpenAI's echo report them.",
        equivalent_mutants={
            "unpad(slot_order)": "a sequence past the end has no rows",
            "plus(num_top)": "only its sign is read, and this leaves every sign as it is",
        },
        feature="logprobs",
        grows={"B": SLOTS, "L": CONTEXT},
    )
)
