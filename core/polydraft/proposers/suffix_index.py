"""Where running and finished texts said before what a text ends with now, and how far what followed there may be trusted.

The suffix proposer asks it once a step. Nothing here knows of requests, devices or steps; a row is a text that grows, and all
rows of a step are worked on together in arrays.

For runs of `ORDERS` tokens it remembers where each occurred last, or forgets it for another one: in tables by hash, one for the
texts of the rows, in which each finds its own alone, and one for finished texts. The longest run that a text ends with, and that
occurred before, gives a place to follow; as long as the text goes on as it did there, the place moves along and the match grows.
How often the next token is that of the place is counted by the length of the match, so a guess is as long as it is likely.

After SuffixDecoding (Oliaro et al. 2024), whose trie is a table here: hashes in place of nodes take the same time in any text,
and chances are those that this work was seen to have, not those of counted branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from polydraft.device import Array
from polydraft.sentinels import NO_TOKEN

ORDERS: Final = np.array((2, 4, 8, 16))
"""Lengths of the runs that are looked up; a match grows beyond."""
LONGEST: Final = int(ORDERS[-1])
MOST: Final = 64
"""Longer matches are trusted as much as one of this length."""
STRETCH: Final = 2048
"""Tokens that a row takes in at once, where more are new than a step makes: a long prompt is spread over its steps."""
MOST_HASHED: Final = 1 << 20
"""Entries of a table at most, of each order."""
EVERY: Final = 8
"""Steps from one count of how often places were right to the next."""
FADES: Final = 0.99
"""Share of what was counted that a count keeps."""
PRIOR: Final = (0.3, 0.5, 0.65, 0.8, 0.88, 0.92, 0.95)
"""Chance that the next token is that of the place, for matches from 1, 2, 4, ... tokens on, before much was counted."""
PRIOR_WEIGHT: Final = 8.0
OWN, FINISHED = 0, 1

_LEVEL: Final = np.log2(np.arange(1, MOST + 1)).astype(np.int64)
"""Class of a match by its length less one."""
_BOTH: Final = np.array(((OWN,), (FINISHED,)))
_HALF, _ONE, _LOW = np.uint64(32), np.uint64(1), np.uint64((1 << 32) - 1)
_FACTOR: Final = 0x9E3779B97F4A7C15
_MULTIPLIER: Final = 0x5851F42D4C957F2D  # odd, so it has an inverse
_POWERS, _INVERSES = (
    np.cumprod(np.array([1] + [base] * (STRETCH + LONGEST), np.uint64), dtype=np.uint64)  # modulo 2^64
    for base in (_MULTIPLIER, pow(_MULTIPLIER, -1, 1 << 64))
)
_PLACES: Final = np.arange(STRETCH + LONGEST + 1)
_BEGINS: Final = LONGEST + _PLACES[: STRETCH + 1, None] - ORDERS
_INVERSES_OF_BEGINS: Final = _INVERSES[_BEGINS]
"""[STRETCH + 1, orders]: where the run of each order begins that ends behind so many tokens, and what makes its sum the same
wherever it begins."""


class Guesses(NamedTuple):
    """What n rows may go on with: [n, ahead] tokens and [n] how many of them; and from where: [n] the source, and the length of
    the match, `MOST` for longer ones."""

    tokens: Array
    length: Array
    source: Array
    match: Array


class SuffixIndex:
    """Texts of `num_rows` rows of at most `max_len` tokens that grow by at most `step` at once, and the `kept` last tokens of
    texts that have ended (0: none are kept). A guess says the next `ahead` tokens at most, and ends where its chance, from its
    token `sure` on, falls below `least`.

    Memory: 4 bytes a token of either, and for each order 8 bytes an entry of its two tables, which have as many entries as
    there are tokens, `MOST_HASHED` at most. What is not touched is not committed."""

    def __init__(
        self, num_rows: int, max_len: int, *, step: int, ahead: int, kept: int, sure: int = 0, least: float = 0.0
    ) -> None:
        self._step, self._ahead, self._kept, self._pitch = step, ahead, kept, max_len + step
        self._sure, self._least = sure, least
        self._finished = LONGEST + num_rows * self._pitch  # where finished texts begin
        self._text = np.zeros(self._finished + kept + 1 + max(step, STRETCH) + ahead, np.int32)
        self._next = 0
        """Where the next finished text goes, among the finished ones."""
        bits = np.array([max(min(tokens, MOST_HASHED) - 1, 1).bit_length() for tokens in (num_rows * max_len, kept)])
        self._shifts = (64 - bits).astype(np.uint64)[:, None, None]
        self._tables = (np.array((0, len(ORDERS) << bits[OWN]))[:, None] + np.arange(len(ORDERS)) * (1 << bits)[:, None])[:, None]
        """First entry of the table of each order, of own texts and of finished ones."""
        self._runs = np.zeros(len(ORDERS) * int((1 << bits).sum()), np.uint64)
        """A place in the low 32 bits, and above it the check of the run that lies before it; 0: none. In one word, since what an
        entry costs is to fetch it."""
        self._key = np.full(num_rows, -1, np.int64)
        self._seen = np.zeros(num_rows, np.int64)
        self._whole = np.zeros(num_rows, bool)
        """Whether all that is known of a row has been seen."""
        self._place = np.full((2, num_rows), LONGEST, np.int64)
        """What may come next in each row, in its own text and in the finished ones; meant where there is a match."""
        self._match = np.zeros((2, num_rows), np.int64)
        self._tried = np.full((2, len(PRIOR)), PRIOR_WEIGHT)
        self._held = self._tried * PRIOR
        self._steps = 0
        self._weigh()

    # -- what has become known -----------------------------------------------------------------------------
    def follow(self, rows: Array, keys: Array, known: Array, tokens: Array) -> None:
        """Take in the texts `tokens[rows[i], : known[i]]` ([B, at least max_len + step] int32, [n] rows without repetition).
        Another key than before, or a shorter text, is another text: the one before has ended."""
        self._steps += 1
        more = known - self._seen[rows]
        other = (self._key[rows] != keys) | (more < 0)
        for i in (other | (more > self._step)).nonzero()[0].tolist():
            row = int(rows[i])
            if other[i]:
                self._begin(row, int(keys[i]))
            size = min(int(known[i] - self._seen[row]), STRETCH)
            if size > self._step:
                self._take(np.array([row]), self._seen[[row]] + size, tokens, size)
        until = np.minimum(known, self._seen[rows] + self._step)
        self._take(rows, until, tokens, self._step)
        self._whole[rows] = until == known

    def _begin(self, row: int, key: int) -> None:
        """A new text in a row, without a token yet; the one before is finished."""
        seen = int(self._seen[row])
        if self._kept and seen > LONGEST:
            first = self._start(row) + max(seen - self._kept, 0)
            self._file(self._text[first : self._start(row) + seen])
        self._key[row], self._seen[row], self._match[:, row] = key, 0, 0

    def _file(self, text: Array) -> None:
        """Keep a finished text, in one piece, over the oldest; stretch by stretch, so that its hashes fit the powers."""
        if self._next + len(text) > self._kept:
            self._next = 0
        start = self._finished + self._next
        self._text[start : start + len(text)] = text
        self._text[start + len(text)] = NO_TOKEN
        self._next += len(text) + 1
        for first in range(0, len(text), STRETCH):
            size = min(STRETCH, len(text) - first)
            hashes = self._hashes(np.array([start + first]), size)[0, 1:]
            ends = first + 1 + np.arange(size)
            self._remember(*self._entries(FINISHED, hashes), start + ends, ends)

    def _take(self, rows: Array, until: Array, tokens: Array, most: int) -> None:
        """Tokens up to position `until` of each row, at most `most` new ones: places move along or are lost, what the text ended
        with is remembered, and where it ends with now is looked up."""
        seen, ends = self._seen[rows], self._start(rows)
        count, offsets = until - seen, _PLACES[:most]
        places, held = (ends + seen)[:, None] + offsets, seen[:, None] + offsets
        self._text[places] = tokens.ravel().take(rows[:, None] * tokens.shape[1] + held)
        self._move(rows, count, ends + seen, most)
        hashes = self._hashes(ends + seen, most)
        own = self._entries(OWN, hashes + self._salts(rows))
        new = offsets < count[:, None]
        self._remember(own[0][:, :most][new], own[1][:, :most][new], places[new], held[new])
        self._seen[rows] = until
        last = np.arange(len(rows)), count
        runs = [(own[0][last], own[1][last])]
        if self._kept:
            runs.append(self._entries(FINISHED, hashes[last]))
        self._look_up(rows, runs, until)

    def _move(self, rows: Array, count: Array, starts: Array, most: int) -> None:
        """Compare what is new with what the places say, and count how often it was the same."""
        offsets, place, match = _PLACES[:most], self._place[:, rows], self._match[:, rows]
        same = self._text.take(place[..., None] + offsets) == self._text.take(starts[:, None] + offsets)
        same &= offsets < count[:, None]
        held = np.minimum.accumulate(same, axis=-1).sum(-1)
        if most == self._step and self._steps % EVERY == 0:  # a prompt is not what drafts are for
            tried = (held + (held < count)) * (match > 0)
            level = _LEVEL[np.minimum(match[..., None] + offsets, MOST) - 1] + np.array((0, len(PRIOR)))[:, None, None]
            self._tried = self._counted(self._tried, level[offsets < tried[..., None]])
            self._held = self._counted(self._held, level[offsets < (held * (match > 0))[..., None]])
            self._weigh()
        held *= match > 0  # a place without a match is nowhere: it must not wander off the texts
        self._place[:, rows] = place + held
        self._match[:, rows] = (match + held) * (held == count)

    @staticmethod
    def _counted(counts: Array, levels: Array) -> Array:
        return FADES * counts + np.bincount(levels, minlength=counts.size).reshape(counts.shape)

    # -- runs of tokens --------------------------------------------------------------------------------------
    def _start(self, rows: Array | int) -> Array:
        return LONGEST + np.asarray(rows) * self._pitch

    def _hashes(self, starts: Array, size: int) -> Array:
        """[n, size + 1, orders] uint64: of the runs that end in front of token `starts + j` of the text."""
        tokens = self._text.take(starts[:, None] + _PLACES[: LONGEST + size] - LONGEST).astype(np.uint64)
        sums = np.zeros((len(starts), LONGEST + size + 1), np.uint64)
        np.cumsum(tokens * _POWERS[: LONGEST + size], axis=1, out=sums[:, 1:])
        begins = _BEGINS[: size + 1]
        return (sums[:, LONGEST:, None] - sums.take(begins, axis=1)) * _INVERSES_OF_BEGINS[: size + 1]  # type: ignore[no-any-return]

    def _salts(self, rows: Array) -> Array:
        """What makes a row find its own text alone, and of that what its present text said."""
        return ((self._key[rows] * 0x2545F491 + rows).astype(np.uint64) * np.uint64(_FACTOR))[:, None, None]

    def _entries(self, source: int, hashes: Array) -> tuple[Array, Array]:
        """Entry and check of runs [..., orders]."""
        mixed = (hashes ^ (hashes >> np.uint64(31))) * np.uint64(_FACTOR)
        shift, table = self._shifts[source].reshape(-1), self._tables[source].reshape(-1)
        return (mixed >> shift).astype(np.int64) + table, mixed << _HALF

    def _remember(self, entries: Array, checks: Array, places: Array, behind: Array) -> None:
        """What follows these runs [n, orders] lies at `places` [n], so many tokens `behind` the beginning of the text; later ones
        overwrite."""
        words = checks | places.astype(np.uint64)[:, None]
        if len(behind) and behind.min() < LONGEST:
            whole = behind[:, None] >= ORDERS
            entries, words = entries[whole], words[whole]
        self._runs[entries] = words

    def _look_up(self, rows: Array, runs: Sequence[tuple[Array, Array]], known: Array) -> None:
        """Where the longest run that a row ends with occurred last, if that is longer than what the row follows; runs are
        [n, orders], of own texts and of finished ones."""
        whole = ORDERS if known.min() >= LONGEST else np.where(ORDERS <= known[:, None], ORDERS, 0)
        for source, (entries, checks) in enumerate(runs):
            there = self._runs.take(entries) ^ checks  # the place, and nothing above it where the check is the same
            longest = ((there - _ONE < _LOW) * whole).max(axis=1)
            better = (longest > self._match[source, rows]).nonzero()[0]
            if better.size:
                place = there[better, np.searchsorted(ORDERS, longest[better])]
                self._place[source, rows[better]], self._match[source, rows[better]] = place, longest[better]

    def _weigh(self) -> None:
        """Work out for a match from 1 on, by source: of its next tokens, how many are expected to be right, in `gains` [source,
        match, next tokens]; and how many tokens a guess has."""
        upto = np.minimum(np.arange(MOST)[:, None] + np.arange(self._ahead), MOST - 1)
        reach = np.cumprod((self._held / self._tried)[:, _LEVEL[upto]], axis=2)
        likely = reach >= self._least * (reach[..., self._sure - 1 : self._sure] if self._sure else 1.0)
        likely[..., : self._sure] = True
        self.gains, self._length = np.zeros((2, MOST + 1, self._ahead + 1)), np.zeros((2, MOST + 1), np.int64)
        self.gains[:, 1:, 1:] = reach.cumsum(2)
        self._length[:, 1:] = np.minimum.accumulate(likely, axis=2).sum(2)

    # -- guesses ---------------------------------------------------------------------------------------------
    def guesses(self, rows: Array) -> Guesses:
        """What the rows may go on with. Of its own text and the finished ones a row takes what promises more tokens."""
        match = np.minimum(self._match[:, rows], MOST)
        promise = self.gains[_BOTH, match, self._ahead]
        source = (promise[FINISHED] > promise[OWN]).astype(np.int64)
        match = match[source, np.arange(len(rows))]
        place, length = self._place[source, rows], self._length[source, match]
        period = np.where(source == OWN, self._start(rows) + self._seen[rows] - place, self._ahead)  # a text that runs on itself
        tokens = self._text.take(place[:, None] + np.arange(self._ahead) % np.maximum(period, 1)[:, None])
        ended = tokens == NO_TOKEN
        length = np.minimum(length, np.where(ended.any(1), ended.argmax(1), self._ahead))
        return Guesses(tokens, length * self._whole[rows], source, match)
