"""Integer state kernels in portable Paddle operations: staged writes, packing, verification, commit and drafts.

`table.py` lists them. They are whole-batch operations of fixed shapes: what carries nothing is masked, not skipped, and no length
reaches the host.
"""

from __future__ import annotations

from typing import Any

import paddle

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.scatter import Run as Word
from polydraft.sentinels import NO_ROW, NO_TOKEN, PAD_SLOT, Finish, Phase
from polydraft_paddle.ops import (
    First,
    Tensor,
    above,
    as_int,
    at,
    both,
    carried,
    choose,
    clamp,
    constant,
    direct,
    either,
    equals,
    file_by_slot,
    file_in_column,
    first_where,
    flat,
    masked,
    numbers,
    owners,
    part,
    pick,
    put,
    ranges_of,
    scatter_rows,
    take,
    within,
    write_where,
)  # fmt: skip
from polydraft_paddle.provider import Kernel, Run, plain

PREFILL, DECODE, PAUSED, FINISHED = (int(p) for p in (Phase.PREFILL, Phase.DECODE, Phase.PAUSED, Phase.FINISHED))
COLUMN, SLOT, START, COUNT, OFFSET = map(int, Word)


def scatter(a: Any, limits: Limits) -> Run:
    """Every place of a column looks for the run that covers it: gathers and choices alone, and no index that the host sees."""
    del limits
    num_slots, size = a.columns[0].shape[0], a.payload.shape[0]
    floats = a.payload.view("float32")
    first = First(a.runs)
    nobody = len(a.columns) * num_slots
    written = [(i, column) for i, column in enumerate(a.columns) if column.size]  # without drafts, their column has no width

    def write(column: Tensor, runs: Tensor, owner: Tensor) -> None:
        """`owner` [B]: the run of each slot, -1 where there is none."""
        named, own = carried(owner), take(runs, clamp(owner))
        start, count, offset = own[:, START], own[:, COUNT], own[:, OFFSET]
        words = floats if column.dtype == paddle.float32 else a.payload
        if column.ndim == 1:
            first_word = within(offset, size)  # a run of no words may begin behind the last one
            write_where(column, both(named, above(count, 0)), take(words, first_word))
            return
        place = direct.unsqueeze(numbers(column.shape[1], owner), [0]) - direct.unsqueeze(start, [1])
        inside = both(both(direct.unsqueeze(named, [1]), carried(place)), place < direct.unsqueeze(count, [1]))
        index = within(place + direct.unsqueeze(offset, [1]), size)
        write_where(column, inside, direct.reshape(take(words, flat(index)), index.shape))

    def run(n: int) -> None:
        if not n:
            return
        (runs,) = first.rows(n)
        slot = runs[:, SLOT]
        key = choose(carried(slot), runs[:, COLUMN] * num_slots + slot, nobody)
        found = paddle.put_along_axis(constant(-1, numbers(nobody + 1, key)), key, numbers(n, key), 0)
        for i, column in written:
            write(column, runs, part(found, i * num_slots, (i + 1) * num_slots))

    return run


def reserve_blocks(a: Any, n: int) -> None:
    """A slot is covered when no entry that it needs is a hole."""
    slots = a.slot_order[:n]
    safe = clamp(slots)
    phase = take(a.phase, safe)
    need = take(a.kv_len, safe) + take(a.draft_len, safe) + (1 + a.lookahead)
    need = direct.unsqueeze(direct.minimum(need, take(a.max_total, safe)), [1])
    table = take(a.block_table, safe)
    starts = direct.unsqueeze(numbers(table.shape[1], slots) * a.block_size, [0])
    holes = both(table < 0, direct.less_than(starts, need))
    settled = choose(holes.any(axis=1), constant(PAUSED, phase), DECODE)
    file_by_slot(slots, both(carried(slots), either(equals(phase, DECODE), equals(phase, PAUSED))), (a.phase, settled, None))


