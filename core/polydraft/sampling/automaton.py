"""What binds one text: the states of thinking and of a grammar, and the masks of a window's rows.

The processes of grammars use it (`grammar_process.py`); an engine does for texts whose thinking alone is bound. It knows nothing
of slots and steps.

An automaton follows committed tokens only. For the positions of a window it tries the drafts one after the other and takes them
back, so that a rejected draft leaves no trace. A draft that its own position forbids ends the trying: the target cannot choose
it, so no row after it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from polydraft.device import Array

ALL: Final = np.uint32(0xFFFFFFFF)


class MatcherError(Exception):
    """A matcher cannot go on; the message says why."""


class Filled(NamedTuple):
    """The masks of a window. `single`: of each place that has one, whether it allows one token alone. `broken`: why the place
    behind those has none, where the matcher failed there; "" otherwise."""

    single: list[bool]
    broken: str


class Phase(NamedTuple):
    """Where a text stands: `thinking` or not, tokens of it, how far the end of thinking is spelt, and tokens of the reply."""

    thinking: bool
    spent: int
    spelt: int
    replied: int


@dataclass(frozen=True)
class Thinking:
    """The length of thinking and of the reply after it. `start`, `end`: token ids that begin and end thinking; without `start`
    a text thinks from its beginning on. After `limit` thinking tokens the end is spelt out, after `reply` tokens the text
    ends."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    limit: int | None
    reply: int | None
    eos: int

    def first(self, prompt: Sequence[int]) -> Phase:
        """The phase after a prompt."""
        begun = not self.start or _last(prompt, self.start) > _last(prompt, self.end)
        return Phase(begun, 0, 0, 0)

    def forced(self, phase: Phase) -> int | None:
        """The only token that may come, or None where the phase leaves the choice."""
        if phase.thinking and self.limit is not None and phase.spent >= self.limit:
            return self.end[phase.spelt]
        if not phase.thinking and self.reply is not None and phase.replied >= self.reply:
            return self.eos
        return None

    def behind(self, phase: Phase, token: int) -> Phase:
        """The phase after one more token."""
        if not phase.thinking:
            return phase._replace(replied=phase.replied + 1)
        over = self.limit is not None and phase.spent >= self.limit
        spelt = phase.spelt + 1 if token == self.end[phase.spelt] else int(token == self.end[0])
        if spelt == len(self.end):
            return Phase(False, phase.spent, 0, 0)
        return phase._replace(spent=phase.spent + (not over), spelt=spelt)


def _last(text: Sequence[int], part: Sequence[int]) -> int:
    """Where `part` begins in `text` for the last time; -1 where it does not."""
    places = (i for i in range(len(text) - len(part), -1, -1) if part and tuple(text[i : i + len(part)]) == tuple(part))
    return next(places, -1)


class Automaton:
    """What a text allows next. `matcher`: of the grammar (`llguidance.LLMatcher`), None without one."""

    def __init__(self, matcher: Any, thinking: Thinking | None, prompt: Sequence[int], eos: Sequence[int]) -> None:
        self._matcher, self._thinking, self._eos = matcher, thinking, tuple(eos)
        self._phase = thinking.first(prompt) if thinking is not None else Phase(False, 0, 0, 0)

    def follow(self, tokens: Sequence[int]) -> None:
        """Committed tokens. Raises `MatcherError`."""
        for token in tokens:
            self._step(token)

    def _step(self, token: int) -> int:
        """One token; returns how many the matcher took."""
        in_reply = not self._phase.thinking
        if self._thinking is not None:
            self._phase = self._thinking.behind(self._phase, token)
        if self._matcher is None or not in_reply or self._matcher.is_stopped() or token in self._eos:
            return 0
        if not self._matcher.consume_token(token):
            raise MatcherError(reason_of(self._matcher))
        return 1

    def fill(self, drafts: Sequence[int], rows: Array) -> Filled:
        """Write the masks of the places 0 to len(drafts) into `rows` [len(drafts) + 1 or more, words]; rows of places that
        cannot be reached allow everything. Leaves the automaton as it was, unless its matcher failed: then it is of no use."""
        before, taken, single = self._phase, 0, list[bool]()
        rows[:] = ALL
        try:
            for draft in (*drafts, None):
                row = rows[len(single)]
                single.append(self._row(row))
                if draft is None or not allows(row, draft):
                    break
                taken += self._step(draft)
        except MatcherError as error:
            return Filled(single, str(error))
        if taken:
            self._matcher.rollback(taken)
        self._phase = before
        return Filled(single, "")

    def _row(self, row: Array) -> bool:
        forced = self._thinking.forced(self._phase) if self._thinking is not None else None
        if forced is not None:
            _only(row, (forced,))
            return True
        if self._matcher is None or self._phase.thinking:
            row[:] = ALL
            return False
        self._ask_matcher(row)
        return int(np.bitwise_count(row).sum() if hasattr(np, "bitwise_count") else np.unpackbits(row.view(np.uint8)).sum()) == 1

    def _ask_matcher(self, row: Array) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        matcher = self._matcher
        if not matcher.is_stopped():
            fill_next_token_bitmask(matcher, row.view(np.int32)[None], 0)
        if matcher.is_error():  # which counts as stopped, too
            raise MatcherError(reason_of(matcher))
        if matcher.is_stopped():
            _only(row, self._eos)
        elif any(allows(row, token) for token in self._eos):
            for token in self._eos:
                row[token // 32] |= np.uint32(1 << token % 32)


def reason_of(matcher: Any) -> str:
    """Why a matcher failed, in a line."""
    reason = " ".join(matcher.get_error().split())
    return NOTHING if reason.startswith("NoExtension") else reason


NOTHING: Final = "no text can go on here"


def allows(row: Array, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(int(row[token // 32]) >> (token % 32) & 1)


def _only(row: Array, tokens: Sequence[int]) -> None:
    row[:] = 0
    for token in tokens:
        row[token // 32] |= np.uint32(1 << token % 32)
