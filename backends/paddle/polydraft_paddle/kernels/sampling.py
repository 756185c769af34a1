"""Choice of tokens in portable Paddle operations: masks, argmax, counter-based noise and filtered sampling.

`table.py` lists the kernels. A row's choice depends only on its logits, its slot's parameters and the noise of its position.
"""

from __future__ import annotations

from typing import Any

import paddle

from polydraft.sentinels import NO_TOKEN
from polydraft_paddle import fused
from polydraft_paddle.ops import (
    Tensor,
    above,
    at,
    both,
    carried,
    choose,
    constant,
    direct,
    first_of,
    first_where,
    number,
    numbers,
    part,
    put,
    put_chosen,
)  # fmt: skip
from polydraft_paddle.words import words_at

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
FORBIDDEN = float("-inf")


def process_logits(a: Any, n: int) -> None:
    """Columns beyond the vocabulary can never be chosen."""
    if a.num_valid < a.logits.shape[1]:
        tail = a.logits[:n, a.num_valid :]
        tail.copy_(choose((a.row_slot[:n] < 0).unsqueeze(1).expand_as(tail), tail, FORBIDDEN), False)


def argmax(a: Any, n: int) -> None:
    """Highest logit, lowest id among equals; NaN rows and padding choose nothing."""
    put_chosen(a.tokens, n, *_best(part(a.logits, 0, n), part(a.row_slot, 0, n)), NO_TOKEN)


def best(logits: Tensor, row_slot: Tensor) -> Tensor:
    """The highest logit of each row, NO_TOKEN where there is none; int32 [n]."""
    return choose(*_best(logits, row_slot), NO_TOKEN)


