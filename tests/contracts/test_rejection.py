"""Rejection verification, exactly: the distribution that the kernels put out is measured with given numbers, not sampled.

The tests prove that golden and reference are lossless and that the classic wrong samplers are not. No random token is drawn:
uniforms and noise are given, and moved until a decision flips.

Whether a draft x is accepted is a threshold in the uniform, so bisection over the 2**24 uniforms there are finds its chance;
whether a token is drawn is a threshold in its noise, so bisection finds every weight. With the drafts' own distribution they
give the whole output: sum over x of q(x) (a(x) [x] + (1 - a(x)) r_x). It has to be p.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from polydraft.conformance.harness import deliver, run_golden
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Limits
from polydraft.contracts.compare import compare
from polydraft.contracts.inputs import arrays, default_cases, namespace
from polydraft.reference.table import kernels
from polydraft.sentinels import NO_TOKEN, Phase
from tests.support.wrong_samplers import VERIFIERS

Array = NDArray[Any]
Kernel = Callable[[Any, int], None]
Launch = Callable[[str, Any, int], None]
LIMITS = Limits(1, 1, 1, 2, 1, 1, 1, 1, 1, 1)
"""None of these kernels needs them."""
EXACT = 1e-5
"""Total variation that float32 and bisection leave."""


def by_golden(name: str, a: Any, n: int) -> None:
    REGISTRY[name].golden(a, n)


def by_reference(name: str, a: Any, n: int) -> None:
    kernels(row_invariant=False)[name](a, LIMITS)(n)


@pytest.fixture(params=[by_golden, by_reference], ids=["golden", "reference"])
def launch(request: pytest.FixtureRequest) -> Launch:
    function: Launch = request.param
    return function


# -- tables by hand ----------------------------------------------------------------------------------------


def windows(p: list[Any], q: list[Any] | None, drafts: list[int], uniforms: list[float], noise: Any = None) -> Any:
    """Slot 0 decodes these drafts; row j of p decides draft j."""
    vocab, count = len(p[0]), len(drafts)
    given = np.zeros((len(p), vocab), np.float32) if noise is None else np.array(noise, np.float32)
    return SimpleNamespace(
        probs=np.array(p, np.float32), uniforms=np.array([*uniforms, 0.9], np.float32), noise=given,
        draft_probs=None if q is None else np.array([q], np.float32).reshape(1, count, vocab),
        slot_order=np.zeros(1, np.int32), phase=np.array([Phase.DECODE], np.int32), logit_start=np.zeros(1, np.int32),
        logit_len=np.array([count + 1], np.int32), drafts=np.array([drafts], np.int32).reshape(1, count),
        window=np.full((1, count + 1), 77, np.int32), window_len=np.full(1, 77, np.int32), accepted=np.full(1, 77, np.int32),
        drafted=np.full(1, 77, np.int32),
    )  # fmt: skip


P, Q, R = [0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.125, 0.125], [0.0, 0.125, 0.25, 0.625]


@pytest.mark.parametrize(
    ("drafts", "uniforms", "window", "accepted"),
    [
        # p has more than q at 0 (a quarter) and 2 (an eighth); drafts 0 and 2 are always accepted, 1 half of the time, 3 never.
        ([0, 0], [0.999, 0.999], [0, 0, 3], 2),
        ([1, 1], [0.499, 0.499], [1, 1, 3], 2),
        ([1, 1], [0.499, 0.5], [1, 0, NO_TOKEN], 1),
        ([1, 1], [0.5, 0.0], [0, NO_TOKEN, NO_TOKEN], 0),
        ([2, 3], [0.999, 0.0], [2, 0, NO_TOKEN], 1),
        ([], [], [3], 0),
    ],
)
def test_windows_by_hand(launch: Launch, drafts: list[int], uniforms: list[float], window: list[int], accepted: int) -> None:
    a = windows([P] * len(drafts) + [R], [Q] * len(drafts), drafts, uniforms)
    launch("verify_rejection", a, 1)
    assert (a.window[0].tolist(), a.accepted[0], a.window_len[0], a.drafted[0]) == (window, accepted, accepted + 1, len(drafts))


@pytest.mark.parametrize(
    ("noise", "token"),
    [
        # What p has more than q weighs 2 : 1 for tokens 0 and 2, so token 2 needs log(2) = 0.693 more noise.
        ([0, 9, 0.69, 9], 0), ([0, 9, 0.70, 9], 2), ([-0.69, 9, 0, 9], 0), ([-0.70, 9, 0, 9], 2),
    ],
)  # fmt: skip
def test_the_token_behind_a_rejected_draft_by_hand(launch: Launch, noise: list[float], token: int) -> None:
    a = windows([P, R], [Q], [1], [0.75], [noise, [0, 0, 0, 0]])
    launch("verify_rejection", a, 1)
    assert a.window[0].tolist() == [token, NO_TOKEN]


@pytest.mark.parametrize(("uniform", "window"), [(0.249, [1, 3]), (0.25, [0, -1])])
def test_a_certain_draft_is_accepted_with_the_targets_probability(launch: Launch, uniform: float, window: list[int]) -> None:
    a = windows([P, R], None, [1], [uniform])
    launch("verify_rejection", a, 1)
    assert a.window[0].tolist() == window


def test_uniforms_are_the_upper_bits_of_threefry(launch: Launch) -> None:
    """The first known answer of Random123 (key and counter 0) is 6b200159 99ba4efe."""
    a = SimpleNamespace(row_slot=np.array([0, -1], np.int32), positions=np.array([-2, -2], np.int32), ahead=2, draw=0)
    a.seed, a.uniforms = np.zeros((1, 2), np.uint32), np.full(3, 77, np.float32)
    launch("uniform_noise", a, 2)
    assert a.uniforms.tolist() == [0x6B2001 / 2**24, 0.0, 77.0]


FIFTHS = [0.1, 0.5, 0.15, 0.25]


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ({}, FIFTHS),
        ({"temperature": 0.5}, [0.01 / 0.345, 0.25 / 0.345, 0.0225 / 0.345, 0.0625 / 0.345]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.76}, [0, 0.5 / 0.9, 0.15 / 0.9, 0.25 / 0.9]),
        ({"min_p": 0.31}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 3, "top_p": 0.6, "min_p": 0.6}, [0, 1, 0, 0]),
        ({"top_k": 2, "temperature": 0.5}, [0, 0.8, 0, 0.2]),
    ],
)
def test_filtered_probabilities_by_hand(launch: Launch, filters: dict[str, float], wanted: list[float]) -> None:
    a = filtered(launch, np.log([FIFTHS, FIFTHS]), **filters)
    np.testing.assert_allclose(a, [wanted, wanted], atol=1e-6)


# -- measuring ---------------------------------------------------------------------------------------------


def filtered(launch: Launch, logits: Array, **filters: float) -> Array:
    """`filter_probs` of rows of one slot."""
    a = SimpleNamespace(logits=np.array(logits, np.float32), row_slot=np.zeros(len(logits), np.int32))
    for name, value in {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}.items():
        setattr(a, name, np.array([value], np.int32 if name == "top_k" else np.float32))
    launch("filter_probs", a, len(logits))
    found: Array = a.logits
    return found


def weights(draw: Callable[[Array], Array], rows: int, vocab: int) -> Array:
    """Distribution [rows, vocab] that `draw(noise)` draws from, by moving each token's noise against that of the row's best."""
    best = draw(np.zeros((rows, vocab), np.float32))
    log_weights = np.full((rows, vocab), -np.inf)
    log_weights[np.arange(rows), best] = 0.0
    for v in range(vocab):
        low, high = np.zeros(rows), np.full(rows, 30.0)
        for _ in range(30):
            noise, middle = np.full((rows, vocab), -90.0, np.float32), (low + high) / 2
            noise[np.arange(rows), best] = 0.0
            noise[:, v] = middle
            wins = draw(noise) == v
            low, high = np.where(wins, low, middle), np.where(wins, middle, high)
        found = (high < 29) & (best != v)
        log_weights[found, v] = -high[found]
    shares = np.exp(log_weights)
    return shares / shares.sum(axis=1, keepdims=True)


class Pair(NamedTuple):
    """One position: the target's probabilities, those the draft is drawn with, and those it is said to be drawn with."""

    p: Array
    drawn: Array
    filed: Array


