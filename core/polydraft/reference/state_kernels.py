"""The integer state kernels of the reference backend: packing, verification, commit, drafts and staged writes.

The kernel table lists them, and every NumPy device runs them. They share no code with the goldens: whole-batch array operations,
a few microseconds each, no loop over sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from polydraft.contracts.base import Limits
from polydraft.contracts.layout import SNAPSHOT_TOKENS, Snapshot
from polydraft.device import Array
from polydraft.reference.provider import Kernel, Run, plain
from polydraft.sentinels import NO_ROW, NO_TOKEN, PAD_SLOT, Finish, Phase

# Plain integers: comparing an array with an IntEnum member costs a conversion a call.
PREFILL, DECODE, PAUSED, FINISHED = (int(p) for p in (Phase.PREFILL, Phase.DECODE, Phase.PAUSED, Phase.FINISHED))
NONE, STOP, LENGTH, ERROR = (int(f) for f in (Finish.NONE, Finish.STOP, Finish.LENGTH, Finish.ERROR))


def _indices(slots: Array) -> Array:
    """The native index type: one conversion here instead of one in every gather."""
    return slots.astype(np.intp)


def scatter(a: Any, limits: Limits) -> Run:
    """One copy a run, over columns as flat words."""
    del limits
    words = [column.reshape(-1).view(np.int32) for column in a.columns]
    widths = [column[0].size for column in a.columns]
    runs, payload = a.runs, a.payload

    def run(n: int) -> None:
        for column, slot, start, count, offset in runs[:n].tolist():
            if slot >= 0:
                place = slot * widths[column] + start
                words[column][place : place + count] = payload[offset : offset + count]

    return run


def reserve_blocks(a: Any, n: int) -> None:
    """A slot is covered when the first hole of its table lies behind what it needs."""
    slots = _indices(a.slot_order[:n])
    phase = a.phase[slots]
    rows = ((slots >= 0) & ((phase == DECODE) | (phase == PAUSED))).nonzero()[0]
    if not rows.size:
        return
    slots = slots[rows]
    need = a.kv_len[slots] + a.draft_len[slots]
    need += 1 + a.lookahead
    np.minimum(need, a.max_total[slots], out=need)
    used = -(-int(need.max()) // a.block_size)  # entries that anybody needs: tables are long, texts mostly short
    holes = a.block_table[slots, :used] < 0
    first = holes.argmax(axis=1)
    whole = ~holes[np.arange(rows.size), first]
    a.phase[slots] = np.where(whole | (first * a.block_size >= need), DECODE, PAUSED)


def pack_rows(a: Any, n: int) -> None:
    """Lengths and offsets by sequence, then everything else by row through the row's sequence."""
    slots = _indices(a.slot_order)
    phase, kv_len = a.phase[slots], a.kv_len[slots]
    decode = phase == DECODE
    wanted = np.where(decode, a.draft_len[slots] + 1, a.prefill_len[slots] - kv_len)
    wanted *= (slots >= 0) & (decode | (phase == PREFILL))
    length = np.minimum(wanted, a.seq_rows, out=a.seq_len)
    ends = length.cumsum(dtype=np.int32)
    start = np.subtract(ends, length, out=a.seq_start)
    rows = int(ends[-1])
    sequence = np.arange(slots.size).repeat(length)
    slot = slots[sequence]
    offset = np.arange(rows) - start[sequence]
    first = np.where(decode, a.prompt_len[slots] + a.num_generated[slots] - 1, kv_len)
    tokens = a.tokens
    ids = tokens.reshape(-1).take(slot * tokens.shape[1] + first[sequence] + offset, mode="clip")
    drafted = (decode[sequence] & (offset > 0)).nonzero()[0]
    ids[drafted] = a.drafts[slot[drafted], offset[drafted] - 1]
    a.ids[:rows], a.row_slot[:rows] = ids, slot
    np.add(kv_len[sequence], offset, out=a.positions[:rows], casting="same_kind")
    a.ids[rows:n], a.row_slot[rows:n], a.positions[rows:n] = NO_TOKEN, PAD_SLOT, 0


