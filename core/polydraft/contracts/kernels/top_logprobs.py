"""Defines `top_logprobs`: log probabilities of emitted tokens, their ranks, and the most likely tokens beside them.

The runner launches it behind `commit_window` in steps of which some slot wants log probabilities, and once more over prompt
rows where a slot wants those. It never looks at a row whose token was not emitted, and ranks no token that nobody asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polydraft.contracts.base import REGISTRY, Args, Array, Case, Contract, tensor
from polydraft.contracts.kernels.argmax import best_first, spaced
from polydraft.contracts.sizes import (
    MANY_TOKENS,
    SEVERAL,
    SLOTS,
    SMALL,
    TOP,
    VOCABULARY,
    WINDOW,
    Sizes,
    fitted,
    launched,
    several,
)
from polydraft.device import Buffer
from polydraft.sentinels import NO_TOKEN, PAD_SLOT


class TopLogprobsV1(Args):
    """Arguments of `top_logprobs`. Launch length: sequences.

    Logit row `logit_start + j` of a sequence chose the token at place j of its window. Tokens are ordered by logit, of equals
    the lower id first, so that the columns for k tokens begin with those for fewer. A row whose token was emitted has no NaN
    and no +inf. `num_top` is below E; where it is larger than V, columns behind the vocabulary are written as if not wanted.
    """

    logits: Buffer = tensor("NL V", "f32", "Logits; -inf: a token that cannot come.")
    slot_order: Buffer = tensor("N", "i32", "Slot of each sequence; PAD_SLOT where the launch order has ended.")
    logit_start: Buffer = tensor("N", "i32", "First logit row of each sequence.")
    out_tokens: Buffer = tensor("N W", "i32", "Tokens emitted, by sequence; the rest NO_TOKEN.")
    num_top: Buffer = tensor("B", "i32", "Most likely tokens wanted beside the emitted one, by slot; -1: no log probabilities.")
    temperature: Buffer | None = tensor(
        "B", "f32", "Divides the logits of the slot's rows; 0 or left out: nothing does.", optional=True
    )
    ids: Buffer = tensor(
        "N W E", "i32", "The emitted token, then the most likely ones, best first; the rest NO_TOKEN.", access="out", pad=NO_TOKEN
    )
    logprobs: Buffer = tensor("N W E", "f32", "Log probability of each of `ids`; 0 where there is none.", access="out", pad=0)
    ranks: Buffer = tensor("N W", "i32", "Place of the emitted token in that order, from 1 on.", access="out", pad=0)


def log_softmax(z: Array) -> list[float]:
    """Return the log probabilities of a row of logits; -inf stays -inf."""
    values = z.tolist()
    best = max(values)
    total = math.log(sum(math.exp(v - best) for v in values))
    return [v - best - total for v in values]


def divided(a: Any, row: int, slot: int) -> Array:
    """Return a row of logits at the temperature of its slot."""
    cold = a.temperature is None or a.temperature[slot] == 0
    return np.array(a.logits[row] if cold else a.logits[row] / a.temperature[slot])


def golden(a: Any, n: int) -> None:
    """Row by row of the windows of those who want it: a softmax, a sort, and the columns asked for."""
    for i, slot in enumerate(a.slot_order[:n]):
        a.ids[i], a.logprobs[i], a.ranks[i] = NO_TOKEN, 0.0, 0
        if slot < 0 or a.num_top[slot] < 0:
            continue
        for j, token in enumerate(a.out_tokens[i]):
            if token == NO_TOKEN:
                continue
            z = divided(a, a.logit_start[i] + j, slot)
            logprobs = log_softmax(z)
            order = best_first(z)
            a.ranks[i, j] = 1 + order.index(token)
            for place, v in enumerate([token, *order[: a.num_top[slot]]]):
                a.ids[i, j, place], a.logprobs[i, j, place] = v, logprobs[v]


def scale(a: Any, n: int) -> Mapping[str, Array]:
    """1 + the largest finite magnitude of the row: the logits carry an absolute error of that size, and so does their sum."""
    magnitude = np.ones((len(a.slot_order), a.out_tokens.shape[1], 1))
    for i, slot in enumerate(a.slot_order[:n]):
        for j, token in enumerate(a.out_tokens[i]):
            if slot >= 0 and a.num_top[slot] >= 0 and token != NO_TOKEN:
                z = divided(a, a.logit_start[i] + j, slot)
                magnitude[i, j] += np.abs(z[np.isfinite(z)]).max(initial=0.0)
    return {"logprobs": magnitude}


Window = tuple[int, Sequence[int]]
"""Slot of a sequence and the tokens that it emitted."""


def _case(
    name: str, logits: Array, windows: Sequence[Window], num_top: Sequence[int], *, n: int | None = None,
    width: int = 3, columns: int = 4, start: Sequence[int] | None = None, temperature: Sequence[float] | None = None,
) -> Case:  # fmt: skip
    """Sequence i takes `width` rows from `start[i]` on, by default one behind the other."""
    count = len(windows)
    arrays: dict[str, Any] = {"logits": np.asarray(logits, np.float32)}
    arrays["slot_order"] = np.array([slot for slot, _ in windows], np.int32)
    arrays["logit_start"] = np.array(range(0, width * count, width) if start is None else start, np.int32)
    arrays["out_tokens"] = np.array([[*t, *[NO_TOKEN] * (width - len(t))] for _, t in windows], np.int32).reshape(count, width)
    arrays["num_top"] = np.array(num_top, np.int32)
    arrays["temperature"] = None if temperature is None else np.array(temperature, np.float32)
    outputs = {"ids": ((count, width, columns), "i32"), "logprobs": ((count, width, columns), "f32")}
    return Case(name, arrays, {}, count if n is None else n, {**outputs, "ranks": ((count, width), "i32")})


def cases() -> Iterator[Case]:
    """Named cases of `top_logprobs`."""
    rng = np.random.default_rng(51)
    logits = spaced(rng, 12, 9)
    windows = [(2, (1, 5, 0)), (0, (3,)), (3, (8, 2))]
    yield _case("windows_of_several_lengths", logits, windows, [3, 3, 2, 1])
    yield _case("only_the_emitted_token", logits, windows, [0, 0, 0, 0])
    yield _case("as_many_as_each_slot_wants", logits, windows, [1, 3, 0, 2])
    yield _case("one_of_them_wants_none", logits, windows, [2, 3, -1, 3])
    yield _case("order_shorter_than_the_launch", logits, [*windows, (PAD_SLOT, ())], [3, 3, 2, 1])
    yield _case("beyond_the_launch_length", logits, windows, [3, 3, 2, 1], n=2)
    yield _case("nothing_emitted", logits, [(1, ()), (0, (4,))], [2, 2])
    yield _case("windows_with_fewer_rows_than_places", logits, windows, [3, 3, 2, 1], start=(4, 0, 9))
    yield _case("stale_token_of_a_slot_past_the_end", logits, [(1, (2,)), (PAD_SLOT, (3, 4))], [3, 3])
    ties = np.zeros((6, 7), np.float32)
    ties[0, [2, 5, 6]], ties[1, [1, 4]], ties[2] = 2.0, -3.0, -1.5
    ties[3, [0, 6]], ties[4, 3] = 1.0, 4.0
    equal = [(0, (5, 4, 6)), (1, (6, 0, 2))]
    for k in (1, 2, 3, 5):
        yield _case(f"lower_ids_first_among_equals_for_{k}", ties, equal, [k, k], columns=7)
    far = logits.copy()
    far[0, 4], far[1], far[2, 5:] = 90, far[1] - 300, -np.inf
    yield _case("far_apart_and_below_zero", far, [(0, (4, 1, 2)), (1, (2,))], [3, 3])
    yield _case("forbidden_tokens_come_last", far, [(0, (0, 0, 7)), (1, (6, 5))], [5, 5], columns=10)
    one = np.full((2, 9), -np.inf, np.float32)
    one[0, 6], one[1, 0] = 2, -1
    yield _case("certain_token", one, [(0, (6, 0))], [2], width=2)
    yield _case("more_than_the_vocabulary", logits[:, :3].copy(), [(1, (1, 2)), (0, (0,))], [4, 3], columns=5)
    warm = [(2, (1, 5, 0)), (0, (3, 1)), (1, (8, 2))]
    yield _case("temperature_of_each_slot", logits, warm, [2, 2, 2], temperature=(0.5, 0.0, 3.0))
    wide = spaced(rng, 2, 1030)
    yield _case("more_columns_than_a_tile", wide, [(0, (1029, 512))], [6], width=2, columns=8)
    yield _case("window_of_one", logits, [(1, (2,)), (0, (4,)), (2, (0,))], [2, 1, 0], width=1)
    yield _case("nothing_to_do", logits, windows, [3, 3, 2, 1], n=0)


def generate(rng: np.random.Generator, sizes: Sizes = SMALL) -> Case:
    """Random windows of slots in random order; every value of a row stands apart, or is tied exactly."""
    size, width, vocab, columns = (int(v) for v in rng.integers((1, 1, 2, 1), (5, 4, 30, 6)))
    size, width, columns = fitted(sizes, N=min(several(sizes, size), sizes.get("B", SEVERAL)), W=width, E=columns)
    (vocab,) = fitted(sizes, V=max(vocab, columns))
    width = min(width, 2) if vocab > MANY_TOKENS else width
    logits = spaced(rng, size * width, vocab)
    for row in logits:
        if rng.random() < 0.3:
            row[rng.integers(vocab)] = row.max()
    slots = max(size, sizes.get("B", 0))
    order = [int(s) if rng.random() < 0.85 else PAD_SLOT for s in rng.permutation(slots)[:size]]
    windows = [(slot, [int(t) for t in rng.integers(0, vocab, rng.integers(0, width + 1))]) for slot in order]
    num_top = [int(k) for k in rng.integers(-1, columns, slots)]
    if sizes:  # a whole window, with all columns
        windows[0] = slots - 1, [int(t) for t in rng.integers(0, vocab, width)]
        num_top[-1] = columns - 1
    temperature = [float(t) for t in rng.choice([0.0, 0.7, 1.0, 2.0], slots)] if rng.random() < 0.5 else None
    n = launched(rng, sizes, size)
    return _case("random", logits, windows, num_top, n=n, width=width, columns=columns, temperature=temperature)


CONTRACT = REGISTRY.add(
    Contract(
        name="top_logprobs",
        version=1,
        unit="any",
        args=TopLogprobsV1,
        golden=golden,
        cases=cases,
        generate=generate,
        doc="Log probability and rank of every emitted token, and the most likely tokens of its row.",
        source="OpenAI's logprobs and top_logprobs; the ranks are vLLM's, the order of equals is fixed.",
        tolerance={"logprobs": 4.0},
        scale=scale,
        feature="logprobs",
        grows={"N": SLOTS, "W": WINDOW, "V": VOCABULARY, "E": TOP, "B": SLOTS},
        independent=("N",),
    )
)
