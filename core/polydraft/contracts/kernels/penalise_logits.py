"""Defines `penalise_logits`: repetition, presence and frequency penalties over the text that lies before each row's token.

The step program launches it behind `process_logits` in steps of which some request wants processing, for target and draft
rows alike. It never counts more than plain decoding would: row j of a window has drafts 1 to j in its text, not the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, param, tensor
from polydraft.contracts.sizes import CONTEXT, DRAFTS, ROWS, SLOTS, SMALL, VOCABULARY, Sizes, fitted, launched
from polydraft.device import Buffer


class PenaliseLogitsV1(Args):
    """Arguments of `penalise_logits`.

    A row that decides position `p = positions + ahead` of its slot's text has, with `known = prompt_len + num_generated`, the
    first `p - known` drafts of the slot behind its `known` tokens; it is between 0 and K. Drafts count as generated.
    """

    logits: Buffer = tensor("N V", "f32", "Logits; rows of negative slots stay as they are.", access="inout")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    positions: Buffer = tensor("N", "i32", "Absolute position of each row in its slot's text.")
    tokens: Buffer = tensor("B L", "i32", "Token history by slot.")
    drafts: Buffer = tensor("B K", "i32", "Drafts by slot.")
    prompt_len: Buffer = tensor("B", "i32", "Prompt tokens by slot.")
    num_generated: Buffer = tensor("B", "i32", "Tokens generated so far by slot.")
    repetition_penalty: Buffer = tensor("B", "f32", "Divides positive logits of tokens in the text, multiplies others; 1: off.")
    presence_penalty: Buffer = tensor("B", "f32", "Taken off tokens that were generated; 0: off.")
    frequency_penalty: Buffer = tensor("B", "f32", "Taken off for each time a token was generated; 0: off.")
    ahead: int = param("Added to positions: how far the chosen token lies after the row.")


def text(a: Any, r: int) -> tuple[list[int], list[int]]:
    """Return the prompt of row `r` and what is generated before the token it chooses."""
    slot = a.row_slot[r]
    prompt_len, known = a.prompt_len[slot], a.prompt_len[slot] + a.num_generated[slot]
    drafts = a.drafts[slot, : a.positions[r] + a.ahead - known]
    generated = [*a.tokens[slot, prompt_len:known], *drafts]
    return [int(v) for v in a.tokens[slot, :prompt_len]], [int(v) for v in generated]


def golden(a: Any, n: int) -> None:
    """Count in the text of every row, then token by token."""
    for r in range(n):
        slot = a.row_slot[r]
        if slot < 0:
            continue
        prompt, generated = text(a, r)
        counts = Counter(generated)
        for v in {*prompt, *generated}:
            x, factor, count = a.logits[r, v], a.repetition_penalty[slot], counts[v]
            x = x / factor if x > 0 else x * factor
            off = a.presence_penalty[slot] + count * a.frequency_penalty[slot] if count else 0.0
            a.logits[r, v] = x - off


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """Sum of the magnitudes that are added up: up to four roundings, of half an eps each."""
    magnitude = np.abs(a.logits)
    for r in range(n):
        slot = a.row_slot[r]
        if slot >= 0:
            counts = Counter(text(a, r)[1])
            factor, off = a.repetition_penalty[slot], (a.presence_penalty[slot], a.frequency_penalty[slot])
            magnitude[r] *= max(factor, 1 / factor)
            magnitude[r] += [abs(off[0]) + counts[v] * abs(off[1]) for v in range(a.logits.shape[1])]
    return {"logits": magnitude}


@dataclass(frozen=True, kw_only=True)
class Text:
    """One slot of a case: its text and its penalties."""

    prompt: tuple[int, ...] = (1, 2)
    generated: tuple[int, ...] = (3,)
    drafts: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def known(self) -> int:
        """Tokens of the history."""
        return len(self.prompt) + len(self.generated)


def text_arrays(slots: Sequence[Text], rows: Sequence[tuple[int, int]], *, ahead: int, vocab: int) -> dict[str, Array]:
    """What a text looks like in the state: rows are (slot, drafts before the token it chooses). Behind a history and behind
    the drafts lie stale tokens, which no row may count."""
    longest, most = 2 + max(s.known for s in slots), 1 + max(len(s.drafts) for s in slots)
    known = [[*s.prompt, *s.generated] for s in slots]
    tokens = [[*row, *((i + j) % vocab for j in range(longest - len(row)))] for i, row in enumerate(known)]
    drafts = [[*s.drafts, *((3 * i + j + 1) % vocab for j in range(most - len(s.drafts)))] for i, s in enumerate(slots)]
    positions = [slots[slot].known + behind - ahead if slot >= 0 else 7 for slot, behind in rows]
    lines = {
        "row_slot": [slot for slot, _ in rows],
        "positions": positions,
        "tokens": tokens,
        "drafts": drafts,
        "prompt_len": [len(s.prompt) for s in slots],
        "num_generated": [len(s.generated) for s in slots],
    }
    return {name: np.array(values, np.int32) for name, values in lines.items()}


def windows(rng: np.random.Generator, slots: Sequence[Text], sizes: Sizes) -> list[tuple[int, int]]:
    """Return whole windows of slots as (slot, drafts before the token it chooses), in random order, of a large case in their own;
    some rows have no slot."""
    order = rng.permutation(len(slots)).tolist() if not sizes else range(len(slots))
    rows = [(slot, behind) for slot in order for behind in range(len(slots[slot].drafts) + 1)]
    rows = [row if rng.random() < 0.8 or (sizes and row[0] == 0) else (-1, 0) for row in rows]
    return [rows[i % len(rows)] for i in range(sizes.get("N", len(rows)))]


T = TypeVar("T", bound=Text)


def as_long(rng: np.random.Generator, slot: T, sizes: Sizes, vocab: int) -> T:
    """Return the slot with a text that fills the history, and drafts that fill their places, where `sizes` ask for L or K."""
    if "L" in sizes:
        missing = max(0, sizes["L"] - 2 - slot.known)
        prompt = missing // 4
        more = tuple(int(v) for v in rng.integers(0, vocab, missing))
        slot = replace(slot, prompt=slot.prompt + more[:prompt], generated=slot.generated + more[prompt:])
    if "K" in sizes:
        slot = replace(slot, drafts=tuple(int(v) for v in rng.integers(0, vocab, sizes["K"] - 1)))
    return slot


def _case(
    name: str, slots: Sequence[Text], rows: Sequence[tuple[int, int]], n: int | None = None, *, ahead: int = 0,
    logits: Array | None = None,
) -> Case:  # fmt: skip
    if logits is None:
        logits = np.random.default_rng(31).normal(0, 2, (len(rows), 9)).astype(np.float32)
    arrays = {"logits": logits, **text_arrays(slots, rows, ahead=ahead, vocab=logits.shape[1])}
    for field in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        arrays[field] = np.array([getattr(s, field) for s in slots], np.float32)
    return Case(name, arrays, {"ahead": ahead}, len(rows) if n is None else n)


WINDOW = [(0, 0), (0, 1), (0, 2), (0, 3)]
"""Rows of a whole window of three drafts."""


def cases() -> Iterator[Case]:
    """Named cases of `penalise_logits`."""
    repeated = Text(repetition_penalty=1.5, generated=(3, 1), drafts=(4, 3, 5))
    yield _case("repetition_counts_prompt_and_output", [repeated], WINDOW)
    yield _case("repetition_below_one_invites", [Text(repetition_penalty=0.8, drafts=(6, 7, 8))], WINDOW)
    present = Text(presence_penalty=0.75, generated=(3, 3, 5), drafts=(4, 3, 6))
    yield _case("presence_counts_output_once", [present], WINDOW)
    often = Text(frequency_penalty=0.75, generated=(3, 3, 5), drafts=(3, 4, 4))
    yield _case("frequency_counts_every_time", [often], WINDOW)
    yield _case("negative_penalties_reward", [Text(presence_penalty=-1, frequency_penalty=-0.5, drafts=(4, 4, 4))], WINDOW)
    together = Text(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, generated=(1, 5, 5), drafts=(5, 8, 2))
    yield _case("all_three_at_once", [together], WINDOW)
    several = [Text(), together, Text(prompt=(8,), generated=(), repetition_penalty=2.0), present]
    order = [(3, 0), (3, 1), (-9, 0), (2, 0), (1, 0), (1, 1), (1, 2), (0, 0), (3, 2)]
    yield _case("slots_with_and_without_penalties", several, order, 8)
    fresh = Text(prompt=(4, 4), generated=(), presence_penalty=1, repetition_penalty=2)
    yield _case("first_token_of_a_prompt", [fresh], [(0, 0)] * 2)
    yield _case("rows_of_a_draft_pass", several, [(1, 1), (3, 1), (2, 0)], ahead=2)
    sign = np.array([[0.0, -0.0, 1.0, -1.0, 1e-3, -1e-3, 3.0, -3.0, 2.0]] * 3, np.float32)
    everything = Text(prompt=(0, 1, 2, 3, 4, 5, 6, 7, 8), generated=(2, 3), repetition_penalty=2.0, frequency_penalty=0.5)
    yield _case("sign_decides_between_dividing_and_multiplying", [everything], [(0, 0)] * 3, 2, logits=sign)
    broken = sign.copy()
    broken[0, :3], broken[1, 5] = [np.nan, -np.inf, np.inf], -np.inf
    yield _case("nan_and_infinities_stay", [everything], [(0, 0)] * 3, 3, logits=broken)
    yield _case("nothing_to_do", several, order, 0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random texts over few tokens, penalties on or off, windows cut at random; some rows without a slot."""
    size, vocab, ahead = (int(v) for v in rng.integers((1, 4, 0), (4, 8, 3)))
    size, vocab, most_drafts = fitted(sizes, B=size, V=vocab, K=4)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(int(v) for v in rng.integers(0, vocab, rng.integers(least, most + 1)))

    def choice(*values: float) -> float:
        return float(rng.choice(values))

    slots = [
        Text(
            prompt=tokens(1, 4), generated=tokens(0, 4), drafts=tokens(0, most_drafts - 1),
            repetition_penalty=choice(1, 1.3, 0.7), presence_penalty=choice(0, 0.5, -1), frequency_penalty=choice(0, 0.25, 1),
        )
        for _ in range(size)
    ]  # fmt: skip
    if sizes:
        slots[0] = as_long(rng, slots[0], sizes, vocab)
        slots[0] = replace(slots[0], repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    rows = windows(rng, slots, sizes)
    logits = rng.normal(0, 2, (len(rows), vocab)).astype(np.float32)
    return _case("random", slots, rows, launched(rng, sizes, len(rows)), ahead=ahead, logits=logits)


CONTRACT = REGISTRY.add(
    Contract(
        name="penalise_logits",
        version=1,
        unit="any",
        args=PenaliseLogitsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Lower the logits of tokens that the text contains, as the penalties of the request say.",
        source="Repetition: CTRL (Keskar et al. 2019), as in transformers and vLLM; presence and frequency: OpenAI's interface.",
        tolerance={"logits": 2.0},
        scale=scale,
        feature="processing",
        grows={"N": ROWS, "B": SLOTS, "K": DRAFTS, "L": CONTEXT, "V": VOCABULARY},
        independent=("N",),
    )
)