def pack_logit_rows(a: Any, n: int) -> None:
    """Like `pack_rows`, over the rows that need logits."""
    slots = _indices(a.slot_order)
    phase, kv_len, seq_len = a.phase[slots], a.kv_len[slots], a.seq_len
    prefill_len = a.prefill_len[slots]
    last = (phase == PREFILL) & (seq_len > 0)
    last &= kv_len + seq_len == prefill_len
    last &= prefill_len == a.prompt_len[slots] + a.num_generated[slots]
    length = np.where(phase == DECODE, seq_len, last)
    a.logit_len[:] = length * (slots >= 0)
    length = a.logit_len
    ends = length.cumsum(dtype=np.int32)
    start = np.subtract(ends, length, out=a.logit_start)
    rows = int(ends[-1])
    sequence = np.arange(slots.size).repeat(length)
    # Offset of a logit row within its sequence's rows: a prefill's single one is the last.
    offset = np.arange(rows) + ((seq_len - length) - start)[sequence]
    np.add(a.seq_start[sequence], offset, out=a.logit_row[:rows], casting="same_kind")
    a.logit_slot[:rows] = slots[sequence]
    np.add(kv_len[sequence] + 1, offset, out=a.logit_position[:rows], casting="same_kind")
    a.logit_row[rows:n], a.logit_slot[rows:n], a.logit_position[rows:n] = NO_ROW, PAD_SLOT, 0


def force_choices(a: Any, n: int) -> None:
    """All verified drafts at once."""
    slots = _indices(a.slot_order[:n])
    places = np.arange(a.drafts.shape[1])
    forced = (places < a.logit_len[:n, None] - 1) & (slots >= 0)[:, None]
    sequence, place = forced.nonzero()
    rows = a.logit_start[sequence] + place
    chosen, draft = a.choices[rows], a.drafts[slots[sequence], place]
    other = np.where(chosen == draft, (draft + 1) % a.num_valid, chosen)
    wanted = np.where(a.uniforms[rows] < a.chances[place], draft, other)
    a.choices[rows] = np.where(chosen == NO_TOKEN, NO_TOKEN, wanted)


def verify_match(a: Any, n: int) -> None:
    """Compare whole windows."""
    choices, size, accepted = _verify(a, n)
    columns = np.arange(a.window.shape[1])
    a.window[:n] = np.where(columns < size[:, None], choices, NO_TOKEN)
    a.window_len[:n], a.accepted[:n] = size, accepted


def _verify(a: Any, n: int) -> tuple[Array, Array, Array]:
    """The target's choices [n, W], how many of them count, and the drafts accepted: up to the first mismatch."""
    slots = _indices(a.slot_order[:n])
    length = a.logit_len[:n] * (slots >= 0)
    active = length > 0
    drafted = np.where((a.phase[slots] == DECODE) & active, length - 1, -1)
    a.drafted[:n] = drafted
    columns = np.arange(a.drafts.shape[1] + 1)
    choices = a.choices.take(a.logit_start[:n, None] + columns, mode="clip")
    match = columns < drafted[:, None]  # the last column is never true, so that argmin finds the end
    match[:, :-1] &= choices[:, :-1] == a.drafts[slots]
    accepted = match.argmin(axis=1)
    return choices, (accepted + 1) * active, accepted


def commit_window(a: Any, n: int) -> None:
    """Commit what verification left."""
    rows, slots = _with_rows(a, n)
    _commit(a, n, rows, slots, a.window[rows], a.window_len[rows], a.accepted[rows])


def verify_and_commit(a: Any, n: int) -> None:
    """Composite `verify_match+commit_window`: the window is never stored."""
    verify, commit = a.parts
    choices, size, accepted = _verify(verify, n)
    rows, slots = _with_rows(commit, n)
    _commit(commit, n, rows, slots, choices[rows], size[rows], accepted[rows])


def _commit(a: Any, n: int, rows: slice | Array, slots: Array, window: Array, size: Array, accepted: Array) -> None:
    """Find where each window ends, then scatter the tokens before it."""
    a.out_tokens[:n], a.out_len[:n], a.out_accepted[:n] = NO_TOKEN, 0, 0
    if not slots.size:
        return
    phase, kv_len = a.phase[slots], a.kv_len[slots]
    decode = phase == DECODE
    pure = bool(decode.all())
    if not pure:
        prefill = phase == PREFILL
        kv_len += a.seq_len[rows] * prefill
        completed = prefill & (kv_len == a.prefill_len[slots])
        size = size * (decode | completed)
        a.phase[slots[completed]] = DECODE
    known = a.prompt_len[slots] + a.num_generated[slots]
    emitted, reason = _cut(window, size, a.max_total[slots] - known, a.stop_tokens[slots])
    if reason is not None:
        ended = reason.nonzero()[0]
        a.finish[slots[ended]] = reason[ended]
        a.phase[slots[ended]] = FINISHED

    columns = np.arange(window.shape[1])
    kept = columns < emitted[:, None]
    places = (slots * a.tokens.shape[1] + known)[:, None] + columns
    a.tokens.reshape(-1)[places[kept]] = window[kept]
    a.num_generated[slots] += emitted
    a.kv_len[slots] = kv_len + (emitted if pure else emitted * decode)
    a.out_tokens[rows] = np.where(kept, window, NO_TOKEN)
    a.out_len[rows] = emitted
    a.out_accepted[rows] = np.minimum(accepted, emitted) if pure else np.minimum(accepted, emitted) * decode


