"""Checks of caches and of rejection sampling (L5): committed rows do not depend on how they were computed, and texts have the
target's distribution.

Rows that the backend wrote are read back logically, which only tests do. Runs of one backend are compared with each other, so
nothing depends on another backend's arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from polydraft.conformance.chance import ALPHA, p_value, sample_size
from polydraft.conformance.check import Check, Tally, Unsupported
from polydraft.conformance.lossless_checks import K, working_dtype
from polydraft.conformance.probe import NUM_TOKENS, oracle, prompts
from polydraft.conformance.samplers import WRONG, deviation, filtered
from polydraft.conformance.serving import Ask, serve
from polydraft.conformance.target import TableProxy, Target, wrap
from polydraft.contracts.compare import EPS
from polydraft.device import Array
from polydraft.engine import Engine
from polydraft.sampling_params import SamplingParams
from polydraft.sentinels import Phase

ROUNDING: Final = 64.0
"""Of eps times the largest number of a row: how far committed rows may differ where arithmetic is not row-invariant."""
MOST_ROWS: Final = NUM_TOKENS - K
"""Rows that every text here has committed before its last window."""
TEMPERATURE, TOP_K, LENGTH = 2.0, 3, 3
"""Of the sampled texts: the prefill's token and the two behind it, from three candidates each."""
CLEAR: Final = 0.02
"""Least distance of the third and fourth logit, so that a float32 engine keeps the same candidates."""


def checks() -> Iterator[Check]:
    """The checks of caches, and the one of a distribution."""
    yield Check("L5/kv/with-and-without-drafts", _drafts)
    yield Check("L5/kv/whole-and-in-chunks", _chunks)
    yield Check("L5/sampled/distribution", _distribution, features=("rejection",))


# -- caches --------------------------------------------------------------------------------------------
Rows = dict[str, list[tuple[Array, Array]]]
"""By request: keys and values of each cache at the committed positions, [positions, heads, dim]."""


