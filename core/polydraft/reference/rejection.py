"""The reference backend's rejection verification: uniforms, filtered distributions, sampled drafts and accepted windows.

The kernel table lists them; filters and noise are those of `sampling.py`. A row's distribution depends on its logits and its
slot's parameters alone, so a draft is verified against the distribution that it was sampled from.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polydraft.device import Array
from polydraft.reference.provider import Kernel, plain
from polydraft.reference.sampling import best, kept_tokens, threefry
from polydraft.sentinels import NO_TOKEN, Phase


def uniform_noise(a: Any, n: int) -> None:
    """One Threefry word a row."""
    slots = np.maximum(a.row_slot[:n], 0)
    counter = (a.positions[:n] + a.ahead).astype(np.uint32), np.full(n, a.draw << 20, np.uint32)
    with np.errstate(over="ignore"):
        seed = tuple(a.seed[slots].view(np.uint32).T)
        words, _ = threefry(seed, counter)
    a.uniforms[:n] = (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24) * (a.row_slot[:n] >= 0)


def filter_probs(a: Any, n: int) -> None:
    """A softmax of whole rows, from which the filters take out what they do not keep."""
    slots = a.row_slot[:n]
    rows = (slots >= 0).nonzero()[0]
    tokens = best(a.logits[rows], slots[rows])
    temperature = a.temperature[slots[rows]]
    drawn = rows[(tokens != NO_TOKEN) & (temperature > 0)]
    shares = _shares(a, drawn, slots[drawn])
    a.logits[rows] = 0.0
    a.logits[drawn] = shares
    certain = (tokens != NO_TOKEN) & (temperature == 0)
    a.logits[rows[certain], tokens[certain]] = 1.0


def _shares(a: Any, rows: Array, slots: Array) -> Array:
    z = a.logits[rows] / a.temperature[slots, None]
    shares = np.exp(z - z.max(axis=1, keepdims=True))
    for i, (row, slot) in enumerate(zip(z, slots, strict=True)):
        top_k, top_p, min_p = int(a.top_k[slot]), float(a.top_p[slot]), float(a.min_p[slot])
        if 0 < top_k < len(row) or top_p < 1.0 or min_p > 0.0:
            kept = kept_tokens(row, top_k, top_p, min_p)
            masked = np.zeros_like(row)
            masked[kept] = shares[i, kept]
            shares[i] = masked
    total = shares.sum(axis=1, keepdims=True, dtype=np.float64)
    result: Array = (shares / total).astype(np.float32)
    return result


def draw_draft(a: Any, n: int) -> None:
    """Draw all rows at once and file their distributions."""
    rows = (a.row_slot[:n] >= 0).nonzero()[0]
    slots = a.row_slot[rows]
    a.tokens[:n] = NO_TOKEN
    a.tokens[rows] = _drawn(a.probs[rows], a.noise[rows])
    a.draft_probs[slots, a.draft_len[slots]] = a.probs[rows]


def _drawn(weights: Array, noise: Array) -> Array:
    """Gumbel-max over the positive weights of each row; NO_TOKEN where there are none."""
    with np.errstate(divide="ignore"):
        sums = np.log(weights) + noise
    tokens = sums.argmax(axis=1)
    possible = weights[np.arange(len(tokens)), tokens] > 0
    return np.where(possible, tokens, NO_TOKEN)


def verify_rejection(a: Any, n: int) -> None:
    """Decide all drafts of all windows, cut each window at the first that is rejected, draw what ends it."""
    a.window[:n], a.window_len[:n], a.accepted[:n], a.drafted[:n] = NO_TOKEN, 0, 0, -1
    rows = ((a.slot_order[:n] >= 0) & (a.logit_len[:n] > 0)).nonzero()[0]
    if not rows.size:
        return
    slots, start, length = a.slot_order[rows], a.logit_start[rows], a.logit_len[rows]
    drafted = np.where(a.phase[slots] == int(Phase.DECODE), length - 1, -1)
    drafts, every = a.drafts[slots], np.arange(rows.size)
    accepted = _accept(a, slots, start, drafted, drafts)
    last = start + accepted
    weights, rejected = a.probs[last], (accepted < drafted).nonzero()[0]
    if rejected.size:
        place = accepted[rejected]
        if a.draft_probs is None:
            weights[rejected, drafts[rejected, place]] = 0.0
        else:
            more = np.maximum(weights[rejected] - a.draft_probs[slots[rejected], place], 0.0)
            left = more.any(axis=1)
            weights[rejected[left]] = more[left]
    window = a.window[rows]
    kept = np.arange(drafts.shape[1]) < accepted[:, None]
    window[:, :-1] = np.where(kept, drafts, NO_TOKEN)
    window[every, accepted] = _drawn(weights, a.noise[last])
    a.window[rows], a.window_len[rows], a.accepted[rows], a.drafted[rows] = window, accepted + 1, accepted, drafted


def _accept(a: Any, slots: Array, start: Array, drafted: Array, drafts: Array) -> Array:
    """Drafts of each window up to the first that its uniform rejects. Products are exact in float64, so the border is too."""
    columns = np.arange(drafts.shape[1])
    place = np.minimum(start[:, None] + columns, len(a.uniforms) - 1)
    token = np.maximum(drafts, 0)
    q = 1.0 if a.draft_probs is None else a.draft_probs[slots[:, None], columns, token]
    fits = a.uniforms[place].astype(np.float64) * q < a.probs[place, token]
    fits &= columns < drafted[:, None]
    ended: Array = np.append(fits, np.zeros((len(fits), 1), bool), axis=1).argmin(axis=1)
    return ended


KERNELS: dict[str, Kernel] = {
    function.__name__: plain(function) for function in (uniform_noise, filter_probs, draw_draft, verify_rejection)
}
"""Contract name to kernel."""
