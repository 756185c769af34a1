"""Small batches from which the state contracts take their cases: slots in given phases, in a given launch order.

Named cases spell a scene out slot by slot, generators draw one at random; contracts that follow each other in a step use the same
scenes, so that their cases fit together. No golden is called here: a scene is input, not definition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polydraft.contracts.base import Args, Array, Case, ParamSpec, TensorSpec, Unit
from polydraft.contracts.sizes import SMALL, Sizes, fitted
from polydraft.sentinels import NO_BLOCK, NO_TOKEN, PAD_SLOT, Finish, Phase

HISTORY = 1000
"""The token at position p of slot s is HISTORY * (s + 1) + p, so that no token is in two places; more where texts are longer."""
UNSAID = 90_000
"""First of the tokens that the target chooses where a scene says nothing; none of them is drafted or a stop token."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One slot of a scene; lengths count tokens.

    `kv` and `prefill` default to what the phase's invariant says: a prefill starts at 0, and one that has generated tokens
    is resumed, so that all but its last token are prefilled. `room` is what the request may still add. `planned` limits
    its rows (default: one more than it needs). `choices` are the target's, one a logit row. `granted` counts blocks from
    the front (default: all); `hole` is the index of one among them that is missing. For scenes after the commit, `ran` is
    the number of rows in this step and `kept` how many of them were committed.
    """

    phase: Phase = Phase.DECODE
    prompt: int = 4
    generated: int = 2
    room: int = 8
    kv: int | None = None
    prefill: int | None = None
    drafts: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    planned: int | None = None
    granted: int | None = None
    hole: int | None = None
    ran: int | None = None
    kept: int = 0

    @property
    def known(self) -> int:
        """Tokens of the history."""
        return self.prompt + self.generated

    @property
    def prefill_len(self) -> int:
        """Tokens to prefill before decoding."""
        if self.prefill is not None:
            return self.prefill
        return self.known if self.generated == 0 else self.known - 1

    @property
    def kv_len(self) -> int:
        """Committed rows."""
        if self.kv is not None:
            return self.kv
        return 0 if self.phase == Phase.PREFILL else self.known - 1

    @property
    def wanted(self) -> int:
        """Rows that the slot has to run, were the plan no limit."""
        return {Phase.PREFILL: self.prefill_len - self.kv_len, Phase.DECODE: 1 + len(self.drafts)}.get(self.phase, 0)

    @property
    def seq_rows(self) -> int:
        """Rows planned."""
        return self.wanted + 1 if self.planned is None else self.planned

    @property
    def rows(self) -> int:
        """Rows of this step."""
        return min(self.wanted, self.seq_rows) if self.ran is None else self.ran

    @property
    def logits(self) -> int:
        """Logit rows of this step."""
        if self.phase == Phase.DECODE:
            return self.rows
        completes = self.kv_len + self.rows == self.prefill_len == self.known
        return int(self.phase == Phase.PREFILL and self.rows > 0 and completes)

    def window(self, choices: Array) -> list[int]:
        """What the target chose, up to and including its first disagreement."""
        agreed = 0
        while agreed < min(len(self.drafts), len(choices) - 1) and choices[agreed] == self.drafts[agreed]:
            agreed += 1
        return [int(token) for token in choices[: agreed + 1]]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Slots, the launch order over some of them, and sizes.

    Below the launch length there are `pads` sequences past the end, and `tail` rows and logit rows that carry nothing;
    beyond it the buffers of rows have `spare` places. `length` overrides the number of sequences launched.
    """

    slots: tuple[Slot, ...]
    order: tuple[int, ...]
    num_drafts: int = 3
    step_drafts: int | None = None
    """Drafts that the step makes at most; None: as many as there are places."""
    block_size: int = 4
    lookahead: int = 2
    pads: int = 0
    tail: int = 1
    spare: int = 2
    length: int | None = None

    def case(self, name: str, record: type[Args], unit: Unit = "seqs") -> Case:
        """What `record` wants of the scene: inputs and parameters by name, outputs by the sizes of their symbols."""
        fields = {**self._by_slot(), **self._by_sequence()}
        step_drafts = self.num_drafts if self.step_drafts is None else self.step_drafts
        params = {"block_size": self.block_size, "lookahead": self.lookahead, "num_drafts": step_drafts}
        sizes, specs = self._sizes(), record.specs()
        tensors = {key: spec for key, spec in specs.items() if isinstance(spec, TensorSpec)}
        return Case(
            name,
            {key: fields[key] for key, spec in tensors.items() if spec.access != "out"},
            {key: params[key] for key, spec in specs.items() if isinstance(spec, ParamSpec)},
            self._length(unit),
            {
                key: (tuple(sizes[symbol] for symbol in spec.symbols), spec.dtype)
                for key, spec in tensors.items()
                if spec.access == "out"
            },
        )

    def _length(self, unit: Unit) -> int:
        """Launch length of a contract."""
        if unit == "seqs":
            return len(self.order) + self.pads if self.length is None else self.length
        scheduled = [self.slots[s] for s in self.order]
        return sum(s.rows if unit == "rows" else s.logits for s in scheduled) + self.tail

    def _sizes(self) -> Mapping[str, int]:
        longest = max(s.known + s.room for s in self.slots) + 1
        return {
            "B": len(self.slots),
            "K": self.num_drafts,
            "W": self.num_drafts + 1,
            "L": longest,
            "MB": -(-longest // self.block_size) + 1,
            "S": max(1, *(len(s.stop) for s in self.slots)),
            "R": max(1, self._length("rows") + self.spare),
            "NL": max(1, self._length("logit_rows") + self.spare),
        }

    def _by_slot(self) -> dict[str, Array]:
        slots, sizes = self.slots, self._sizes()
        lines = {
            "phase": [s.phase for s in slots],
            "prompt_len": [s.prompt for s in slots],
            "num_generated": [s.generated for s in slots],
            "kv_len": [s.kv_len for s in slots],
            "prefill_len": [s.prefill_len for s in slots],
            "max_total": [s.known + s.room for s in slots],
            "draft_len": [len(s.drafts) for s in slots],
            "finish": [Finish.LENGTH if s.phase == Phase.FINISHED else Finish.NONE for s in slots],
        }
        table = np.arange(len(slots) * sizes["MB"]).reshape(len(slots), -1)
        for blocks, slot in zip(table, slots, strict=True):
            blocks[sizes["MB"] if slot.granted is None else slot.granted :] = NO_BLOCK
            if slot.hole is not None:
                blocks[slot.hole] = NO_BLOCK
        stride = max(HISTORY, 2 * sizes["L"])
        history = stride * (1 + np.arange(len(slots))[:, None]) + np.arange(sizes["L"])
        tables = {
            "tokens": history,
            "block_table": table,
            "drafts": _padded([s.drafts for s in slots], sizes["K"]),
            "stop_tokens": _padded([s.stop for s in slots], sizes["S"]),
        }
        return {name: np.array(value, np.int32) for name, value in {**lines, **tables}.items()}

    def _by_sequence(self) -> dict[str, Array]:
        sizes = self._sizes()
        scheduled = [self.slots[s] for s in self.order]
        past = [0] * (len(self.slots) - len(self.order))
        rows, logits = ([getattr(s, name) for s in scheduled] + past for name in ("rows", "logits"))
        row_slot, positions = np.full(sizes["R"], PAD_SLOT), np.zeros(sizes["R"])
        choices = UNSAID + np.arange(sizes["NL"])
        windows: list[list[int]] = [[] for _ in self.slots]
        row = place = 0
        for i, (index, slot) in enumerate(zip(self.order, scheduled, strict=True)):
            row_slot[row : row + slot.rows] = index
            positions[row : row + slot.rows] = slot.kv_len - slot.kept + np.arange(slot.rows)
            row += slot.rows
            said = slot.choices[: slot.logits]
            choices[place : place + len(said)] = said
            if slot.logits:
                drafted = slot.phase == Phase.DECODE
                windows[i] = (slot if drafted else Slot()).window(choices[place : place + slot.logits])
            place += slot.logits
        lines = {
            "slot_order": [*self.order, *(PAD_SLOT for _ in past)],
            "seq_rows": [s.seq_rows for s in scheduled] + [1 for _ in past],
            "seq_len": rows,
            "seq_start": np.cumsum(rows) - rows,
            "row_slot": row_slot,
            "positions": positions,
            "logit_len": logits,
            "logit_start": np.cumsum(logits) - logits,
            "choices": choices,
            "window": _padded(windows, sizes["W"]),
            "window_len": [len(w) for w in windows],
            "accepted": [max(len(w) - 1, 0) for w in windows],
        }
        return {name: np.array(value, np.int32) for name, value in lines.items()}


def _padded(lists: list[tuple[int, ...]] | list[list[int]], width: int) -> Array:
    """Rows of the given width, NO_TOKEN where a list has ended."""
    return np.array([[*row, *[NO_TOKEN] * (width - len(row))] for row in lists], np.int32).reshape(len(lists), width)


VOCABULARY = 7
"""Few tokens, so that drafts are accepted, stop tokens met and neighbours mistaken for each other by chance."""
MANY_DRAFTS = 5
"""From so many drafts on, most of them agree: else hardly a window would get to its end."""
REAL_BLOCK = 16
"""Block size of cases with many blocks."""


def random_scene(rng: np.random.Generator, sizes: Sizes = SMALL, *, after: bool = False) -> Scene:
    """Draw slots in all phases and a launch order over some of them; `after`: as they are after the commit.

    `sizes` may ask for B, K (or W), L, MB and S, which are at least as asked. The first and the last slot then decode a whole
    window, slot 0 at the end of the longest text.
    """
    num_drafts, block_size = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    num_slots = int(rng.integers(1, 7)) if not sizes else 6
    num_slots, width = fitted(sizes, B=num_slots, W=sizes.get("K", num_drafts) + 1)
    num_slots = max(num_slots, 3) if sizes else num_slots
    num_drafts, block_size = width - 1, REAL_BLOCK if "MB" in sizes else block_size
    draw = _random_after if after else _random_before
    slots = tuple(draw(rng, num_drafts, block_size) for _ in range(num_slots))
    if sizes:
        first, last = (_whole_window(rng, num_drafts, after=after) for _ in range(2))
        slots = (first, *slots[1:-1], last)
    if "L" in sizes:
        slots = _lengthened(rng, slots, sizes["L"], block_size)
    if "MB" in sizes:  # beside the slot that has all its blocks, one that lacks the last of them
        whole, _, *others = _lengthened(rng, slots, (sizes["MB"] - 1) * block_size, block_size)
        slots = (whole, replace(whole, hole=whole.kv_len // block_size), *others)
    if "S" in sizes:
        slots = _with_stop_tokens(rng, slots, sizes["S"])
    order = rng.permutation(num_slots)[: rng.integers(0, num_slots + 1)]
    if sizes:  # three quarters of them, those among them that are as was asked
        rest = rng.permutation(np.arange(2, num_slots - 1))
        rest = rest[: rng.integers(len(rest) * 3 // 4, len(rest) + 1)]
        order = np.append(rng.permutation(np.append(rest, (0, 1))), num_slots - 1)
    return Scene(
        slots=slots,
        order=tuple(int(s) for s in order),
        num_drafts=num_drafts,
        step_drafts=int(rng.integers(bool(sizes), num_drafts + 1)) if after else None,
        block_size=block_size,
        lookahead=int(rng.integers(0, 3)),
        pads=int(rng.integers(0, num_slots - len(order) + 1)),
        tail=int(rng.integers(0, 3)),
        spare=int(rng.integers(0, 3)),
    )


def _whole_window(rng: np.random.Generator, num_drafts: int, *, after: bool) -> Slot:
    """A slot that has as many drafts as there are places, all of them accepted."""
    drafts, last = _random_tokens(rng, num_drafts), _random_tokens(rng, 1)
    slot = Slot(
        prompt=int(rng.integers(num_drafts + 2, num_drafts + 9)), room=num_drafts + 4, drafts=drafts, choices=drafts + last
    )
    slot = replace(slot, kv=slot.kv_len)
    return replace(slot, ran=num_drafts + 1, kept=num_drafts + 1) if after else slot


def _with_stop_tokens(rng: np.random.Generator, slots: tuple[Slot, ...], most: int) -> tuple[Slot, ...]:
    """The slots with up to `most` stop tokens. Slot 0 has as many, of which the last alone is met, at the end of its window."""
    numbers = [most - 1, *rng.integers(0, most, len(slots) - 1).tolist()]
    whole, *others = (replace(s, stop=_random_tokens(rng, n, 4 * most)) for s, n in zip(slots, numbers, strict=True))
    return replace(whole, stop=(*(token + VOCABULARY for token in whole.stop), *whole.choices[-1:])), *others


def _lengthened(rng: np.random.Generator, slots: tuple[Slot, ...], length: int, block_size: int) -> tuple[Slot, ...]:
    """The slots with longer prompts: slot 0 fills a history of `length` places, the others part of it. Half of the prefills have
    all of it before them, in chunks of up to 512 rows."""
    chosen = []
    for i, slot in enumerate(slots):
        most = max(0, length - 1 - slot.known - slot.room)
        extra = most if i == 0 else int(rng.integers(0, most + 1))
        begins = slot.phase == Phase.PREFILL and slot.ran is None and rng.random() < 0.5
        blocks = None if slot.granted is None else slot.granted + -(-extra // block_size)
        longer = replace(slot, prompt=slot.prompt + extra, granted=blocks)
        if begins:
            longer = replace(longer, planned=int(rng.integers(1, 513)))
        elif slot.kv is not None:
            longer = replace(longer, kv=slot.kv + extra)
        chosen.append(longer)
    return tuple(chosen)


def _random_tokens(rng: np.random.Generator, count: int, vocabulary: int = VOCABULARY) -> tuple[int, ...]:
    return tuple(int(token) for token in rng.integers(0, vocabulary, count))


def _random_before(rng: np.random.Generator, num_drafts: int, block_size: int) -> Slot:
    phase = Phase(int(rng.choice(5, p=[0.06, 0.3, 0.44, 0.1, 0.1])))
    prompt, room = int(rng.integers(1, 8)), int(rng.integers(1, num_drafts + 4))
    generated = int(rng.integers(1, 6)) if phase != Phase.PREFILL or rng.random() < 0.4 else 0
    drafts = _random_tokens(rng, int(rng.integers(0, min(num_drafts, room - 1) + 1))) if phase != Phase.PREFILL else ()
    right = 0.75 if num_drafts < MANY_DRAFTS else 0.95
    agreed = [draft if rng.random() < right else int(rng.integers(0, VOCABULARY)) for draft in drafts]
    choices = [token if rng.random() < 0.95 else NO_TOKEN for token in (*agreed, *_random_tokens(rng, 1))]
    slot = Slot(phase=phase, prompt=prompt, generated=generated, room=room, drafts=drafts)
    kv = int(rng.integers(0, slot.prefill_len)) if phase == Phase.PREFILL else slot.kv_len
    blocks = -(-(kv + 1 + len(drafts)) // block_size)
    return Slot(
        phase=phase,
        prompt=prompt,
        generated=generated,
        room=room,
        kv=kv,
        drafts=drafts,
        choices=tuple(choices),
        stop=_random_tokens(rng, int(rng.integers(0, 3))),
        planned=None if rng.random() < 0.6 else int(rng.integers(0, slot.wanted + 2)),
        granted=None if rng.random() < 0.3 else max(0, blocks + int(rng.integers(-1, 3))),
        hole=None if rng.random() < 0.8 else int(rng.integers(0, blocks)),
    )


def _random_after(rng: np.random.Generator, num_drafts: int, block_size: int) -> Slot:
    del block_size
    phase = Phase(int(rng.choice(5, p=[0.06, 0.25, 0.49, 0.1, 0.1])))
    prompt, generated = int(rng.integers(2, 8)), int(rng.integers(1, 6))
    drafts = _random_tokens(rng, int(rng.integers(0, num_drafts + 1)))
    slot = Slot(phase=phase, prompt=prompt, generated=0 if phase == Phase.PREFILL and rng.random() < 0.5 else generated)
    kv = int(rng.integers(1, slot.prefill_len)) if phase == Phase.PREFILL and slot.prefill_len > 1 else slot.kv_len
    kept = int(rng.integers(1, min(kv, 6) + 1)) if kv else 0
    rejected = 0 if phase == Phase.PREFILL else int(rng.integers(0, num_drafts + 1))
    return Slot(
        phase=phase,
        prompt=slot.prompt,
        generated=slot.generated,
        room=int(rng.integers(0, num_drafts + 4)),
        kv=kv,
        drafts=drafts,
        ran=kept + rejected if phase not in (Phase.IDLE, Phase.PAUSED) and rng.random() < 0.85 else 0,
        kept=kept,
    )


# -- packed rows -------------------------------------------------------------------------------------
Runs = Sequence[tuple[int, int, int]]
"""Slot (negative: rows that carry nothing), first position and number of consecutive rows of each run."""


def pack(runs: Runs) -> tuple[Array, Array]:
    """Return row_slot and positions of runs packed one after the other."""
    row_slot = [slot for slot, _, rows in runs for _ in range(rows)]
    positions = [first + j for _, first, rows in runs for j in range(rows)]
    return np.array(row_slot, np.int32), np.array(positions, np.int32)


def random_runs(rng: np.random.Generator, sizes: Sizes = SMALL) -> Runs:
    """Draw runs of distinct slots, some of them padding. `sizes` may ask for B, as `grant` counts slots, and for N, the rows of
    all runs: five eighths of them are one chunk of a prompt then."""
    size = max(int(rng.integers(1, 5)), 3 if sizes else 1)
    size = sizes["B"] - 1 if "B" in sizes else sizes.get("N", size)
    count = size + 1 - ("B" in sizes)
    padding, slots = rng.random(size) < 0.2, rng.permutation(count)[:size]
    if "B" in sizes:
        padding &= slots < count - 1
    padding[0] &= not sizes
    runs = [(int(s), int(rng.integers(0, 14)), int(rng.integers(1, 5))) for s in np.where(padding, PAD_SLOT, slots)]
    if "N" not in sizes:
        return runs
    runs[0], kept, left = (int(slots[0]), 0, max(1, 5 * sizes["N"] // 8)), list[tuple[int, int, int]](), sizes["N"]
    for slot, first, rows in runs:
        kept.append((slot, first, min(rows, left)))
        left -= kept[-1][2]
        if not left:
            break
    return kept


def beyond_of(rng: np.random.Generator, sizes: Sizes) -> int:
    """Rows of a case that lie beyond its launch length: one where rows are many, none where the last one matters."""
    drawn = int(rng.integers(0, 2))
    return 1 if "N" in sizes else 0 if "MB" in sizes else drawn


def reaching(runs: Runs, length: int) -> Runs:
    """The runs, one of which ends where a text of `length` positions does."""
    longest = next((i for i, (slot, _, _) in enumerate(runs) if slot >= 0), 0)
    slot, _, rows = runs[longest]
    return [*runs[:longest], (max(slot, 0), max(length - rows, 0), rows), *runs[longest + 1 :]]


def grouped(sizes: Sizes, heads: int, kv_heads: int) -> tuple[int, int]:
    """Query and KV heads of a case, as drawn and as asked for: query heads are a multiple of KV heads, and at least as many."""
    if "num_kv_heads" not in sizes:
        return heads, math.gcd(heads, kv_heads)
    kv_heads = sizes["num_kv_heads"]
    group = heads // kv_heads if "num_heads" in sizes else min(heads, 2) if len(sizes) == 1 else 1
    return kv_heads * max(group, 1), kv_heads


def in_blocks(sizes: Sizes, runs: Runs, drawn: int, *, spare: int) -> tuple[Runs, int]:
    """The runs of a case, and positions of a block: `drawn`, save where sizes ask for them, for blocks of a table, of which
    `spare` are behind the last position, or for blocks of a pool. One run then goes on to the end of the table, or to a third
    block."""
    block_size = sizes.get("block_size", REAL_BLOCK if "MB" in sizes else 1 if "num_blocks" in sizes else drawn)
    if "MB" in sizes:
        return reaching(runs, (sizes["MB"] - spare) * block_size), block_size
    return reaching(runs, 2 * block_size + 5) if "block_size" in sizes else runs, block_size


def grant(
    rng: np.random.Generator, runs: Runs, *, block_size: int, ahead: int = 0, spare: int = 3, pool: int = 0
) -> tuple[Array, int]:
    """Return a block table with blocks in random order, and the number of blocks in the pool.

    Every slot has the blocks its runs need and `ahead` more; one slot has no run, and `spare` blocks belong to nobody. A `pool`
    that is larger has the others in front of all these.
    """
    slots = max(slot for slot, _, _ in runs) + 2
    lengths = [max([first + rows for s, first, rows in runs if s == slot], default=0) for slot in range(slots)]
    needed = [-(-length // block_size) + ahead for length in lengths]
    used = sum(needed) + spare
    num_blocks = max(pool, used)
    free = (num_blocks - used + rng.permutation(used)).tolist()
    longest = max(first + rows for _, first, rows in runs)
    table = np.full((slots, longest // block_size + 2 + ahead), NO_BLOCK, np.int32)
    for slot, entries in enumerate(needed):
        table[slot, :entries] = [free.pop() for _ in range(entries)]
    return table, num_blocks
