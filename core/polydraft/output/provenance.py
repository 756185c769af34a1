"""Who proposed each token of a text, worked out once: when the tokens are new, for all requests of a batch together.

The drafts that each round verified and accepted say it, and the places that a constraint left no choice for. `provenance` is
the only function that knows how; a word of it travels with each token, through `RequestDelta` and `RequestOutput`, to whoever
asks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

import numpy as np

from polydraft.device import Array
from polydraft.errors import RecordError


class Source(IntEnum):
    """Who chose a token."""

    TARGET = 0
    """The target with no draft to hold it against: the prefill's token, or the one after a window that was accepted whole."""
    DRAFT = 1
    """A draft that the target agreed with."""
    CORRECTED = 2
    """The target, in the place of a draft that it rejected."""
    FORCED = 3
    """A constraint that left no choice, wherever the token came from."""


_SOURCE_BITS, _POSITION_BITS = 2, 8
_POSITION, _ROUND = 1 << _SOURCE_BITS, 1 << _SOURCE_BITS + _POSITION_BITS
_DRAFT, _CORRECTED = int(Source.DRAFT), int(Source.CORRECTED)
"""As plain numbers: looking a member up takes as long as a small array operation."""


def origin(word: int) -> tuple[Source, int, int]:
    """What the word of a token says: who chose it, its place among the drafts of its round (from 1 on; 0: no draft), and the
    number of the round (from 0 on; -1: the token that the prefill chose)."""
    return Source(word % _POSITION), word // _POSITION % (1 << _POSITION_BITS), word // _ROUND - 1


def round_numbers(words: Array) -> Array:
    """Of the rounds that brought the tokens of these words, -1 for the prefill's."""
    numbers: Array = words // _ROUND - 1
    return numbers


def provenance(
    rounds: Array, round_drafts: Array, round_ends: Array, token_ends: Array, reported_tokens: Sequence[int],
    reported_rounds: Sequence[int], forced: Sequence[Collection[int]],
) -> Array:  # fmt: skip
    """The word of each new token of n requests, int32 [T], of one request after the other; `origin` reads it.

    `rounds`, `round_drafts` int32 [R]: drafts accepted and verified in each new round, of one request after the other.
    `round_ends`, `token_ends` [n]: where the rounds and tokens of each request end. `reported_tokens`, `reported_rounds` [n]: how
    many each request had before. `forced` [n]: places in each request's text that a constraint left no choice for. A round brings
    the drafts it accepted and one token of the target; only the last one of a request may have been cut short. Raises
    `RecordError` where rounds cannot have brought that many tokens: the device reported other rounds than it ran."""
    size = int(token_ends[-1]) if len(token_ends) else 0
    if not size:
        return np.empty(0, np.int32)
    numbers = np.arange(1, len(rounds) + 1)
    numbers += _offsets(round_ends, reported_rounds)
    if 0 in reported_tokens:
        rounds, round_drafts, round_ends, numbers = _with_prefill(
            rounds, round_drafts, round_ends, numbers, (np.array(reported_tokens) == 0) & (_counts(token_ends) > 0)
        )
    produced = rounds + 1
    ends = produced.cumsum()
    numbers *= _ROUND
    own, last = numbers + (rounds < round_drafts) * _CORRECTED, ends - 1
    if ends[-1] != size:
        produced, ends = _cut_short(ends, round_ends, token_ends)
        whole = produced > rounds
        own, last = own[whole], ends[whole] - 1
    numbers += _DRAFT + _POSITION - _POSITION * (ends - produced)
    found: Array = numbers.repeat(produced)
    if len(found) != size:
        raise RecordError(
            f"rounds that bring {len(found)} tokens came with {size}, wanted as many; what the device says of its rounds is wrong"
        )
    found += np.arange(0, _POSITION * size, _POSITION)
    found[last] = own
    if any(forced):
        _force(found, token_ends, reported_tokens, forced)
    return found.astype(np.int32)


def _offsets(round_ends: Array, reported_rounds: Sequence[int]) -> Array:
    """What to add to the place of a round among all new ones for its number among those of its request."""
    offsets = np.array(reported_rounds)
    if len(offsets) == 1:
        return offsets
    offsets[1:] -= round_ends[:-1]
    return offsets.repeat(_counts(round_ends))


def _counts(ends: Array) -> Array:
    counts = ends.copy()
    counts[1:] -= ends[:-1]
    return counts


def _with_prefill(
    rounds: Array, round_drafts: Array, round_ends: Array, numbers: Array, fresh: Array
) -> tuple[Array, Array, Array, Array]:
    """The same with a round without drafts before those of the requests that are `fresh`: the token that the prefill chose.
    `numbers` count from 1 on, so that its own is 0."""
    at = (round_ends - _counts(round_ends))[fresh]
    filled = (np.insert(values, at, fill) for values, fill in ((rounds, 0), (round_drafts, 0), (numbers, 0)))
    with_one, drafts, numbers = filled
    return with_one, drafts, round_ends + fresh.cumsum(), numbers


def _cut_short(ends: Array, round_ends: Array, token_ends: Array) -> tuple[Array, Array]:
    """Tokens that each round really brought, and where they end: an end of text may have cut a request's last round."""
    num_rounds, num_tokens = _counts(round_ends), _counts(token_ends)
    owner = np.arange(len(round_ends)).repeat(num_rounds)
    before = np.concatenate(([0], ends))[round_ends - num_rounds]  # what earlier requests would have brought
    real = np.minimum(ends - before[owner], num_tokens[owner]) + (token_ends - num_tokens)[owner]
    return _counts(real), real


def _force(found: Array, token_ends: Array, reported_tokens: Sequence[int], forced: Sequence[Collection[int]]) -> None:
    """Note what constraints left no choice for."""
    begin = 0
    for end, reported, places in zip(token_ends.tolist(), reported_tokens, forced, strict=True):
        new = [begin + place - reported for place in places if reported <= place < reported + end - begin]
        found[new] |= int(Source.FORCED)
        begin = end


def rounds_within(rounds: Sequence[int], num_tokens: int) -> list[int]:
    """Drafts that the rounds of a text put into its first `num_tokens`; those that only brought later tokens are left out."""
    produced, kept = 1, []
    for accepted in rounds:
        if produced >= num_tokens:
            break
        kept.append(min(accepted, num_tokens - produced))
        produced += accepted + 1
    return kept
