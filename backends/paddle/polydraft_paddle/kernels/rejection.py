"""Rejection verification in portable Paddle operations: uniforms, filtered distributions, sampled drafts, accepted windows.

`table.py` lists the kernels. Filters and noise are those of `sampling.py`, so a draft is verified against the distribution that
it was sampled from.
"""

from __future__ import annotations

from typing import Any

import paddle

from polydraft.sentinels import NO_TOKEN, Phase
from polydraft_paddle.kernels.sampling import FORBIDDEN, best, fixed, fixed_scale, kept_tokens, signed, threefry
from polydraft_paddle.ops import Tensor, at, choose, first_where, numbers, pick, put, scatter_rows
from polydraft_paddle.provider import Kernel, plain


def uniform_noise(a: Any, n: int) -> None:
    """One Threefry word a row."""
    slots = a.row_slot[:n]
    seed, positions = at(a.seed, slots), a.positions[:n] + a.ahead
    counter = positions, paddle.full_like(positions, signed((a.draw << 20) % (1 << 32)))
    first, _ = threefry((seed[:, 0], seed[:, 1]), counter)
    put(a.uniforms[:n], choose(slots >= 0, first.astype("float32") * 2.0**-24, 0.0))


def filter_probs(a: Any, n: int) -> None:
    """A softmax over what the filters keep; certainty for greedy slots; nothing for broken rows."""
    slots, logits = a.row_slot[:n], a.logits[:n]
    rows, vocab = logits.shape
    token = best(logits, slots)
    sound, temperature = token != NO_TOKEN, at(a.temperature, slots)
    drawn = sound & (temperature > 0)
    z = logits / choose(drawn, temperature, 1.0).unsqueeze(1)
    kept = kept_tokens(z, top_k=at(a.top_k, slots), top_p=at(a.top_p, slots), min_p=at(a.min_p, slots))
    # Paddle's exp of -inf on the CPU is a denormal number, not 0.
    mass = choose(kept & (z > FORBIDDEN), paddle.exp(z - z.max(axis=1, keepdim=True)), 0.0)
    total = fixed(mass).sum(axis=1, keepdim=True).astype("float32") * (1.0 / fixed_scale(vocab))
    shares = mass / total
    certain = (numbers(vocab, slots).unsqueeze(0) == token.unsqueeze(1)).astype("float32")
    result = paddle.where(drawn.unsqueeze(1).expand([rows, vocab]), shares, certain)
    logits.copy_(paddle.where((slots >= 0).unsqueeze(1).expand([rows, vocab]), result, logits), False)


def draw_draft(a: Any, n: int) -> None:
    """Draw all rows at once and file their distributions."""
    slots, probs = a.row_slot[:n], a.probs[:n]
    put(a.tokens[:n], choose(slots >= 0, drawn_tokens(probs, a.noise[:n]), NO_TOKEN))
    num_drafts, vocab = a.draft_probs.shape[1:]
    place = paddle.clip(slots, min=0) * num_drafts + at(a.draft_len, slots)
    scatter_rows(a.draft_probs.view([-1, vocab]), place, probs, slots >= 0)


def drawn_tokens(weights: Tensor, noise: Tensor) -> Tensor:
    """Gumbel-max over the positive weights of each row, lowest id of equals; NO_TOKEN where there are none."""
    score = choose(weights > 0, paddle.log(weights) + noise, FORBIDDEN)
    token = first_where((score >= score.max(axis=1, keepdim=True)) & (weights > 0))
    return choose((weights > 0).any(axis=1), token, NO_TOKEN)


def verify_rejection(a: Any, n: int) -> None:
    """Decide all drafts of all windows, cut each window at the first that is rejected, draw what ends it."""
    slots = a.slot_order[:n]
    width, vocab = a.window.shape[1], a.probs.shape[1]
    length = choose(slots >= 0, a.logit_len[:n], 0)
    active = length > 0
    drafted = choose((at(a.phase, slots) == int(Phase.DECODE)) & active, length - 1, -1)
    drafts = at(a.drafts, slots)
    columns = numbers(width, slots).unsqueeze(0)
    start = a.logit_start[:n]
    accepted = _accepted(a, slots, start, drafted, drafts)

    last = paddle.clip(start + accepted, max=a.probs.shape[0] - 1)
    p = paddle.gather(a.probs, last)
    rows = numbers(n, slots)
    rejected = active & (accepted < drafted)
    q = _draft_rows(a, slots, accepted, pick(drafts, rows, accepted), vocab)
    more = paddle.clip(p - q, min=0.0)
    leftover = (rejected & (more > 0).any(axis=1)).unsqueeze(1).expand_as(p)
    token = drawn_tokens(paddle.where(leftover, more, p), paddle.gather(a.noise, last))

    padded = paddle.concat([drafts, paddle.zeros_like(drafts[:, :1])], axis=1)
    window = choose(columns < accepted.unsqueeze(1), padded, NO_TOKEN)
    ends = (columns == accepted.unsqueeze(1)) & active.unsqueeze(1)
    put(a.window[:n], paddle.where(ends, token.unsqueeze(1).expand_as(window), window))
    put(a.window_len[:n], choose(active, accepted + 1, 0))
    put(a.accepted[:n], accepted)
    put(a.drafted[:n], drafted)


def _accepted(a: Any, slots: Tensor, start: Tensor, drafted: Tensor, drafts: Tensor) -> Tensor:
    """Drafts of each window up to the first that its uniform rejects. The border is exact."""
    count, num_drafts = drafts.shape
    places = numbers(num_drafts, slots).unsqueeze(0)
    row = paddle.clip(start.unsqueeze(1) + places, max=a.probs.shape[0] - 1)
    p = pick(a.probs, row, drafts)
    q = paddle.ones_like(p)
    if a.draft_probs is not None:
        flat = a.draft_probs.view([-1, a.draft_probs.shape[2]])
        q = pick(flat, paddle.clip(slots, min=0).unsqueeze(1) * num_drafts + places, drafts)
    uniforms = paddle.gather(a.uniforms, row.reshape([-1])).reshape([count, num_drafts])
    fits = product_below(uniforms, q, p) & (places < drafted.unsqueeze(1))
    return paddle.cumprod(fits.astype("int32"), dim=1).sum(axis=1, dtype="int32")


def product_below(x: Tensor, y: Tensor, bound: Tensor) -> Tensor:
    """Where x * y < bound, of float32 from 0 to 1, for the exact product: where the rounded one equals the bound, what
    rounding has taken away decides, which is exact as well (Dekker 1971)."""
    product = x * y
    (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
    lost = ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low
    return (product < bound) | ((product <= bound) & (lost < 0.0))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of half as many digits whose sum is `x`."""
    wide = x * (2.0**12 + 1.0)
    high = wide - (wide - x)
    return high, x - high


def _draft_rows(a: Any, slots: Tensor, place: Tensor, draft: Tensor, vocab: int) -> Tensor:
    """The distribution that the draft at `place` of each sequence was drawn from; certainty where none is kept. [n, V]"""
    if a.draft_probs is None:
        return (numbers(vocab, slots).unsqueeze(0) == draft.unsqueeze(1)).astype("float32")
    num_drafts = a.draft_probs.shape[1]
    flat = a.draft_probs.view([-1, vocab])
    return paddle.gather(flat, paddle.clip(slots, min=0) * num_drafts + paddle.clip(place, max=num_drafts - 1))


KERNELS: dict[str, Kernel] = {f.__name__: plain(f) for f in (uniform_noise, filter_probs, draw_draft, verify_rejection)}
"""Contract name to kernel."""