def _best(logits: Tensor, row_slot: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows choose, bool [n], and what, int32 [n]. A row with NaN or +inf, or with nothing but -inf, does not; a sum finds
    NaN where a comparison may pass it by."""
    summed, straight = fused.has("logsumexp", logits), fused.has("argmax", logits)
    top = None if summed and straight else direct.max(logits, [1], True)
    if summed:
        sound = direct.isfinite(direct.logsumexp(logits, [1], False, False))
    else:
        total = direct.sum(logits, [1], None, False)
        sound = both(direct.isfinite(direct.reshape(top, [-1])), direct.less_equal(total, total))  # NaN is not even itself
    first = logits.argmax(axis=1, dtype="int32") if straight else first_of(direct.greater_equal(logits, top))
    return both(sound, carried(row_slot)), first


def signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


def threefry(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The upper 24 bits of both words of Threefry-2x32 with 20 rounds (Salmon et al. 2011), int32; key and counter are words in
    int32."""
    words = words_at(counter[0].place)
    k0, k1 = (words.of(k) for k in key)
    k2 = words.xor(words.xor(k0, k1), constant(PARITY, k0))
    schedule = (k0, k1, k2)
    x0, x1 = (words.add(words.of(c), k) for c, k in zip(counter, schedule[:2], strict=True))
    for block in range(5):
        for rotation in ROTATIONS[block % 2]:
            x0 = words.add(x0, x1)
            x1 = words.xor(words.rotate_left(x1, rotation), x0)
        x0 = words.add(x0, schedule[(block + 1) % 3])
        x1 = words.add(x1, schedule[(block + 2) % 3], block + 1)
    return words.upper_24(x0), words.upper_24(x1)


def gumbel(seed: Tensor, positions: Tensor, draw: int, vocab: int) -> Tensor:
    """Noise [rows, vocab] float32 for key words [rows, 2] and absolute positions [rows], all int32."""
    rows, pairs = positions.shape[0], (vocab + 1) // 2
    counter = (
        positions.unsqueeze(1).expand([rows, pairs]),
        (numbers(pairs, positions) + signed((draw << 20) % (1 << 32))).unsqueeze(0).expand([rows, pairs]),
    )
    k = paddle.stack(threefry((seed[:, :1], seed[:, 1:]), counter), axis=-1).reshape([rows, -1])[:, :vocab]
    # u = (k + 1/2) / 2**24 would round near 1, where the largest noise is made; its distance from the nearer end never does.
    lower = k < (1 << 23)
    t = (paddle.where(lower, k, (1 << 24) - 1 - k).astype("float32") + 0.5) * 2.0**-24
    return -paddle.log(-paddle.where(lower, paddle.log(t), log1p(-t)))


def log1p(x: Tensor) -> Tensor:
    """log(1 + x) of float32, as exact as `log` is: what rounding 1 + x loses is made up for (Goldberg 1991, theorem 4). Not every
    place has an operation for it."""
    sum_ = 1.0 + x
    return paddle.where(sum_ == 1.0, x, x * paddle.log(sum_) / (sum_ - 1.0))


def gumbel_noise(a: Any, n: int) -> None:
    """Noise rows for slots that sample; zeros for padding and greedy slots."""
    slots = a.row_slot[:n]
    sampling = carried(slots) & (at(a.temperature, slots) > 0)
    noise = gumbel(at(a.seed, slots), a.positions[:n] + a.ahead, a.draw, a.noise.shape[1])
    put(a.noise[:n], choose(sampling.unsqueeze(1).expand_as(noise), noise, 0.0))


def sample(a: Any, n: int) -> None:
    """Greedy rows take the best logit; the others the best of filtered logits plus noise."""
    slots, logits = a.row_slot[:n], a.logits[:n]
    greedy = best(logits, slots)
    temperature = at(a.temperature, slots)
    draws = (greedy != NO_TOKEN) & above(temperature, 0)
    z = logits / choose(draws, temperature, 1.0).unsqueeze(1)
    kept = kept_tokens(z, top_k=at(a.top_k, slots), top_p=at(a.top_p, slots), min_p=at(a.min_p, slots))
    score = choose(kept, z + a.noise[:n], FORBIDDEN)
    drawn = first_where(score >= score.max(axis=1, keepdim=True))
    put(a.tokens[:n], paddle.where(draws, drawn, greedy))


def kept_tokens(z: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which columns of each row survive top-k, then top-p, then min-p, bool [rows, V]; ties go to the lower id."""
    rows, vocab = z.shape
    order = paddle.argsort(z, axis=1, descending=True, stable=True)
    ranked = paddle.take_along_axis(z, order, 1)
    rank = numbers(vocab, z).unsqueeze(0)
    limit = choose(above(top_k, 0) & (top_k < vocab), top_k, vocab).unsqueeze(1)
    inside = (rank < limit).expand([rows, vocab])
    mass = choose(inside, paddle.exp(ranked - ranked[:, :1]), 0.0)
    exact = fixed(mass)
    until = paddle.cumsum(exact, axis=1)
    bound = share(until[:, -1:], top_p.unsqueeze(1))
    keep = inside & ((top_p >= 1.0).unsqueeze(1) | (until - exact < bound) | (rank == 0)) & (mass >= min_p.unsqueeze(1))
    return paddle.put_along_axis(paddle.zeros_like(order), order, keep.astype(order.dtype), 1) > 0


def fixed(mass: Tensor) -> Tensor:
    """`mass` [rows, V] float32, from 0 to 1, as int64 of a scale (`fixed_scale`) at which the sum of a row is exact and below
    2**62: sums of float32 are not, and not every place computes in float64."""
    return (mass * fixed_scale(mass.shape[1])).astype("int64")


def fixed_scale(count: int) -> float:
    """What a mass of 1 is in a row of `count`."""
    return 2.0 ** (62 - count.bit_length())


PARTS = 30
"""Bits behind the point of a share."""


def share(total: Tensor, part: Tensor) -> Tensor:
    """The least whole number that is not below part * total, int64, of a total below 2**62 and a part from 0 to 1 in float32."""
    factor = (paddle.clip(part, 0.0, 1.0) * 2.0**PARTS).astype("int64")
    whole = number(1 << PARTS, total)
    high = total // whole
    low = total - high * whole
    return factor * high + (factor * low + whole - number(1, total)) // whole