def offsets(lengths: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of `count` packed rows: which carry something, the sequence of each, its offset there; and where each sequence starts."""
    ends = paddle.cumsum(lengths, dtype="int32")
    start = ends - lengths
    rows = numbers(count, lengths)
    sequence = within(ranges_of(ends, rows), lengths.shape[0])
    return direct.less_than(rows, ends[-1:]), sequence, rows - take(start, sequence), start


def pack_rows(a: Any, limits: Limits) -> Run:
    """Lengths and offsets by sequence, then everything else by row through the row's sequence."""
    del limits

    def run(n: int) -> None:
        slots = a.slot_order
        safe, there = clamp(slots), carried(slots)
        phase, kv_len = take(a.phase, safe), take(a.kv_len, safe)
        decode, prefill = both(equals(phase, DECODE), there), both(equals(phase, PREFILL), there)
        wanted = masked(take(a.draft_len, safe) + 1, decode) + masked(take(a.prefill_len, safe) - kv_len, prefill)
        put(a.seq_len, direct.minimum(wanted, masked(a.seq_rows, there)))
        valid, sequence, offset, start = offsets(a.seq_len, max(n, 1))
        put(a.seq_start, start)
        if not n:
            return
        slot, decoding = take(slots, sequence), take(decode, sequence)
        newest = take(take(a.prompt_len, safe) + take(a.num_generated, safe) - 1, sequence)
        position = take(kv_len, sequence) + offset
        history = pick(a.tokens, slot, direct.where(decoding, newest, position))
        ids = direct.where(both(decoding, above(offset, 0)), pick(a.drafts, slot, offset - 1), history)
        put(a.ids[:n], choose(valid, ids, NO_TOKEN))
        put(a.row_slot[:n], choose(valid, slot, PAD_SLOT))
        put(a.positions[:n], choose(valid, position, 0))

    return run


def pack_logit_rows(a: Any, limits: Limits) -> Run:
    """Like `pack_rows`, over the rows that need logits."""
    del limits

    def run(n: int) -> None:
        slots, seq_len = a.slot_order, a.seq_len
        safe = clamp(slots)
        phase, kv_len, prefill_len = take(a.phase, safe), take(a.kv_len, safe), take(a.prefill_len, safe)
        last = both(both(equals(phase, PREFILL), above(seq_len, 0)), direct.equal(kv_len + seq_len, prefill_len))
        last = both(last, direct.equal(prefill_len, take(a.prompt_len, safe) + take(a.num_generated, safe)))
        length = direct.where(equals(phase, DECODE), seq_len, as_int(last))
        put(a.logit_len, masked(length, carried(slots)))
        valid, sequence, offset, start = offsets(a.logit_len, max(n, 1))
        put(a.logit_start, start)
        if not n:
            return
        # Offset of a logit row within its sequence's rows: a prefill's single one is the last.
        offset = offset + take(seq_len - a.logit_len, sequence)
        put(a.logit_row[:n], choose(valid, take(a.seq_start, sequence) + offset, NO_ROW))
        put(a.logit_slot[:n], choose(valid, take(slots, sequence), PAD_SLOT))
        put(a.logit_position[:n], choose(valid, take(kv_len, sequence) + offset + 1, 0))

    return run


def force_choices(a: Any, n: int) -> None:
    """All verified drafts at once; each logit row is forced by the one window place that it is."""
    slots = a.slot_order[:n]
    places = numbers(a.drafts.shape[1], slots).unsqueeze(0)
    forced = (places < (a.logit_len[:n] - 1).unsqueeze(1)) & carried(slots).unsqueeze(1)
    rows = paddle.clip(a.logit_start[:n].unsqueeze(1) + places, max=a.choices.shape[0] - 1)
    flat = rows.reshape([-1])
    chosen = paddle.gather(a.choices, flat).reshape(rows.shape)
    uniforms = paddle.gather(a.uniforms, flat).reshape(rows.shape)
    draft = at(a.drafts, slots)
    other = paddle.where(chosen == draft, (draft + 1) % a.num_valid, chosen)
    wanted = paddle.where(uniforms < a.chances.unsqueeze(0), draft, other)
    valid = forced & (chosen != NO_TOKEN)
    scatter_rows(a.choices, flat, wanted.reshape([-1]), valid.reshape([-1]))


def verify_match(a: Any, limits: Limits) -> Run:
    """Compare whole windows; a running product finds the first mismatch."""
    del limits
    first = First(a.slot_order, a.logit_len, a.logit_start, a.window, a.window_len, a.accepted, a.drafted)

    def run(n: int) -> None:
        if not n:
            return
        slots, logit_len, starts, window, window_len, accepted_out, drafted_out = first.rows(n)
        safe = clamp(slots)
        width = a.window.shape[1]
        length = masked(logit_len, carried(slots))
        active = above(length, 0)
        drafted = choose(both(equals(take(a.phase, safe), DECODE), active), length - 1, -1)
        columns = direct.unsqueeze(numbers(width, slots), [0])
        places = direct.unsqueeze(starts, [1]) + columns
        places = direct.reshape(within(places, a.choices.shape[0]), [-1])
        choices = direct.reshape(take(a.choices, places), [n, width])
        accepted = constant(0, drafted)
        if width > 1:
            match = both(
                direct.equal(choices[:, :-1], take(a.drafts, safe)),
                direct.less_than(columns[:, :-1], direct.unsqueeze(drafted, [1])),
            )
            accepted = paddle.cumprod(as_int(match), dim=1).sum(axis=1, dtype="int32")
        size = masked(accepted + 1, active)
        put(window, choose(direct.less_than(columns, direct.unsqueeze(size, [1])), choices, NO_TOKEN))
        put(window_len, size)
        put(accepted_out, accepted)
        put(drafted_out, drafted)

    return run


def commit_window(a: Any, limits: Limits) -> Run:
    """Find where each window ends, file the tokens before it, then move every length and phase by slot."""
    del limits
    first = First(a.slot_order, a.seq_len, a.window, a.window_len, a.accepted, a.out_tokens, a.out_len, a.out_accepted)
    tokens, room = flat(a.tokens), a.tokens.shape[1]

    def run(n: int) -> None:
        if not n:
            return
        slots, seq_len, window, window_len, accepted, out_tokens, out_len, out_accepted = first.rows(n)
        safe = clamp(slots)
        running = both(carried(slots), above(seq_len, 0))
        phase = take(a.phase, safe)
        decode, prefill = both(running, equals(phase, DECODE)), both(running, equals(phase, PREFILL))
        kv_len = take(a.kv_len, safe) + masked(seq_len, prefill)
        committed = either(decode, both(prefill, direct.equal(kv_len, take(a.prefill_len, safe))))
        generated = take(a.num_generated, safe)
        known = take(a.prompt_len, safe) + generated
        size = masked(window_len, committed)
        emitted, reason = _cut(window, size, take(a.max_total, safe) - known, take(a.stop_tokens, safe))

        columns = direct.unsqueeze(numbers(window.shape[1], slots), [0])
        kept = direct.less_than(columns, direct.unsqueeze(emitted, [1]))
        places = direct.unsqueeze(safe * room + known, [1]) + columns
        scatter_rows(tokens, *(direct.reshape(t, [-1]) for t in (places, window, kept)))
        put(out_tokens, choose(kept, window, NO_TOKEN))
        put(out_len, emitted)
        put(out_accepted, masked(direct.minimum(accepted, emitted), decode))

        ended = both(committed, reason != int(Finish.NONE))
        settled = choose(ended, constant(FINISHED, phase), DECODE)
        file_by_slot(
            slots,
            running,
            (a.num_generated, generated + emitted, None),
            (a.kv_len, kv_len + masked(emitted, decode), None),
            (a.phase, settled, committed),
            (a.finish, reason, ended),
        )

    return run


def _cut(window: Tensor, size: Tensor, room: Tensor, stop_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of each window count, and why a request ends with them (`Finish`)."""
    limit = direct.minimum(size, room)
    stops = direct.equal(direct.unsqueeze(window, [2]), direct.unsqueeze(stop_tokens, [1])).any(axis=2)
    columns = direct.unsqueeze(numbers(window.shape[1], window), [0])
    ends = both(either(stops, equals(window, NO_TOKEN)), direct.less_than(columns, direct.unsqueeze(limit, [1])))
    first = first_where(ends)
    ended = first < ends.shape[1]
    error = both(pick(window, numbers(window.shape[0], size), first) == NO_TOKEN, ended)
    emitted = direct.where(ended, first + 1 - as_int(error), limit)
    full = both(direct.equal(limit, room), above(size, 0))
    reason = choose(full, constant(int(Finish.LENGTH), size), int(Finish.NONE))
    reason = direct.where(ended, constant(int(Finish.STOP), size), reason)
    return emitted, direct.where(error, constant(int(Finish.ERROR), size), reason)


def snapshot_output(a: Any, n: int) -> None:
    """Stack the columns; records past the end become the empty one."""
    slots = a.slot_order[:n]
    safe, live = clamp(slots), carried(slots)
    by_slot = {name: masked(take(getattr(a, name), safe), live) for name in ("epoch", "finish", "phase", "kv_len")}
    columns = [
        choose(live, slots, PAD_SLOT), by_slot["epoch"], masked(a.out_len[:n], live), masked(a.out_accepted[:n], live),
        choose(live, a.drafted[:n], -1), by_slot["finish"], by_slot["phase"], by_slot["kv_len"],
    ]  # fmt: skip
    # NO_TOKEN is -1: one more than a token is 0 exactly where there is none.
    tokens = masked(a.out_tokens[:n] + 1, direct.unsqueeze(live, [1])) - 1
    put(a.record[:n], direct.concat([direct.stack(columns, 1), tokens], 1))


def pack_draft_rows(a: Any, n: int) -> None:
    """Shift the rows by one token; what is not known by then drops out."""
    row_slot, following = a.row_slot[:n], a.positions[:n] + 1
    safe = clamp(row_slot)
    phase = take(a.phase, safe)
    known = take(a.prompt_len, safe) + take(a.num_generated, safe)
    running = either(equals(phase, PREFILL), equals(phase, DECODE))
    keep = both(both(carried(row_slot), running), direct.less_than(following, known))
    put(a.draft_ids[:n], choose(keep, pick(a.tokens, safe, following), NO_TOKEN))
    put(a.draft_row_slot[:n], choose(keep, row_slot, PAD_SLOT))


def begin_draft(a: Any, n: int) -> None:
    """Empty the drafts of slots that had rows; say who drafts, from where and how far."""
    slots = a.slot_order[:n]
    safe = clamp(slots)
    ran = both(carried(slots), above(a.seq_len[:n], 0))
    file_by_slot(slots, ran, (a.draft_len, 0, None), (a.drafts, NO_TOKEN, None))
    room = take(a.max_total, safe) - take(a.prompt_len, safe) - take(a.num_generated, safe) - 1
    budget = direct.minimum(room, constant(a.num_drafts, room))
    active = both(both(ran, equals(take(a.phase, safe), DECODE)), above(budget, 0))
    put(a.draft_slot[:n], choose(active, slots, PAD_SLOT))
    put(a.draft_position[:n], masked(take(a.kv_len, safe) - 1, active))
    put(a.draft_budget[:n], masked(budget, active))


def advance_draft(a: Any, limits: Limits) -> Run:
    """File what was chosen, then retire what is done."""
    del limits
    first = First(a.draft_slot, a.chosen, a.draft_budget, a.draft_position, a.next_ids)

    def run(n: int) -> None:
        if not n:
            return
        slots, chosen, budget, position, next_ids = first.rows(n)
        filed = both(carried(slots), carried(chosen))
        file_in_column(a.drafts, a.pass_index, slots, chosen, filed)
        file_by_slot(slots, filed, (a.draft_len, a.pass_index + 1, None))
        goes_on = both(filed, budget > a.pass_index + 1)
        put(position, position + as_int(goes_on))
        put(next_ids, choose(goes_on, chosen, NO_TOKEN))
        put(slots, choose(goes_on, slots, PAD_SLOT))

    return run


def draft_ngram(a: Any, n: int) -> None:
    """All drafting slots at once: one comparison of shifted histories for each run length, longest first."""
    slots = a.draft_slot[:n]
    active = carried(slots)
    known = at(a.prompt_len, slots) + at(a.num_generated, slots)
    text = at(a.tokens, slots)
    length, width = text.shape[1], a.drafts.shape[1]
    places = numbers(length, slots).unsqueeze(0)
    follows = paddle.zeros_like(known)
    for size in range(min(a.max_ngram, length), a.min_ngram - 1, -1):
        same = (places <= (known - size - 1).unsqueeze(1)) & active.unsqueeze(1)
        for k in range(size):
            last = pick(text, numbers(n, slots), known - size + k).unsqueeze(1)
            shifted = pick(text, numbers(n, slots).unsqueeze(1).expand([n, length]), (places + k).expand([n, length]))
            same = same & (shifted == last)
        latest = choose(same, places.expand([n, length]), -1).max(axis=1)
        follows = paddle.where((follows == 0) & (carried(latest)), latest + size, follows)
    found = choose(active & (above(follows, 0)), paddle.minimum(a.draft_budget[:n], known - follows), 0)
    columns = numbers(width, slots).unsqueeze(0)
    rows = numbers(n, slots).unsqueeze(1).expand([n, width])
    drafts = pick(text, rows, follows.unsqueeze(1) + columns)
    _file_drafts(a, slots, drafts, found)


def align_drafts(a: Any, n: int) -> None:
    """All drafting slots at once: guess and text compared place by place, then shifted by what has become known."""
    slots = a.draft_slot[:n]
    rows = numbers(n, slots).unsqueeze(1)
    width, places = a.drafts.shape[1], numbers(a.guess.shape[1], slots).unsqueeze(0)
    start, size = a.guess_start[:n].unsqueeze(1), a.guess_len[:n].unsqueeze(1)
    new = (at(a.prompt_len, slots) + at(a.num_generated, slots)).unsqueeze(1) - start
    text = pick(a.tokens, paddle.clip(slots, min=0).unsqueeze(1).expand([n, a.guess.shape[1]]), start + places)
    wrong = (places < paddle.minimum(new, size)) & (text != a.guess[:n])
    holds = carried(slots) & (new.squeeze(1) >= 0) & ~wrong.any(axis=1)
    left = paddle.clip(paddle.minimum(a.draft_budget[:n], (size - new).squeeze(1)), min=0)
    found = choose(holds, left, 0)
    columns = numbers(width, slots).unsqueeze(0)
    drafts = pick(a.guess[:n], rows.expand([n, width]), new + columns)
    _file_drafts(a, slots, drafts, found)


def splice_drafts(a: Any, n: int) -> None:
    """By slot: both drafts compared place by place, then one of them kept whole."""
    slots = a.slot_order[:n]
    named, row = owners(choose(a.draft_budget[:n] > 0, slots, PAD_SLOT), a.draft_len.shape[0])
    places = numbers(a.drafts.shape[1], slots).unsqueeze(0)
    old, size = a.draft_len.clone(), a.found_len
    equal = (a.drafts == a.found) & (places < paddle.minimum(old, size).unsqueeze(1))
    same = paddle.cumprod(as_int(equal), dim=1).sum(axis=1, dtype="int32")
    taken = named & (same >= paddle.gather(a.agree[:n], row)) & (same < size)
    there = places < size.unsqueeze(1)
    if a.draft_logprobs is not None:
        write_where(a.draft_logprobs, taken.unsqueeze(1) & there & (places >= same.unsqueeze(1)), 0.0)
    write_where(a.drafts, taken, choose(there, a.found, NO_TOKEN))
    write_where(a.draft_len, taken, size)
    write_where(a.kept_drafts, named, choose(taken, same, old))


def _file_drafts(a: Any, slots: Tensor, drafts: Tensor, found: Tensor) -> None:
    """Write the first `found` [n] of `drafts` [n, K] to the slots of their sequences."""
    named, row = owners(slots, a.draft_len.shape[0])
    columns = numbers(drafts.shape[1], slots).unsqueeze(0)
    kept = named.unsqueeze(1) & (columns < paddle.gather(found, row).unsqueeze(1))
    write_where(a.drafts, kept, paddle.gather(drafts, row))
    write_where(a.draft_len, named, paddle.gather(found, row))


KERNELS: dict[str, Kernel] = {
    **{function.__name__: function for function in (
        scatter, pack_rows, pack_logit_rows, verify_match, commit_window, advance_draft,
    )},
    **{function.__name__: plain(function) for function in (
        reserve_blocks, force_choices,
        snapshot_output, pack_draft_rows, begin_draft, draft_ngram, align_drafts, splice_drafts,
    )},
}  # fmt: skip
"""Contract name to kernel."""
