"""The reference backend's log probabilities: of emitted tokens, of drafts, of prompts, and their packing into records.

The kernel table lists them. A row's numbers depend only on its logits and on what its slot requests, not on its neighbours. No
row is ranked for a request that asked for the emitted token alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polydraft.contracts.layout import LOGPROB_VERSION, LogprobEntry, LogprobHeader, LogprobRow, entry_words, record_words
from polydraft.device import Array
from polydraft.reference.provider import Kernel, plain
from polydraft.sentinels import NO_ROW, NO_TOKEN, PAD_SLOT


def _wanting(a: Any, n: int) -> Array:
    """Sequences below the launch length whose slot wants log probabilities."""
    return _of_wanting(a, a.slot_order[:n])


def _of_wanting(a: Any, slots: Array) -> Array:
    """Places of `slots` that name one that wants log probabilities."""
    wanting: Array = ((slots >= 0) & (a.num_top[np.maximum(slots, 0)] >= 0)).nonzero()[0]
    return wanting


def keep_logits(a: Any, n: int) -> None:
    """Copy the rows of those who want it."""
    rows = _of_wanting(a, a.row_slot[:n])
    a.kept[:n] = 0.0
    a.kept[rows] = a.logits[rows]


def forbid_filtered(a: Any, n: int) -> None:
    """All rows of those who want it and have filters, at once."""
    filtered = (a.temperature != 0) & ((a.top_k > 0) | (a.top_p < 1) | (a.min_p > 0))
    rows = _of_wanting(a, a.row_slot[:n])
    rows = rows[filtered[a.row_slot[rows]]]
    a.logits[rows] = np.where(a.probs[rows] == 0, -np.inf, a.logits[rows])


def top_logprobs(a: Any, n: int) -> None:
    """All rows of emitted tokens at once; only the ranking of the most likely goes row by row."""
    a.ids[:n], a.logprobs[:n], a.ranks[:n] = NO_TOKEN, 0.0, 0
    wanting = _wanting(a, n)
    which, place = (a.out_tokens[wanting] != NO_TOKEN).nonzero()
    if not which.size:
        return
    seqs = wanting[which]
    slots, tokens = a.slot_order[seqs], a.out_tokens[seqs, place]
    z = a.logits[a.logit_start[seqs] + place]
    if a.temperature is not None:
        warm = a.temperature[slots]
        z /= np.where(warm > 0, warm, np.float32(1.0))[:, None]
    logprobs = _log_softmax(z)
    rows = np.arange(len(z))
    own = z[rows, tokens]
    before = np.arange(z.shape[1]) < tokens[:, None]
    a.ranks[seqs, place] = 1 + (z > own[:, None]).sum(axis=1) + ((z == own[:, None]) & before).sum(axis=1)
    a.ids[seqs, place, 0], a.logprobs[seqs, place, 0] = tokens, logprobs[rows, tokens]
    counts = np.minimum(a.num_top[slots], z.shape[1])
    for row in (counts > 0).nonzero()[0].tolist():
        best = most_likely(z[row], int(counts[row]))
        at = seqs[row], place[row], slice(1, 1 + len(best))
        a.ids[at], a.logprobs[at] = best, logprobs[row, best]


def _log_softmax(z: Array) -> Array:
    shifted = z - z.max(axis=1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    logprobs: Array = (shifted - total).astype(np.float32)
    return logprobs


def most_likely(z: Array, count: int) -> Array:
    """The ids of the `count` highest logits, best first, of equals the lower ids first; count is at most the row's length."""
    if count < len(z):
        least = np.partition(z, len(z) - count)[len(z) - count]
        above = (z > least).nonzero()[0]
        kept = np.concatenate((above, (z == least).nonzero()[0][: count - len(above)]))  # of those tied for the last place
    else:
        kept = np.arange(len(z))
    order: Array = kept[np.lexsort((kept, -z[kept]))]
    return order


def draft_logprobs(a: Any, n: int) -> None:
    """All drafts of those who want it at once."""
    rows = _of_wanting(a, a.row_slot[:n])
    rows = rows[a.tokens[rows] != NO_TOKEN]
    if not rows.size:
        return
    slots, tokens = a.row_slot[rows], a.tokens[rows]
    if a.given == "probs":
        logprobs = np.log(a.logits[rows, tokens])
    else:
        logprobs = _log_softmax(a.logits[rows])[np.arange(len(rows)), tokens]
    a.draft_logprobs[slots, a.draft_len[slots]] = logprobs


