"""What binds one text: the state of a grammar, and the masks of a window's rows.

The processes of grammars use it (`grammar_process.py`). It knows nothing of slots and steps.

An automaton follows committed tokens only. For the positions of a window it tries the drafts one after the other and takes them
back, so that a rejected draft leaves no trace. A draft that its own position forbids ends the trying: the target cannot choose
it, so no row after it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from polydraft.device import Array
from polydraft.sampling.thinking import Thinking
from polydraft.sentinels import THINKING

ALL: Final = np.uint32(0xFFFFFFFF)


class MatcherError(Exception):
    """A matcher cannot go on; the message says why."""


class Filled(NamedTuple):
    """The masks of a window. `single`: of each place that has one, whether it allows one token alone. `broken`: why the place
    behind those has none, where the matcher failed there; "" otherwise."""

    single: list[bool]
    broken: str


class Automaton:
    """What a text allows next. `matcher`: of the grammar (`llguidance.LLMatcher`). While the text thinks, and where its reply has
    reached its limit, all is allowed: the device forces what comes there."""

    def __init__(self, matcher: Any, thinking: Thinking | None, prompt: Sequence[int], eos: Sequence[int]) -> None:
        self._matcher, self._thinking, self._eos = matcher, thinking, tuple(eos)
        self._generated: list[int] = []
        self._reply = THINKING if thinking is not None and thinking.begun(prompt) else 0
        """Place of the reply's first token."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Committed tokens. Raises `MatcherError`."""
        for token in tokens:
            self._step(token)

    def _step(self, token: int) -> int:
        """One token; returns how many the matcher took."""
        self._generated.append(token)
        if self._reply == THINKING:
            if self._thinking is not None and self._thinking.ends(self._generated):
                self._reply = len(self._generated)
            return 0
        if self._matcher.is_stopped() or token in self._eos:
            return 0
        if not self._matcher.consume_token(token):
            raise MatcherError(reason_of(self._matcher))
        return 1

    def fill(self, drafts: Sequence[int], rows: Array) -> Filled:
        """Write the masks of the places 0 to len(drafts) into `rows` [len(drafts) + 1 or more, words]; rows of places that
        cannot be reached allow everything. Leaves the automaton as it was, unless its matcher failed: then it is of no use."""
        before, taken, single = (len(self._generated), self._reply), 0, list[bool]()
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
        del self._generated[before[0] :]
        self._reply = before[1]
        return Filled(single, "")

    def _row(self, row: Array) -> bool:
        over = self._thinking is not None and self._thinking.over(self._reply, len(self._generated))
        if self._reply == THINKING or over:
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
