"""Watches how many drafts are accepted, and says when that looks wrong: a proposer that is broken costs time and changes no text.

Looked at is the first draft of each round, as every round with drafts has one. Four things are told, each once until it has
passed: hardly any is accepted from the start (`floor`); far fewer than before (`fall`); far fewer of those that captured graphs
made than of those that were launched one by one (`graphs`); and a text that repeats itself, whose acceptance says nothing about
the proposer (`loop`). Shares are compared over hundreds of rounds and by factors of two, so that honest texts stay silent. Two
more are told through it that are not about acceptance: drafts that are not those of the text (`state`, `draft_state_check.py`),
and texts that are not those of plain decoding (`text`, `text_check.py`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

import numpy as np

from polydraft.host.slots import SlotTable
from polydraft.host.totals import EngineTotals
from polydraft.sentinels import Phase

BLOCK = 512
"""Rounds after which shares are compared."""
FLOOR = 0.03
"""Share of a block below which drafts are not worth their time on any device."""
HISTORY, LEAST_HISTORY = 32, 4
"""Blocks that a share is compared with, at most and at least."""
HALF = 0.5
"""A share below this part of another one is told."""
WORTH = 0.15
"""A share has to be so high for one below it to be a loss."""
LOOK_EVERY = 64
"""Steps between two looks for texts that repeat themselves."""
FULL_ROUNDS = 16
"""Rounds in a row that were accepted whole, before a text is looked at."""
TAIL, LONGEST_PERIOD = 128, 32
"""Tokens at the end of a text that are looked at, and the longest period that is looked for."""

KINDS = ("floor", "fall", "graphs", "loop", "state", "text")


class AcceptanceAlarms:
    """Alarms of one engine. `count`: how often each kind was found, requests for `loop`. `say` gets each sentence."""

    def __init__(self, totals: EngineTotals, slots: SlotTable, say: Callable[[str], None], *, floor: float = FLOOR) -> None:
        self.count = dict.fromkeys(KINDS, 0)
        self.said: dict[str, str] = {}
        """The last sentence of each kind that was told."""
        self._totals, self._slots, self._say, self._floor = totals, slots, say, floor
        self._active = bool(totals.drafted_at)
        self._before = (0, 0)
        self._of = np.zeros((2, 2), np.int64)
        """[by a graph, accepted]: rounds of this block, by who made their drafts and whether the first was accepted."""
        self._by_graph = False
        """Whether the step before was replayed: it made the drafts that this one has verified."""
        self._blocks: deque[float] = deque(maxlen=HISTORY)
        self._making = np.zeros((2, 2), np.int64)
        """The same as `_of`, over blocks, until there is enough of both."""
        self._below = self._low = self._told_graphs = False
        """Whether blocks are below the floor, since which they have not been worth much; and whether the last one was far below
        what was usual."""
        self._steps = 0
        self._looping = np.full(slots.epoch.shape, -1, np.int64)
        """Epoch of the request of each slot that was found to repeat itself."""

    def step(self, *, replayed: bool) -> None:
        """A step was applied. Costs a few comparisons, save at the end of a block and of every `LOOK_EVERY` steps."""
        if not self._active:
            return
        tried, accepted = self._totals.drafted_at[0], self._totals.accepted_at[0]
        new, good = tried - self._before[0], max(accepted - self._before[1], 0)  # a stop string may take some back
        self._before = tried, accepted
        by = int(self._by_graph)
        self._by_graph = replayed
        if new:
            good = min(good, new)
            self._of[by, 1] += good
            self._of[by, 0] += new - good
            if self._of.sum() >= BLOCK:
                self._judge()
        self._steps += 1
        if not self._steps % LOOK_EVERY:
            self._look()

    def weights_changed(self) -> None:
        """What graphs drafted with other weights is not held against what is drafted without them now."""
        self._making[:] = 0

    def _judge(self) -> None:
        """A block has ended."""
        share = float(self._of[:, 1].sum() / self._of.sum())
        self._making += self._of
        self._of[:] = 0
        usual = statistics.median(self._blocks) if len(self._blocks) >= LEAST_HISTORY else 0.0
        below = share < (WORTH if self._below else self._floor)
        if below and not self._below and usual < WORTH:  # otherwise it is a fall
            self.tell(
                "floor",
                f"the first draft of a round was accepted in {share:.1%} of {BLOCK} rounds, wanted {self._floor:.0%} or more: "
                "drafts cost more than they bring; see that the proposer is this model's (polydraft mtp-check), or use "
                "--draft-tokens 0",
            )
        self._below = below
        low = usual >= WORTH and share < HALF * usual
        if low and self._low:
            self.tell(
                "fall",
                f"the first draft of a round is accepted in {share:.1%} of the last {BLOCK} rounds, in {usual:.1%} before, "
                "wanted no such fall while texts are alike; if weights were replaced, see that the proposer's were, too",
            )
            self._blocks.clear()  # what is new becomes usual, or rises again
        self._low = low
        if not low:
            self._blocks.append(share)
        self._judge_graphs()

    def _judge_graphs(self) -> None:
        number = self._making.sum(axis=1)
        if number.min() < BLOCK // 2 or self._told_graphs:
            return
        eager, graph = (self._making[:, 1] / number).tolist()
        if eager >= WORTH and graph < HALF * eager:
            self._told_graphs = True
            self.tell(
                "graphs",
                f"drafts that captured graphs made are accepted in {graph:.1%} of rounds, those of other steps in {eager:.1%}, "
                "wanted about the same; serve with --graph off, and run polydraft conform --level L3 on this backend",
            )
        self._making //= 2

    def _look(self) -> None:
        """For texts that repeat themselves: of requests whose last rounds were accepted whole."""
        t = self._slots
        slots = np.flatnonzero((t.phase == Phase.DECODE) & (t.num_rounds >= FULL_ROUNDS) & (t.num_known - t.prompt_len >= TAIL))
        slots = slots[self._looping[slots] != t.epoch[slots]]
        if not slots.size:
            return
        last = t.num_rounds[slots, None] - np.arange(1, FULL_ROUNDS + 1)
        drafted = t.round_drafts[slots[:, None], last]
        whole = (t.rounds[slots[:, None], last] == drafted) & (drafted > 0)
        for slot in slots[whole.all(axis=1)].tolist():
            tail = t.tokens[slot, t.num_known[slot] - TAIL : t.num_known[slot]]
            period = next((p for p in range(1, LONGEST_PERIOD + 1) if (tail[p:] == tail[:-p]).all()), 0)
            if period:
                self._looping[slot] = t.epoch[slot]
                self.tell(
                    "loop",
                    f"a text repeats its last {period} tokens, so its drafts are all accepted, which says nothing about the "
                    "proposer; penalise repetition, or bound the request (further ones are counted)",
                )

    def tell(self, kind: str, sentence: str) -> None:
        """Count an alarm of this kind, and say so."""
        self.count[kind] += 1
        if kind != "loop" or self.count[kind] == 1:
            self.said[kind] = sentence
            self._say(sentence)