def verify(kernel: Kernel, pair: Pair, uniforms: Array, noise: Array, *, certain: bool = False) -> Any:
    """Every token of the vocabulary as the one draft of a sequence, all at once; the row behind the draft is uniform."""
    vocab = len(pair.p)
    a = SimpleNamespace(
        probs=np.empty((2 * vocab, vocab), np.float32), noise=np.zeros((2 * vocab, vocab), np.float32),
        uniforms=np.full(2 * vocab, 0.5, np.float32), draft_probs=np.tile(pair.filed.astype(np.float32), (vocab, 1, 1)),
        slot_order=np.arange(vocab, dtype=np.int32), phase=np.full(vocab, Phase.DECODE, np.int32),
        logit_start=2 * np.arange(vocab, dtype=np.int32), logit_len=np.full(vocab, 2, np.int32),
        drafts=np.arange(vocab, dtype=np.int32)[:, None], window=np.empty((vocab, 2), np.int32),
        **{name: np.empty(vocab, np.int32) for name in ("window_len", "accepted", "drafted")},
    )  # fmt: skip
    a.probs[0::2], a.probs[1::2], a.uniforms[0::2], a.noise[0::2] = pair.p, 1 / vocab, uniforms, noise
    if certain:
        a.draft_probs = None
    kernel(a, vocab)
    return a