def _with_rows(a: Any, n: int) -> tuple[slice | Array, Array]:
    """The sequences that had rows in this step, as an index (a slice when all of them had), and their slots."""
    order = a.slot_order[:n]
    rows = ((order >= 0) & (a.seq_len[:n] > 0)).nonzero()[0]
    if rows.size == n:
        return slice(0, n), _indices(order)
    return rows, _indices(order[rows])


def _cut(window: Array, size: Array, room: Array, stop_tokens: Array) -> tuple[Array, Array | None]:
    """How many tokens of each window count, and why a request ends with them (`Finish`; None when none does)."""
    limit = np.minimum(size, room)
    failed = window == NO_TOKEN
    ends = (stop_tokens.T[:, :, None] == window).any(axis=0)
    ends |= failed
    ends &= np.arange(window.shape[1]) < limit[:, None]
    full = (limit == room) & (size > 0)
    if not (ends.any() or full.any()):
        return limit, None
    every = np.arange(size.size)
    first = ends.argmax(axis=1)
    ended, error = ends[every, first], failed[every, first]
    emitted = np.where(ended, first + ~error, limit)
    return emitted, np.where(ended, np.where(error, ERROR, STOP), np.where(full, LENGTH, NONE))


def snapshot_output(a: Any, n: int) -> None:
    """Column by column; records past the end are overwritten with the empty one."""
    order, record = a.slot_order[:n], a.record[:n]
    slots = _indices(order)
    record[:, Snapshot.SLOT] = order
    record[:, Snapshot.EPOCH] = a.epoch[slots]
    record[:, Snapshot.NUM_TOKENS] = a.out_len[:n]
    record[:, Snapshot.ACCEPTED] = a.out_accepted[:n]
    record[:, Snapshot.DRAFTED] = a.drafted[:n]
    record[:, Snapshot.FINISH] = a.finish[slots]
    record[:, Snapshot.PHASE] = a.phase[slots]
    record[:, Snapshot.KV_LEN] = a.kv_len[slots]
    record[:, SNAPSHOT_TOKENS:] = a.out_tokens[:n]
    past = (order < 0).nonzero()[0]
    if past.size:
        empty = np.full(record.shape[1], NO_TOKEN, np.int32)
        empty[:SNAPSHOT_TOKENS] = 0
        empty[Snapshot.SLOT], empty[Snapshot.DRAFTED] = PAD_SLOT, -1
        record[past] = empty


def pack_draft_rows(a: Any, n: int) -> None:
    """Shift the rows by one token; what is not known by then drops out."""
    known = a.prompt_len + a.num_generated
    known *= (a.phase == PREFILL) | (a.phase == DECODE)
    row_slot = a.row_slot[:n]
    slot, following = _indices(row_slot), a.positions[:n] + 1
    keep = (following < known[slot]) & (row_slot >= 0)
    tokens = a.tokens
    ids = tokens.reshape(-1).take(slot * tokens.shape[1] + following, mode="clip")
    a.draft_ids[:n] = np.where(keep, ids, NO_TOKEN)
    a.draft_row_slot[:n] = np.where(keep, row_slot, PAD_SLOT)


def begin_draft(a: Any, n: int) -> None:
    """Empty the drafts of what ran, then set out what goes on."""
    a.draft_slot[:n], a.draft_position[:n], a.draft_budget[:n] = PAD_SLOT, 0, 0
    rows, slots = _with_rows(a, n)
    a.drafts[slots] = NO_TOKEN
    a.draft_len[slots] = 0
    budget = a.max_total[slots] - (a.prompt_len[slots] + a.num_generated[slots] + 1)
    np.minimum(budget, a.num_drafts, out=budget)
    active = (a.phase[slots] == DECODE) & (budget > 0)
    a.draft_slot[rows] = np.where(active, slots, PAD_SLOT)
    a.draft_position[rows] = (a.kv_len[slots] - 1) * active
    a.draft_budget[rows] = budget * active