def draft_top_logprobs(a: Any, n: int) -> None:
    """The logarithms of all rows at once; only the ranking goes row by row."""
    rows = _of_wanting(a, a.row_slot[:n])
    rows = rows[a.tokens[rows] != NO_TOKEN]
    if not rows.size:
        return
    slots, values = a.row_slot[rows], a.logits[rows]
    with np.errstate(divide="ignore"):
        logprobs = np.log(values) if a.given == "probs" else _log_softmax(values)
    places = a.draft_len[slots]
    a.draft_top_ids[slots, places], a.draft_tops[slots, places] = NO_TOKEN, 0
    for i, (slot, place, token) in enumerate(zip(slots.tolist(), places.tolist(), a.tokens[rows].tolist(), strict=True)):
        count = min(int(a.num_top[slot]), values.shape[1])
        ids = np.array([token, *(most_likely(values[i], count) if count else ())], np.int32)
        a.draft_top_ids[slot, place, : len(ids)], a.draft_tops[slot, place, : len(ids)] = ids, logprobs[i, ids]


def pack_logprobs(a: Any, n: int) -> None:
    """Lay the record out as one matrix, an entry a row."""
    wanting = _wanting(a, n)
    slots, width = a.slot_order[wanting], a.ids.shape[1]
    columns = int(a.num_top[slots].max()) + 1 if wanting.size else 0
    tops = a.draft_top_ids is not None
    size = record_words(wanting.size, width, columns, drafts=tops)
    header = a.record[: len(LogprobHeader)]
    header[:] = a.flag | columns << 8, LOGPROB_VERSION, wanting.size, width, size
    if not wanting.size:
        return
    entries = a.record[len(LogprobHeader) : size].reshape(wanting.size, entry_words(width, columns, drafts=tops))
    entries[:, LogprobEntry.SLOT], entries[:, LogprobEntry.EXTRA] = slots, a.extra[wanting]
    rows = entries[:, len(LogprobEntry) :].reshape(wanting.size, width, -1)
    rows[..., LogprobRow.RANK], rows[..., LogprobRow.DRAFT], rows[..., LogprobRow.DRAFT_LOGPROB] = a.ranks[wanting], NO_TOKEN, 0
    first = len(LogprobRow)
    rows[..., first : first + columns] = a.ids[wanting, :, :columns]
    rows[..., first + columns : first + 2 * columns] = a.logprobs[wanting, :, :columns].view(np.int32)
    if tops:
        rows[..., first + 2 * columns : first + 3 * columns], rows[..., first + 3 * columns :] = NO_TOKEN, 0
    if a.drafts is not None:
        which, place = (np.arange(width) < a.extra[wanting, None]).nonzero()
        rows[which, place, LogprobRow.DRAFT] = a.drafts[slots[which], place]
        rows[which, place, LogprobRow.DRAFT_LOGPROB] = a.draft_logprobs[slots[which], place].view(np.int32)
        if tops:
            begin, middle, end = (first + count * columns for count in (2, 3, 4))
            rows[which, place, begin:middle] = a.draft_top_ids[slots[which], place, :columns]
            rows[which, place, middle:end] = a.draft_tops[slots[which], place, :columns].view(np.int32)


def pack_prompt_rows(a: Any, n: int) -> None:
    """The rows of those who want it, in launch order, as far as they predict a prompt token."""
    slots = a.slot_order
    counts = a.seq_len * ((slots >= 0) & (a.num_top[slots] >= 0))
    sequence = np.arange(slots.size).repeat(counts)
    row = a.seq_start[sequence] + np.arange(sequence.size) - (counts.cumsum() - counts)[sequence]
    slot, position = slots[sequence], a.positions[row] + 1
    inside = position < a.prompt_len[slot]
    row, slot, position = row[inside], slot[inside], position[inside]
    there = row.size
    a.prompt_row[:there], a.prompt_slot[:there], a.prompt_position[:there] = row, slot, position
    a.prompt_token[:there, 0] = a.tokens[slot, position]
    a.prompt_row[there:n], a.prompt_slot[there:n], a.prompt_position[there:n] = NO_ROW, PAD_SLOT, 0
    a.prompt_token[there:n] = NO_TOKEN


KERNELS: dict[str, Kernel] = {
    function.__name__: plain(function)
    for function in (
        keep_logits,
        forbid_filtered,
        top_logprobs,
        draft_logprobs,
        draft_top_logprobs,
        pack_logprobs,
        pack_prompt_rows,
    )
}
"""Contract to kernel."""
