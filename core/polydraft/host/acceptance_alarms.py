"""Watches how many drafts are accepted, and says when that looks wrong: a proposer that is broken costs time and changes no text.

Looked at is the first draft of each round, as every round with drafts has one. Four things are told, each once until it has
passed: hardly any is accepted from the start (`floor`); far fewer than before (`fall`); far fewer of those that captured graphs
made than of those that were launched one by one (`graphs`); and a text that repeats itself, whose acceptance says nothing about
the proposer (`loop`). Shares are compared over hundreds of rounds and by factors of two, so that honest texts stay silent; those
of graphs within the same texts, each round with its neighbour, since graphs may serve other requests, or other parts of them,
than single launches do. Two more are told through it that are not about acceptance: drafts that are not those of the text
(`state`, `draft_state_check.py`), and texts that are not those of plain decoding (`text`, `text_check.py`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

import numpy as np

from polydraft.host.slots import SlotTable
from polydraft.host.totals import EngineTotals
from polydraft.program.plan import StepOutcome
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
SETTLED = 4
"""Rounds at the beginning of a text whose drafts are not compared: what follows a prompt may be easy for any proposer."""
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
        self._new = self._good = 0
        """Rounds of this block, and those whose first draft was accepted."""
        self._last: StepOutcome | None = None
        self._by_graph = self._last_by_graph = False
        """Whether the step before was replayed, which made the drafts that the next one verifies; and the step before that."""
        self._blocks: deque[float] = deque(maxlen=HISTORY)
        self._pairs = 0
        """Rounds beside each other of one text, of which a graph made the drafts of one alone, until there are enough."""
        self._accepted = [0, 0]
        """[by a graph]: of which rounds of them the first draft was accepted."""
        self._epochs = np.full(slots.epoch.shape, -1, slots.epoch.dtype)
        self._first = np.zeros(slots.epoch.shape, bool)
        self._below = self._low = self._told_graphs = False
        """Whether blocks are below the floor, since which they have not been worth much; and whether the last one was far below
        what was usual."""
        self._steps = 0
        self._looping = np.full(slots.epoch.shape, -1, np.int64)
        """Epoch of the request of each slot that was found to repeat itself."""

    def step(self, outcome: StepOutcome, *, replayed: bool) -> None:
        """A step was applied. Costs a few comparisons, save at the end of a block and of every `LOOK_EVERY` steps, and where
        graphs begin or stop to serve."""
        if not self._active:
            return
        tried, accepted = self._totals.drafted_at[0], self._totals.accepted_at[0]
        new, good = tried - self._before[0], max(accepted - self._before[1], 0)  # a stop string may take some back
        self._before = tried, accepted
        if self._last is not None and self._by_graph != self._last_by_graph:
            self._compare(self._last, outcome)
        self._last, self._last_by_graph, self._by_graph = outcome, self._by_graph, replayed
        self._new += new
        self._good += min(good, new)
        if self._new >= BLOCK:
            self._judge()
        self._steps += 1
        if not self._steps % LOOK_EVERY:
            self._look()

    def weights_changed(self) -> None:
        """What graphs drafted with other weights is not held against what is drafted without them now."""
        self._pairs, self._accepted = 0, [0, 0]

    def _judge(self) -> None:
        """A block has ended."""
        share = self._good / self._new
        self._new = self._good = 0
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

    def _compare(self, before: StepOutcome, now: StepOutcome) -> None:
        """Count the rounds of two steps, of which a graph made the drafts of one alone: of requests that had one in both."""
        t, had = self._slots, before.drafted > 0
        self._epochs[:] = -1
        self._epochs[before.slots[had]], self._first[before.slots[had]] = before.epochs[had], before.accepted[had] > 0
        both = (now.drafted > 0) & (self._epochs[now.slots] == now.epochs) & (t.num_rounds[now.slots] > SETTLED + 1)
        self._pairs += int(both.sum())
        self._accepted[self._by_graph] += int(np.count_nonzero(now.accepted[both]))
        self._accepted[self._last_by_graph] += int(np.count_nonzero(self._first[now.slots[both]]))

    def _judge_graphs(self) -> None:
        if self._pairs < BLOCK or self._told_graphs:
            return
        eager, graph = (accepted / self._pairs for accepted in self._accepted)
        if eager >= WORTH and graph < HALF * eager:
            self._told_graphs = True
            self.tell(
                "graphs",
                f"drafts that captured graphs made are accepted in {graph:.1%} of rounds, those of the steps beside them, for "
                f"the same texts, in {eager:.1%}, wanted about the same; serve with --graph off, and run polydraft conform "
                "--level L3 on this backend",
            )
        self._pairs, self._accepted = 0, [0, 0]

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