def output(kernel: Kernel, pair: Pair, **how: bool) -> Array:
    """The distribution of the first token of a window, to about one part in a million."""
    vocab = len(pair.p)
    none = np.zeros((vocab, vocab), np.float32)
    low, high = np.zeros(vocab, np.int64), np.full(vocab, 1 << 24)  # uniforms below `low` are accepted, from `high` on not
    while (low < high).any():
        middle = (low + high) // 2
        accepted = verify(kernel, pair, (middle / 2**24).astype(np.float32), none, **how).accepted == 1
        low, high = np.where(accepted & (low < high), middle + 1, low), np.where(accepted, high, np.minimum(middle, high))
    chance = low / 2**24
    last = np.full(vocab, 1 - 2.0**-24, np.float32)
    behind = weights(lambda noise: verify(kernel, pair, last, noise, **how).window[:, 0].copy(), vocab, vocab)
    accepted_mass = pair.drawn * chance
    result: Array = accepted_mass + (pair.drawn - accepted_mass) @ behind
    return result


def distance(x: Array, y: Array) -> float:
    """Total variation."""
    return float(np.abs(x - y).sum() / 2)


def pairs() -> list[Pair]:
    """Distributions alike, unlike, peaked, and with tokens that only one of the two can have."""
    rng = np.random.default_rng(2023)
    found = []
    for sharpness in (0.5, 1.0, 1.0, 2.0, 3.0):
        p, q = (np.exp(sharpness * rng.standard_normal(5)) * keep for keep in ([1, 1, 1, 0, 1], [1, 0, 1, 1, 1]))
        p, q = (x.astype(np.float32).astype(np.float64) for x in (p / p.sum(), q / q.sum()))
        found.append(Pair(p, q, q))
    p = np.array([0.5, 0.25, 0.125, 0.125, 0])
    return [*found, Pair(p, p, p), Pair(p, p[::-1].copy(), p[::-1].copy())]


def test_the_output_is_distributed_as_the_target(launch: Launch) -> None:
    for pair in pairs():
        assert distance(output(lambda a, n: launch("verify_rejection", a, n), pair), pair.p) < EXACT