def _rows(target: Target, tally: Tally, drafts: int, **options: Any) -> Rows:
    """Committed rows of the last step in which each request still ran."""
    caches: list[Any] = []

    def table(answer: Any, device: Any) -> Any:
        del device
        return _Watched(answer, caches)

    found: Rows = {}

    def note(engine: Engine, step: int) -> None:
        del step
        logical = [one.read_logical() for one in caches]
        for slot in np.flatnonzero(engine.slots.phase == Phase.DECODE).tolist():
            request, length = engine.slots.request[slot], int(engine.slots.kv_len[slot])
            blocks = engine.ledger.table[slot][: -(-length // engine.resolved.limits.block_size)]
            if request is not None:
                found[request.id] = [tuple(_flat(half, blocks)[:length] for half in both) for both in logical]  # type: ignore[misc]

    asks = [Ask(prompt, max_new=NUM_TOKENS) for prompt in prompts(9)[6:]]
    options = {"max_num_seqs": 3, "block_size": 4, "graph": "off", "overlap": 0, "prefix_cache": False, **options}
    plugin = wrap(target.plugin, polydraft_kernels=table)
    with target.engine(plugin=plugin, draft_tokens=drafts, dtype=working_dtype(target), **options) as engine:
        serve(engine, asks, tally, each_step=note)
    return found


class _Watched(TableProxy):
    """A table whose caches are noted as they are allocated."""

    def __init__(self, inner: Any, caches: list[Any]) -> None:
        super().__init__(inner, {})
        self._caches = caches

    def allocate_cache(self, spec: Any) -> Any:
        self._caches.append(self._inner.allocate_cache(spec))
        return self._caches[-1]


def _flat(half: Array, blocks: Array) -> Array:
    """[num_blocks, block_size, heads, dim] to the rows of these blocks in order."""
    return np.asarray(half)[blocks].reshape(-1, *half.shape[2:])


def _same_rows(target: Target, tally: Tally, one: Rows, other: Rows) -> None:
    """Rows at positions that both have: equal to the bit where the backend is row-invariant, within rounding elsewhere."""
    exact, eps = target.info.capabilities.row_invariant, EPS[working_dtype(target)]
    tally.equal("requests with committed rows", sorted(one), sorted(other))
    for request in set(one) & set(other):
        least = min(len(keys) for rows in (one, other) for keys, _ in rows[request])
        tally.true(f"{MOST_ROWS} committed rows of {request} or more, got {least}", least >= MOST_ROWS)
        for number, (mine, theirs) in enumerate(zip(one[request], other[request], strict=False)):
            for half, a, b in zip(("keys", "values"), mine, theirs, strict=True):
                common = min(len(a), len(b))
                a, b = np.asarray(a[:common]), np.asarray(b[:common])  # noqa: PLW2901  the common part of both
                what = f"{half} of cache {number}, {request}"
                if exact:
                    tally.equal(what, a, b)
                else:
                    allowed = ROUNDING * eps * max(float(np.abs(b).max(initial=0.0)), 1.0)
                    tally.comparisons += int(a.size)
                    tally.true(f"{what} within {allowed:.2g}", bool((np.abs(a - b) <= allowed).all()))


def _drafts(target: Target, tally: Tally) -> None:
    """The target's rows at committed positions are the same whether they were written one by one or in windows."""
    _same_rows(target, tally, _rows(target, tally, 0), _rows(target, tally, K))


def _chunks(target: Target, tally: Tally) -> None:
    """All rows, the draft's too, are the same whether a prompt is prefilled at once and windows are long, or in chunks and they
    are short."""
    _same_rows(target, tally, _rows(target, tally, K), _rows(target, tally, 1, max_batched_tokens=3 * 2 + 2))


# -- a distribution ------------------------------------------------------------------------------------
class Sample(NamedTuple):
    """What is sampled: a prompt, the probability of each text of `LENGTH` tokens, and the size of the sample."""

    prompt: tuple[int, ...]
    texts: dict[tuple[int, ...], float]
    size: int


@cache
def sample() -> Sample:
    """Of the prompts along all of whose texts the candidates are clear, the one on which wrong samplers show most; as many texts
    as find the weakest of them."""
    clear = {prompt: texts for prompt in prompts(10) for texts in [_texts(prompt)] if texts is not None}
    prompt = max(clear, key=weakest)
    return Sample(prompt, clear[prompt], sample_size(weakest(prompt), len(clear[prompt])))


@cache
def weakest(prompt: tuple[int, ...]) -> float:
    """Least deviation of a wrong sampler from the target over the first two tokens; whole texts deviate at least as much."""
    total = dict.fromkeys(WRONG, 0.0)
    first = filtered(_logits(prompt), TEMPERATURE, TOP_K)
    for token in np.flatnonzero(first).tolist():
        known = [*prompt, token]
        drafted = oracle().draft(known, oracle().target_states(known)[:-1], 1)[1][0]
        p, q = filtered(_logits(known), TEMPERATURE, TOP_K), filtered(drafted, TEMPERATURE, TOP_K)
        for name, sampler in WRONG.items():
            total[name] += first[token] * deviation(sampler, p, q, filtered(drafted, TEMPERATURE, len(drafted)))
    return min(total.values())


def _logits(known: Sequence[int]) -> Array:
    return np.asarray(oracle().target_logits(oracle().target_states(list(known))[-1:])[0])


def _texts(prompt: tuple[int, ...]) -> dict[tuple[int, ...], float] | None:
    """Every text of `LENGTH` tokens with its probability; None where a candidate is not clear."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        before, found = found, {}
        for text, mass in before.items():
            logits = _logits([*prompt, *text])
            last, next_ = np.sort(logits)[[-TOP_K, -TOP_K - 1]]
            if last - next_ < CLEAR:
                return None
            probs = filtered(logits, TEMPERATURE, TOP_K)
            found |= {(*text, token): mass * probs[token] for token in np.flatnonzero(probs).tolist()}
    return found


def _distribution(target: Target, tally: Tally) -> None:
    """Texts sampled with verification by rejection are distributed as the target's: one chi-square of computed size."""
    (prompt, expected, size), dtype = sample(), working_dtype(target)
    if dtype != "f32":
        raise Unsupported("no f32 is declared, and in fewer bits the candidates differ")
    seen: Counter[tuple[int, ...]] = Counter()
    options: dict[str, Any] = {"draft_tokens": 2, "verify": "rejection", "max_num_seqs": 64, "block_size": 4, "graph": "off"}
    with target.engine(dtype=dtype, **options) as engine:
        for seed in range(size):
            engine.add(prompt, SamplingParams(LENGTH, temperature=TEMPERATURE, top_k=TOP_K, seed=seed, ignore_eos=True))
        while engine.has_work:
            engine.step()
            seen.update(tuple(output.token_ids) for output in engine.poll() if output.finished)
    tally.equal("texts that were sampled", sum(seen.values()), size)
    chance = p_value(seen, expected)
    tally.true(f"{size} texts are distributed as the target's (chance {chance:.2g}, wanted above {ALPHA:g})", chance > ALPHA)
