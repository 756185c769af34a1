"""Where a text thinks and where its reply begins, as the host knows it.

The device follows the same rules by itself (`limit_thinking`, `commit_thinking`). The host needs them to admit a request again,
to say which tokens were forced, and for grammars, which bind the reply alone; their processes import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polydraft.device import Array
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import THINKING


@dataclass(frozen=True)
class Markers:
    """Token ids around thinking, of a model: what begins it (() where a text thinks from its beginning on), what ends it, and
    what is spelt out where it reaches its limit, which has the end within it."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    forced: tuple[int, ...]

    def of(self, params: SamplingParams) -> Thinking:
        """The limits of a request."""
        return Thinking(self, params.thinking_limit, params.reply_budget, params.reply_start_token_ids)


@dataclass(frozen=True)
class Thinking:
    """The limits of one text: tokens of thinking, tokens of the reply behind it, None for any number, and the tokens that the
    reply may begin with, () for any. Places count generated tokens."""

    markers: Markers
    limit: int | None = None
    reply: int | None = None
    starts: tuple[int, ...] = ()

    def begun(self, prompt: Sequence[int]) -> bool:
        """Whether a text thinks behind its prompt."""
        return not self.markers.start or _last(prompt, self.markers.start) > _last(prompt, self.markers.end)

    def ends(self, generated: Sequence[int]) -> bool:
        """Whether thinking ends right behind these tokens; it did not before."""
        place, end = len(generated), self.markers.end
        if self.limit is not None and place > self.limit:
            return place == self.limit + len(self.markers.forced)
        return place >= len(end) and tuple(generated[place - len(end) :]) == end

    def reply_from(self, prompt: Sequence[int], generated: Array) -> int:
        """Place of the reply's first token, -1 where `generated` [n] int32 still thinks."""
        if not self.begun(prompt):
            return 0
        place = _first(generated if self.limit is None else generated[: self.limit], self.markers.end)
        if place >= 0:
            return place + len(self.markers.end)
        behind = len(generated) + 1 if self.limit is None else self.limit + len(self.markers.forced)
        return behind if behind <= len(generated) else THINKING

    def over(self, reply: int, place: int) -> bool:
        """Whether a reply that begins at `reply` has reached its limit before `place`."""
        return self.reply is not None and reply != THINKING and place >= reply + self.reply

    def forced(self, reply: int, count: int) -> list[int]:
        """Places, among the first `count`, that the limits leave no choice for, ascending. `reply`: where it begins, or -1."""
        found: list[int] = []
        if self.limit is not None and (reply == THINKING or reply > self.limit):
            found += range(self.limit, min(count, self.limit + len(self.markers.forced)))
        if reply == THINKING:
            return found
        over = count if self.reply is None else min(count, reply + self.reply)
        if len(set(self.starts)) == 1 and reply < over:
            found.append(reply)
        return found + list(range(over, count))


class ForcedPlaces:
    """Follows one text as it grows, and says which of its places were forced."""

    def __init__(self, thinking: Thinking, prompt: Sequence[int]) -> None:
        self._thinking = thinking
        self._reply = THINKING if thinking.begun(prompt) else 0
        self._seen = 0
        """Tokens that were looked at for the end of thinking."""

    def of(self, generated: list[int]) -> list[int]:
        """Ascending. Looks at each token of a growing text once."""
        thinking, size = self._thinking, len(generated)
        if self._reply == THINKING and size > self._seen:
            end, limit = thinking.markers.end, thinking.limit
            last = size if limit is None else min(limit, size)
            if end[-1] in generated[self._seen : last]:
                begin = max(self._seen - len(end) + 1, 0)
                place = _first(generated[begin:last], end)
                self._reply = THINKING if place < 0 else begin + place + len(end)
            if self._reply == THINKING and limit is not None and size >= limit + len(thinking.markers.forced):
                self._reply = limit + len(thinking.markers.forced)
            self._seen = size
        return thinking.forced(self._reply, size)


def _first(text: Sequence[int] | Array, part: Sequence[int]) -> int:
    """Where `part` begins in `text` for the first time; -1 where it does not."""
    return next(iter(_places(text, part)), -1)


def _last(text: Sequence[int] | Array, part: Sequence[int]) -> int:
    """Where `part` begins in `text` for the last time; -1 where it does not."""
    return next(iter(_places(text, part)[::-1]), -1)


def _places(text: Sequence[int] | Array, part: Sequence[int]) -> list[int]:
    """Where `part` begins in `text`."""
    count = len(text) - len(part) + 1
    if not part or count <= 0:
        return []
    tokens = np.asarray(text, np.int32)
    same = tokens[:count] == part[0]
    for i, token in enumerate(part[1:], 1):
        same &= tokens[i : i + count] == token
    return np.flatnonzero(same).tolist()