def test_certain_drafts_are_lossless_wherever_they_come_from(launch: Launch) -> None:
    for pair in pairs():
        assert distance(output(lambda a, n: launch("verify_rejection", a, n), pair, certain=True), pair.p) < EXACT


def test_the_token_behind_an_accepted_window_is_distributed_as_the_target(launch: Launch) -> None:
    for pair in pairs():

        def draw(noise: Array, pair: Pair = pair) -> Array:
            a = windows([pair.p, pair.p], [[0.2] * 5], [0], [0.0], [np.zeros(5), noise[0]])
            launch("verify_rejection", a, 1)
            assert a.accepted[0] == 1
            return np.array(a.window[:, 1])

        assert distance(weights(draw, 1, 5)[0], pair.p) < EXACT


def draft(launch: Launch, q: Array, noise: Array) -> tuple[Array, Array]:
    """Tokens that `draw_draft` draws from one distribution with rows of noise, and what it files."""
    rows = len(noise)
    a = SimpleNamespace(
        probs=np.tile(q.astype(np.float32), (rows, 1)), noise=noise, row_slot=np.arange(rows, dtype=np.int32),
        draft_len=np.zeros(rows, np.int32), tokens=np.empty(rows, np.int32), draft_probs=np.empty((rows, 1, len(q)), np.float32),
    )  # fmt: skip
    launch("draw_draft", a, rows)
    return a.tokens, a.draft_probs[:, 0]


LOGITS = np.array([[2.0, 1.2, 0.4, -0.1, -1.0], [1.0, 1.9, 0.3, 0.6, -2.0]])
"""Of the target and of the draft."""
FILTERS = {"temperature": 0.8, "top_k": 3, "top_p": 0.8}


def chain(launch: Launch, **filed: float) -> Pair:
    """From logits to a pair, by the kernels: what the draft is drawn with is measured. `filed` are the filters of what is
    said of it; by default those that it went through."""
    p, q = filtered(launch, LOGITS, **FILTERS)
    drawn = weights(lambda noise: draft(launch, q, noise)[0], 1, 5)[0]
    other = filtered(launch, LOGITS[1:], **filed)[0] if filed else draft(launch, q, np.zeros((1, 5), np.float32))[1][0]
    return Pair(p.astype(np.float64), drawn, other)


def test_drafts_are_drawn_with_what_is_filed(launch: Launch) -> None:
    pair = chain(launch)
    assert distance(pair.drawn, pair.filed) < EXACT
    assert (pair.filed > 0).sum() == 2
    assert distance(output(lambda a, n: launch("verify_rejection", a, n), pair), pair.p) < EXACT


# -- the classic wrong samplers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_wrong_sampler_is_measured(name: str) -> None:
    found = [distance(output(VERIFIERS[name], pair), pair.p) for pair in pairs() if distance(pair.p, pair.drawn) > 0]
    assert min(found) > 1000 * EXACT, found


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_wrong_sampler_fails_the_default_cases(name: str) -> None:
    """The very comparison that a backend's kernel is held to; several cases notice."""
    contract, noticed = REGISTRY["verify_rejection"], 0
    for case in default_cases(contract):
        a = namespace(contract, case)
        VERIFIERS[name](a, case.n)
        noticed += not compare(contract, case, deliver(contract, case, arrays(contract, a)), run_golden(contract, case)).ok
    assert noticed >= 5


def test_q_before_filtering_is_measured(launch: Launch) -> None:
    """Drafts go through the filters, but what is filed of them has not."""
    for filed in ({"temperature": 0.8}, {"temperature": 0.8, "top_k": 3}, {"top_k": 3, "top_p": 0.8}):
        wrong = chain(launch, **filed)
        assert distance(output(lambda a, n: launch("verify_rejection", a, n), wrong), wrong.p) > 1000 * EXACT, filed
