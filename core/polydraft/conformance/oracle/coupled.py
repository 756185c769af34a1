"""Coupled speculative sampling replayed by full recomputation: the second opinion on sampled texts and their rounds.

Noise, filters and the choice of a token are written from the text of the contracts, not from their code. Level L5 and the tests
of the step call it; at temperature 0 it is greedy decoding and must agree with `rounds.py`. It uses no cache, no batch and
nothing of the runtime: every token and every draft is computed from token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polydraft.conformance.oracle.model import OracleModel

Array = NDArray[Any]
Process = Callable[[Array, Sequence[int]], Array]
"""What becomes of logits [V] behind these tokens before a token is chosen: (logits, known) -> logits."""
_WORD = 2**32


def plain(logits: Array, known: Sequence[int]) -> Array:
    """Logits as they are."""
    del known
    return logits


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the fields mean what they mean in `SamplingParams`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0

    def choose(self, logits: Array, position: int, tolerance: float = 1e-4) -> tuple[int, bool]:
        """The token at absolute `position`, and whether the choice is clear: no other one is among those that `may` come."""
        z, noise = self._scaled(logits, position)
        token_id = int(np.argmax(np.where(self._keep(z, 0.0), z + noise, -np.inf)))
        return token_id, bool(self.may(logits, position, tolerance).sum() == 1)

    def may(self, logits: Array, position: int, tolerance: float) -> Array:
        """Which tokens may be chosen at absolute `position` where any two logits are nearer or farther apart by `tolerance`; [V]
        bool. They are those that all filters may keep, and whose sum misses the best of those that they must keep by no more."""
        z, noise = self._scaled(logits, position)
        slack = tolerance / (self.temperature or 1.0)
        best = np.max(np.where(self._keep(z, -slack), z + noise, -np.inf))
        return np.asarray(self._keep(z, slack) & (z + noise >= best - slack))

    def _scaled(self, logits: Array, position: int) -> tuple[Array, Array | float]:
        """Logits over temperature, and the noise that is added to them."""
        if self.temperature == 0:
            return logits, 0.0
        return logits / float(np.float32(self.temperature)), gumbel(self.seed, position, len(logits))

    def _keep(self, z: Array, slack: float) -> Array:
        """Which tokens survive top-k (of equals the lower ids), then top-p over what it left, then min-p; [V] bool.

        With `slack` above 0 those that may where any two of `z` are nearer or farther apart by so much, below 0 those that must.
        """
        if self.temperature == 0:
            return np.ones(len(z), bool)
        order = np.lexsort((np.arange(len(z)), -z))  # best first
        ranked, size = z[order], min(self.top_k or len(z), len(z))
        keep = np.arange(len(z)) < size
        if size < len(z):
            keep = keep & (ranked > ranked[size] - slack) if slack < 0 else keep | (ranked > ranked[size - 1] - slack)
        share = np.exp(ranked - ranked[0])
        if self.top_p < 1:
            ahead = np.searchsorted(-ranked, -ranked - slack) if slack else np.arange(len(z))
            sums = np.append(0.0, np.cumsum(share[:size]))
            before = sums[np.minimum(ahead, size)] - (share if slack < 0 else 0.0)
            odds = np.float32(self.top_p) * np.exp(slack)
            keep &= before < sums[-1] * odds / (odds + 1 - np.float32(self.top_p))
        if self.min_p > 0:
            keep &= share >= np.float32(self.min_p) * np.exp(-slack)
        keep[0] |= slack >= 0
        return keep[np.argsort(order)]


class CoupledRounds(NamedTuple):
    """What decoding with K drafts a round yields."""

    token_ids: list[int]
    rounds: list[int]
    """Accepted drafts of each decode round."""
    clear: bool
    """Whether every choice made was clear, the target's and the drafts'; else a float32 engine may differ."""


class Along(NamedTuple):
    """What decoding with K drafts a round yields where it goes on from an engine's own text, token by token, round by round."""

    token_ids: list[int]
    """The engine's wherever it may be chosen behind those before it, else what would be."""
    rounds: list[int]
    """Accepted drafts of each decode round, the engine's likewise."""
    clear: int
    """Places at which no other token may be chosen."""
    differs: bool
    """Whether some token of the engine's may be chosen and would not be by exact logits."""


def coupled_text(
    model: OracleModel,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    max_new: int,
    stop_ids: Collection[int],
    process: Process = plain,
) -> tuple[list[int], bool]:
    """The target's text without any drafting, one full forward a token, and whether every choice was clear."""
    known, all_clear = list(prompt_ids), True
    limit = min(len(known) + max_new, model.description.max_model_len)
    while len(known) < limit:
        logits = model.target_logits(model.target_states(known)[-1:])[0]
        token_id, clear = sampling.choose(process(logits, known), len(known))
        known.append(token_id)
        all_clear &= clear
        if token_id in stop_ids:
            break
    return known[len(prompt_ids) :], all_clear