def advance_draft(a: Any, n: int) -> None:
    """File what was chosen, then retire what is done."""
    slots, chosen = a.draft_slot[:n], a.chosen[:n]
    filed = (slots >= 0) & (chosen >= 0)
    active = slots[filed]
    a.drafts[active, a.pass_index] = chosen[filed]
    a.draft_len[active] = a.pass_index + 1
    goes_on = filed & (a.draft_budget[:n] > a.pass_index + 1)
    a.draft_position[:n] += goes_on
    a.next_ids[:n] = np.where(goes_on, chosen, NO_TOKEN)
    a.draft_slot[:n] = np.where(goes_on, slots, PAD_SLOT)


def draft_ngram(a: Any, n: int) -> None:
    """All drafting slots at once: one comparison of shifted histories for each run length, longest first."""
    rows = (a.draft_slot[:n] >= 0).nonzero()[0]
    if not rows.size:
        return
    slots = a.draft_slot[rows]
    known = a.prompt_len[slots] + a.num_generated[slots]
    text = a.tokens[slots, : known.max()]
    places = np.arange(text.shape[1])
    follows = np.zeros(len(slots), np.int64)
    for size in range(min(a.max_ngram, text.shape[1]), a.min_ngram - 1, -1):
        same = places <= (known - size - 1)[:, None]
        for k in range(size):
            last = np.take_along_axis(text, np.maximum(known - size + k, 0)[:, None], axis=1)
            same[:, : text.shape[1] - k] &= text[:, k:] == last
        latest = text.shape[1] - 1 - same[:, ::-1].argmax(axis=1)
        follows = np.where((follows == 0) & same.any(axis=1), latest + size, follows)
    found = np.where(follows > 0, np.minimum(a.draft_budget[rows], known - follows), 0)
    for j in range(a.drafts.shape[1]):
        some = found > j
        a.drafts[slots[some], j] = text[some, follows[some] + j]
    a.draft_len[slots] = found


def align_drafts(a: Any, n: int) -> None:
    """All drafting slots at once: guess and text compared place by place, then shifted by what has become known."""
    rows = (a.draft_slot[:n] >= 0).nonzero()[0]
    if not rows.size:
        return
    slots = a.draft_slot[rows]
    start, size = a.guess_start[rows][:, None], a.guess_len[rows][:, None]
    new = (a.prompt_len[slots] + a.num_generated[slots])[:, None] - start
    place = np.arange(a.guess.shape[1])
    text = a.tokens[slots[:, None], np.minimum(start + place, a.tokens.shape[1] - 1)]
    wrong = (place < np.minimum(new, size)) & (text != a.guess[rows])
    left = np.minimum(a.draft_budget[rows], (size - new)[:, 0])
    found = np.where((new[:, 0] >= 0) & ~wrong.any(axis=1), np.maximum(left, 0), 0)
    for j in range(a.drafts.shape[1]):
        some = (found > j).nonzero()[0]
        a.drafts[slots[some], j] = a.guess[rows[some], new[some, 0] + j]
    a.draft_len[slots] = found


def splice_drafts(a: Any, n: int) -> None:
    """All drafting slots at once: both drafts compared place by place, then one of them kept whole."""
    rows = ((a.slot_order[:n] >= 0) & (a.draft_budget[:n] > 0)).nonzero()[0]
    slots = a.slot_order[rows]
    place, old, size = np.arange(a.drafts.shape[1]), a.draft_len[slots], a.found_len[slots]
    equal = (a.drafts[slots] == a.found[slots]) & (place < np.minimum(old, size)[:, None])
    same = np.minimum.accumulate(equal, axis=1).sum(axis=1)
    taken = (same >= a.agree[rows]) & (same < size)
    to = slots[taken]
    if a.draft_logprobs is not None:
        found = (place >= same[taken][:, None]) & (place < size[taken][:, None])
        a.draft_logprobs[to] = np.where(found, np.float32(0), a.draft_logprobs[to])
    a.drafts[to] = np.where(place < size[taken][:, None], a.found[to], NO_TOKEN)
    a.draft_len[to] = size[taken]
    a.kept_drafts[slots] = np.where(taken, same, old)


KERNELS: dict[str, Kernel] = {
    "scatter": scatter,
    "verify_match+commit_window": plain(verify_and_commit),
    **{function.__name__: plain(function) for function in (
        reserve_blocks, pack_rows, pack_logit_rows, force_choices, verify_match, commit_window, snapshot_output,
        pack_draft_rows, begin_draft, advance_draft, draft_ngram, align_drafts, splice_drafts,
    )},
}  # fmt: skip
"""Contract or composite name to kernel."""