def coupled_rounds(
    model: OracleModel,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    K: int,
    max_new: int,
    stop_ids: Collection[int],
    process: Process = plain,
) -> CoupledRounds:
    """Decode with up to `K` drafts a round; drafts are chosen like tokens, with the noise of the position they stand for and
    with logits processed as if the drafts before were text.

    A round drafts min(K, room - 1) tokens and accepts those that the text repeats; one that stops counts up to the stop.
    """
    token_ids, all_clear = coupled_text(model, prompt_ids, sampling, max_new, stop_ids, process)
    known, begin = [*prompt_ids, *token_ids], len(prompt_ids)
    limit = min(begin + max_new, model.description.max_model_len)
    states = model.target_states(known)
    rounds: list[int] = []
    at = begin + 1
    while at < len(known):
        drafts, clear = _draft(model, known[:at], states[: at - 1], sampling, min(K, limit - at - 1), process)
        all_clear &= all(clear)
        rounds.append(_repeated(drafts, known[at:]))
        at += rounds[-1] + 1
    return CoupledRounds(token_ids, rounds, all_clear)


def coupled_along(
    model: OracleModel,
    prompt_ids: Sequence[int],
    text: tuple[Sequence[int], Sequence[int]],
    sampling: Sampling,
    K: int,
    max_new: int,
    stop_ids: Collection[int],
    process: Process = plain,
    tolerance: float = 1e-4,
) -> Along:
    """Judge an engine's `text`, tokens and rounds, where rounding brings any two logits nearer or farther apart by `tolerance`.

    Each choice is judged behind the engine's own tokens, so that a text counts behind a close choice, too.
    """
    begin, vocab = len(prompt_ids), model.description.vocab_size
    limit = min(begin + max_new, model.description.max_model_len)
    known = [*prompt_ids, *takewhile(lambda token: 0 <= token < vocab, text[0][: limit - begin])]
    states = model.target_states(known)
    token_ids, num_clear, differs = list[int](), 0, False
    for at, row in enumerate(model.target_logits(states[begin - 1 :]), begin):
        if at == limit or (token_ids and token_ids[-1] in stop_ids):
            break
        logits = process(row, known[:at])
        token_id, clear = sampling.choose(logits, at, tolerance)
        num_clear += clear
        own = known[at] if at < len(known) else token_id
        token_ids.append(own if sampling.may(logits, at, tolerance)[own] else token_id)
        differs |= token_ids[-1] != token_id
    rounds, at = list[int](), begin + 1
    while at < len(known):
        drafts, clears = _draft(model, known[:at], states[: at - 1], sampling, min(K, limit - at - 1), process, tolerance)
        accepted, close = _repeated(drafts, known[at:]), [*clears, False].index(False)
        own = next(iter(text[1][len(rounds) :]), accepted)
        rounds.append(own if close <= min(own, accepted) and own <= len(drafts) else accepted)
        at += rounds[-1] + 1
    return Along(token_ids, rounds, num_clear, differs)


def _repeated(drafts: Sequence[int], following: Sequence[int]) -> int:
    """How many drafts the text repeats."""
    return int(np.argmin([*(a == b for a, b in zip(drafts, following, strict=False)), False]))


def _draft(
    model: OracleModel,
    known: Sequence[int],
    states: Array,
    sampling: Sampling,
    num: int,
    process: Process,
    tolerance: float = 1e-4,
) -> tuple[list[int], list[bool]]:
    """Draft `num` tokens behind `known`, recomputing all MTP rows in every pass; and which of them were clear."""
    mtp, following = model.description.mtp, list(known[1:])
    drafts, clears = list[int](), list[bool]()
    assert mtp is not None
    fed = states if mtp.feed == "pre" else model._norm(states, "norm")
    for _ in range(num):
        embedded = model.w["embed"][following].copy()
        embedded[0] *= not mtp.mask_first_position
        pair = model._norm(fed, "mtp.0.hid_norm"), model._norm(embedded, "mtp.0.emb_norm")
        joined = np.hstack(pair if mtp.order == "hidden_first" else pair[::-1])
        newest = model.block(joined @ model.w["mtp.0.proj"].T, mtp.blocks[0], "mtp.0.")[-1:]
        normed = model._norm(newest, "norm" if mtp.final_norm == "target" else "mtp.0.final_norm")
        logits = process((normed @ model.w["lm_head"].T)[0], [*known, *drafts])
        token_id, clear = sampling.choose(logits, len(known) + len(drafts), tolerance)
        drafts.append(token_id)
        clears.append(clear)
        following.append(token_id)
        fed = np.vstack([fed, newest if mtp.recycle == "pre" else normed])
    return drafts, clears


@lru_cache(maxsize=8192)
def gumbel(seed: int, position: int, vocab_size: int) -> Array:
    """Standard Gumbel noise of every token at `position`: two tokens share one Threefry counter (position, token // 2).

    With u = (bits // 2**8 + 1/2) / 2**24, the noise is -log(-log(u)).
    """
    key = seed % _WORD, seed // _WORD % _WORD
    words = np.stack(threefry(key, (position, np.arange((vocab_size + 1) // 2))), axis=1).ravel()
    u = (words[:vocab_size] // 2**8 + 0.5) / 2.0**24
    return -np.log(-np.log(u))


def threefry(key: tuple[int, int], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), on plain integers or on
    arrays of int64, which no intermediate result leaves.

    Five groups of four rounds (add, rotate, exclusive-or), each group followed by the key words in turn and its number.
    """
    keys = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x, y = (counter[0] + keys[0]) % _WORD, (counter[1] + keys[1]) % _WORD
    for group in range(1, 6):
        for distance in ((17, 29, 16, 24), (13, 15, 26, 6))[group % 2]:
            x = (x + y) % _WORD
            y = (y * 2**distance % _WORD + y // 2 ** (32 - distance)) ^ x
        x = (x + keys[group % 3]) % _WORD
        y = (y + keys[(group + 1) % 3] + group) % _WORD
    return x, y
