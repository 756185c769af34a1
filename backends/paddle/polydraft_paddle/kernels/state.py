"""Integer state kernels in portable Paddle operations: staged writes, packing, verification, commit and drafts.

`table.py` lists them. They are whole-batch operations of fixed shapes: what carries nothing is masked, not skipped, and no length
reaches the host.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle

from polydraft.contracts.base import Limits
from polydraft.contracts.kernels.scatter import Run as Word
from polydraft.contracts.layout import SNAPSHOT_TOKENS, Snapshot
from polydraft.sentinels import NO_ROW, NO_TOKEN, PAD_SLOT, Finish, Phase
from polydraft_paddle.ops import (
    First,
    Tensor,
    above,
    and_behind,
    as_int,
    at,
    both,
    carried,
    choose,
    clamp,
    constant,
    direct,
    equals,
    flat,
    in_place,
    into,
    masked,
    multiples,
    named,
    number,
    numbers,
    owners,
    part,
    pick,
    put,
    put_chosen,
    ranges_of,
    scatter_rows,
    take,
    taken,
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


def reserve_blocks(a: Any, limits: Limits) -> Run:
    """A slot is covered when no entry that it needs is a hole; looked at slot by slot, whoever asks."""
    del limits
    table, num_slots = a.block_table, a.phase.shape[0]
    may_ask = paddle.to_tensor(np.array([phase in (Phase.DECODE, Phase.PAUSED) for phase in Phase]), place=table.place)

    def run(n: int) -> None:
        if not n:
            return
        need = direct.minimum(direct.add(a.kv_len, a.draft_len) + (1 + a.lookahead), a.max_total)
        starts = direct.unsqueeze(multiples(table.shape[1], a.block_size, table), [0])
        holes = both(direct.less_than(table, number(0, table)), direct.less_than(starts, direct.unsqueeze(need, [1])))
        settled = choose(direct.any(holes, [1], False), constant(PAUSED, a.phase), DECODE)
        asks = both(take(may_ask, a.phase), named(part(a.slot_order, 0, n), num_slots))
        write_where(a.phase, asks, settled)

    return run


def sequences(lengths: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of `count` packed rows: which carry something, and the sequence of each; and where each sequence ends."""
    ends, rows, last = paddle.cumsum(lengths, dtype="int32"), numbers(count, lengths), lengths.shape[0] - 1
    return direct.less_than(rows, part(ends, last, last + 1)), within(ranges_of(ends, rows), last + 1), ends


class Linear:
    """Sums of slot columns, with factors that depend on the phase, for slots or for sequences whose slots are looked up: as many
    as wanted by one gather, one product and one sum. A sequence without a slot has the factors of phase IDLE, and 0 everywhere.

    `columns`: names of the columns that are added; `SLOT_ID` is the slot's number, `ONE` is 1, and `one_of_nobody` for a sequence
    without a slot. `wanted`: for each result the factor of each column, by phase (`OTHERS`: in all that are not named)."""

    def __init__(self, columns: tuple[str, ...], wanted: Wanted, num_slots: int, place: Any, one_of_nobody: int = 0) -> None:
        factors = np.zeros((len(wanted), len(columns), len(Phase)), np.int32)
        for factor, by_phase in zip(factors, wanted, strict=True):
            for phase in Phase:
                for name, value in by_phase.get(int(phase), by_phase.get(OTHERS, {})).items():
                    factor[columns.index(name), int(phase)] = value
        upload = functools.partial(paddle.to_tensor, place=place)
        self._named, self._count, self._each = columns, len(wanted), num_slots + 1
        self._factors = upload(factors.reshape(-1, len(Phase)))
        nothing = upload(np.zeros(1, np.int32))
        self._nobody = {name: upload(np.array([one_of_nobody], np.int32)) if name == ONE else nothing for name in columns}
        self._idle = upload(np.array([Phase.IDLE], np.int32))
        self._known = {SLOT_ID: upload(np.arange(num_slots, dtype=np.int32)), ONE: upload(np.ones(num_slots, np.int32))}

    def of(self, a: Any, slots: Tensor) -> Tensor:
        """The results [wanted, n] int32 for the slots `slots` [n], PAD_SLOT where there is none."""
        parts = [self._idle, a.phase]
        for name in self._named:
            parts += [self._nobody[name], self._column(a, name)]
        table = direct.reshape(direct.concat(parts, 0), [1 + len(self._named), self._each])
        found = direct.gather(table, slots + 1, 1)
        return self._sums(flat(part(found, 0, 1)), part(found, 1, 1 + len(self._named)))

    def by_slot(self, a: Any, phase: Tensor) -> Tensor:
        """The results [wanted, B] int32 for every slot, by the phase that is given."""
        return self._sums(phase, direct.stack([self._column(a, name) for name in self._named], 0))

    def _column(self, a: Any, name: str) -> Tensor:
        return self._known[name] if name in self._known else getattr(a, name)

    def _sums(self, phase: Tensor, columns: Tensor) -> Tensor:
        factors = direct.reshape(direct.gather(self._factors, phase, 1), [self._count, len(self._named), phase.shape[0]])
        return direct.sum(direct.multiply(factors, direct.unsqueeze(columns, [0])), [1], paddle.int32, False)


Wanted = tuple[Mapping[int, Mapping[str, int]], ...]
"""What `Linear` adds up: for each result, by phase, the factor of each column."""
SLOT_ID, ONE, OTHERS = "slot id", "one", -1
ANY = 1 << 30
"""More than any length, position or count."""


def of_rows(ends: Tensor, rows: int) -> Tensor:
    """The sequence of each packed row, the number of sequences where none is; sequences end at `ends` [B]."""
    return ranges_of(ends, numbers(rows, ends))


def beside(nobody: tuple[Tensor, ...], *columns: Tensor) -> Tensor:
    """A table of these columns [B] with what `nobody` [1] each says behind them."""
    parts = [part for pair in zip(columns, nobody, strict=True) for part in pair]
    return direct.reshape(direct.concat(parts, 0), [len(columns), columns[0].shape[0] + 1])


def singles(place: Any, *values: int) -> tuple[Tensor, ...]:
    """A tensor [1] int32 of each."""
    return tuple(paddle.to_tensor(np.array([value], np.int32), place=place) for value in values)


KNOWN = {"prompt_len": 1, "num_generated": 1}
"""Factors of the tokens that a slot knows."""
PACKED = ("kv_len", "draft_len", "prefill_len", "prompt_len", "num_generated", SLOT_ID, ONE)
"""The columns that packing reads."""
LOGITS: Wanted = (
    {DECODE: {ONE: ANY}},  # all rows need logits
    {PREFILL: KNOWN | {"kv_len": -1, ONE: -1}, OTHERS: {ONE: ANY}},  # the last one does, if there are more than so many
    {OTHERS: {"kv_len": 1, ONE: 1}},
)
"""What `LogitRows` adds up."""


def rows_wanted(length: int, width: int) -> Wanted:
    """What `Rows` adds up, for texts of `length` and `width` drafts."""
    at_token = {SLOT_ID: length}
    return (
        {DECODE: {"draft_len": 1, ONE: 1}, PREFILL: {"prefill_len": 1, "kv_len": -1}},  # rows wanted
        {OTHERS: {"kv_len": 1}},  # the position of the first row, of which the following ones have the next
        {DECODE: at_token | KNOWN | {ONE: -1}, PREFILL: at_token | {"kv_len": 1}},  # where its token lies,
        {DECODE: {SLOT_ID: width, ONE: -1}},  # and, one place in front of it, the first draft
        {PREFILL: {ONE: ANY}},  # the row in front of the one that drafts begin with
        {OTHERS: {ONE: 1}},  # by how much each of the first three moves with the row,
        {PREFILL: {ONE: 1}},
        {DECODE: {ONE: 1}},
        {OTHERS: {ONE: -1}},  # and the fourth with the row that the sequence begins with
        {OTHERS: {SLOT_ID: 1}},
    )


class Rows:
    """Packs rows, from the sums of their sequences (`rows_wanted`)."""

    def __init__(self, a: Any) -> None:
        self._a = a
        nobody = np.zeros((9, 1), np.int32)
        nobody[1], nobody[3], nobody[8] = a.tokens.size, ANY, PAD_SLOT  # behind all tokens there is none
        self._nobody = paddle.to_tensor(nobody, place=a.tokens.place)

    def pack(self, sums: Tensor, n: int) -> None:
        """Lengths and offsets by sequence, then everything else by row through the row's sequence."""
        a = self._a
        num_seqs = a.slot_order.shape[0]
        wanted = direct.minimum(flat(part(sums, 0, 1)), a.seq_rows)
        into(a.seq_len, num_seqs, direct.maximum, wanted, number(0, wanted))
        ends = paddle.cumsum(a.seq_len, dtype="int32")
        into(a.seq_start, num_seqs, direct.subtract, ends, a.seq_len)
        if not n:
            return
        # what row 0 would have, if the sequence began there
        begun = direct.subtract(part(sums, 1, 5), direct.multiply(part(sums, 5, 9), direct.unsqueeze(a.seq_start, [0])))
        table = direct.concat([direct.concat([begun, part(sums, 5, 10)], 0), self._nobody], 1)
        sequence, rows = of_rows(ends, n), numbers(n, ends)
        found = direct.gather(table, sequence, 1)
        moved = direct.multiply(part(found, 4, 7), direct.unsqueeze(rows, [0]))
        place = clamp(direct.add(part(found, 1, 3), part(moved, 1, 3)))
        tokens, place_of_token = flat(and_behind(a.tokens)), flat(part(place, 0, 1))
        if a.drafts.shape[1]:
            is_draft = direct.less_than(flat(part(found, 3, 4)), rows)
            drafts = take(flat(a.drafts), flat(part(place, 1, 2)))
            into(a.ids, n, direct.where, is_draft, drafts, take(tokens, place_of_token))
        else:
            into(a.ids, n, direct.gather, tokens, place_of_token, 0)
        into(a.row_slot, n, direct.gather, flat(part(table, 8, 9)), sequence, 0)
        into(a.positions, n, direct.add, flat(part(found, 0, 1)), flat(part(moved, 0, 1)))


class LogitRows:
    """Packs the rows that need logits, from the sums of their sequences (`LOGITS`)."""

    def __init__(self, a: Any) -> None:
        self._a = a
        self._nobody = singles(a.phase.place, NO_ROW, 0, 0, PAD_SLOT)

    def pack(self, sums: Tensor, n: int) -> None:
        """Like `Rows.pack`."""
        a = self._a
        slots, seq_len = a.slot_order, a.seq_len
        # What a prefill has left to know is never less than its rows: it is complete, and fresh, where both are the same.
        completes = direct.subtract(seq_len, flat(part(sums, 1, 2)))  # 1 or less
        most = direct.maximum(flat(part(sums, 0, 1)), completes)
        into(a.logit_len, len(slots), direct.minimum, seq_len, most)
        ends = paddle.cumsum(a.logit_len, dtype="int32")
        into(a.logit_start, len(slots), direct.subtract, ends, a.logit_len)
        if not n:
            return
        # From a logit row to its row within the sequence: a prefill's single one is the last.
        shift = direct.subtract(seq_len, ends)
        row, position = direct.add(a.seq_start, shift), direct.add(flat(part(sums, 2, 3)), shift)
        table = beside(self._nobody, row, position, constant(1, slots), slots)
        sequence, rows = of_rows(ends, n), numbers(n, slots)
        found = direct.gather(table, sequence, 1)
        moved = direct.multiply(flat(part(found, 2, 3)), rows)
        into(a.logit_row, n, direct.add, flat(part(found, 0, 1)), moved)
        into(a.logit_position, n, direct.add, flat(part(found, 1, 2)), moved)
        into(a.logit_slot, n, direct.gather, flat(part(table, 3, 4)), sequence, 0)


def pack_rows(a: Any, limits: Limits) -> Run:
    """Lengths and offsets by sequence, then everything else by row through the row's sequence."""
    del limits
    num_slots, length = a.tokens.shape
    sums, rows = Linear(PACKED, rows_wanted(length, a.drafts.shape[1]), num_slots, a.tokens.place), Rows(a)
    return lambda n: rows.pack(sums.of(a, a.slot_order), n)


def pack_logit_rows(a: Any, limits: Limits) -> Run:
    """Like `pack_rows`, over the rows that need logits."""
    del limits
    columns = tuple(name for name in PACKED if any(name in factors for one in LOGITS for factors in one.values()))
    sums, rows = Linear(columns, LOGITS, a.phase.shape[0], a.phase.place), LogitRows(a)
    return lambda n: rows.pack(sums.of(a, a.slot_order), n)


def pack_both(a: Any, limits: Limits) -> Run:
    """Composite `pack_rows+pack_logit_rows`: what both add up of a slot is added up once."""
    del limits
    first, second = a.parts
    (num_slots, length), capacity = first.tokens.shape, second.logit_row.shape[0]
    wanted = rows_wanted(length, first.drafts.shape[1])
    sums, rows, logits = Linear(PACKED, wanted + LOGITS, num_slots, first.tokens.place), Rows(first), LogitRows(second)

    def run(n: int) -> None:
        found = sums.of(first, first.slot_order)
        rows.pack(found, n)
        logits.pack(part(found, len(wanted), len(wanted) + len(LOGITS)), capacity)

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


def verify_match(a: Any, n: int) -> None:
    """Compare whole windows; a running product finds the first mismatch."""
    slots, width = part(a.slot_order, 0, n), a.window.shape[1]
    safe = clamp(slots)
    length = masked(part(a.logit_len, 0, n), carried(slots))
    put_chosen(a.drafted, n, equals(take(a.phase, safe), DECODE), length - 1, -1)
    columns = direct.unsqueeze(numbers(width, slots), [0])
    places = within(direct.add(direct.unsqueeze(part(a.logit_start, 0, n), [1]), columns), a.choices.shape[0])
    choices = direct.reshape(take(a.choices, direct.reshape(places, [-1])), [n, width])
    put(part(a.accepted, 0, n), _matches(choices, take(a.drafts, safe), part(a.drafted, 0, n)))
    into(a.window_len, n, direct.minimum, part(a.accepted, 0, n) + 1, length)
    put_chosen(a.window, n, direct.less_than(columns, direct.unsqueeze(part(a.window_len, 0, n), [1])), choices, NO_TOKEN)


class Ends:
    """Where windows of `width` tokens end, and why. A token that ends one has a code, greater the further in front it is: twice
    the places from its own on, and 1 more where there is no token; 0 where the window goes on."""

    def __init__(self, num_slots: int, width: int, place: Any) -> None:
        codes = np.arange(2 * width + 2)
        at = width - codes // 2
        tables = at + 1 - codes % 2, at + 1, np.where(codes % 2, int(Finish.ERROR), int(Finish.STOP))
        of_stops = np.tile(2 * np.arange(width, 0, -1), (num_slots, 1))
        upload = functools.partial(paddle.to_tensor, place=place)
        self._of_stops, self._of_nothing, self._of_code = (
            upload(values.astype(np.int32)) for values in (of_stops, of_stops + 1, np.stack(tables))
        )

    def of(self, window: Tensor, stop_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of windows [B, W] with stop tokens [B, S]: how many tokens count and how many were looked at, if one ends it, and why
        (`Finish`); [B]. Both numbers are greater than W where none does."""
        stops = direct.any(direct.equal(direct.unsqueeze(window, [2]), direct.unsqueeze(stop_tokens, [1])), [2], False)
        codes = direct.where(equals(window, NO_TOKEN), self._of_nothing, choose(stops, self._of_stops, 0))
        found = direct.gather(self._of_code, direct.max(codes, [1], False), 1)
        emitted, looked_at, why = (flat(part(found, i, i + 1)) for i in range(3))
        return emitted, looked_at, why


class Commit:
    """Commits windows slot by slot, looking for the sequence of each. `a`: the record of `commit_window`; `columns`, `wanted`:
    what is added up of a slot besides (`Linear`)."""

    def __init__(self, a: Any, columns: tuple[str, ...] = (), wanted: Wanted = ()) -> None:
        (num_slots, room), place, judged = a.tokens.shape, a.tokens.place, (PREFILL, DECODE)
        self._a, self._num_slots, self._room = a, num_slots, room
        self._ends = Ends(num_slots, a.window.shape[1], place)
        self._sums = Linear(
            ("prompt_len", "num_generated", "kv_len", "prefill_len", "max_total", "seq_len", SLOT_ID, ONE, *columns),
            (
                {PREFILL: {"kv_len": 1, "seq_len": 1}, OTHERS: {"kv_len": 1}},  # rows of prompts are committed whatever follows
                {PREFILL: {"prefill_len": 1, "kv_len": -1, "seq_len": -1}, DECODE: {}, OTHERS: {ONE: 1}},  # rows to go
                {phase: {"max_total": 1, "prompt_len": -1, "num_generated": -1} for phase in judged} | {OTHERS: {ONE: 1}},
                {phase: KNOWN | {SLOT_ID: room} for phase in judged} | {OTHERS: {SLOT_ID: room, ONE: 1}},
                {DECODE: {ONE: 1}},
                *wanted,
            ),
            num_slots,
            place,
        )
        self._count = 5 + len(wanted)
        (self._nothing,) = singles(place, 0)
        after = [DECODE if reason == Finish.NONE else FINISHED for reason in Finish]
        self._after = paddle.to_tensor(np.array(after, np.int32), place=place)
        self._nowhere = constant(a.slot_order.shape[0], numbers(num_slots + 1, a.phase))

    def sequences(self, n: int, *columns: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Of each of `n` sequences its slot, [n] int32, the number of slots where it has no rows. Of each slot its sequence, [B],
        the number of sequences where it has none, and what `columns` [B] say of that, 0 where there is none."""
        a = self._a
        key = choose(above(part(a.seq_len, 0, n), 0), part(a.slot_order, 0, n), self._num_slots)
        row = part(direct.put_along_axis(self._nowhere, key, numbers(n, key), 0, "assign", True), 0, self._num_slots)
        found = direct.gather(beside((self._nothing,) * len(columns), *columns), row, 1)
        return key, row, tuple(flat(part(found, i, i + 1)) for i in range(len(columns)))

    def sums(self, **by_slot: Tensor) -> tuple[Tensor, ...]:
        """What is added up of each slot, [B] each, of which the first five are for `commit`. `by_slot`: columns that are by
        sequence in the record, "seq_len" among them."""
        a = self._a
        phase = choose(above(by_slot["seq_len"], 0), a.phase, int(Phase.IDLE))
        found = self._sums.by_slot(SimpleNamespace(**vars(a) | by_slot), phase)
        return tuple(flat(part(found, i, i + 1)) for i in range(self._count))

    def commit(self, window: Tensor, size: Tensor, sums: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Find where windows [B, W] of `size` tokens end, file the tokens before it, move length and phase. Returns how many
        tokens count, and in a decode round, [B] int32; and which, bool [B, W]."""
        a = self._a
        kv_len, to_go, left, begin, decode = sums
        committed = equals(to_go, 0)
        limit = masked(direct.minimum(size, left), committed)
        until, looked_at, why = self._ends.of(window, a.stop_tokens)
        emitted = direct.minimum(until, limit)
        full = direct.equal(emitted, left)
        reason = choose(full, constant(int(Finish.LENGTH), size), int(Finish.NONE))
        reason = direct.where(direct.less_equal(looked_at, limit), why, reason)
        verified = direct.multiply(emitted, decode)

        kept = self._append(begin, emitted, window)
        in_place(direct.add_, a.num_generated, emitted)
        into(a.kv_len, self._num_slots, direct.add, kv_len, verified)
        write_where(a.phase, committed, take(self._after, reason))
        into(a.finish, self._num_slots, direct.maximum, a.finish, reason)
        return emitted, verified, kept

    def _append(self, begin: Tensor, emitted: Tensor, window: Tensor) -> Tensor:
        """Write the first `emitted` [B] tokens of `window` [B, W] from place `begin` [B] of all tokens on. The others go to the
        last place behind all. Returns which are written."""
        here = direct.unsqueeze(numbers(window.shape[1], begin), [0])
        kept = direct.less_than(here, direct.unsqueeze(emitted, [1]))
        to = choose(kept, direct.add(direct.unsqueeze(begin, [1]), here), (self._num_slots + 1) * self._room - 1)
        in_place(direct.put_along_axis_, flat(and_behind(self._a.tokens)), flat(to), flat(window), 0, "assign", True)
        return kept


def commit_window(a: Any, limits: Limits) -> Run:
    """The windows of slots, then what they came to by sequence."""
    del limits
    width, commit, nobody = a.window.shape[1], Commit(a), singles(a.phase.place, 0, 0)

    def run(n: int) -> None:
        if not n:
            return
        key, row, (rows, size) = commit.sequences(n, a.seq_len, a.window_len)
        emitted, verified, _ = commit.commit(take(and_behind(a.window), row), size, commit.sums(seq_len=rows))
        of = beside(nobody, emitted, verified)
        into(a.out_len, n, direct.gather, flat(part(of, 0, 1)), key, 0)
        columns = direct.less_than(direct.unsqueeze(numbers(width, key), [0]), direct.unsqueeze(part(a.out_len, 0, n), [1]))
        put_chosen(a.out_tokens, n, columns, part(a.window, 0, n), NO_TOKEN)
        into(a.out_accepted, n, direct.minimum, part(a.accepted, 0, n), take(flat(part(of, 1, 2)), key))

    return run


def verify_and_commit(a: Any, limits: Limits) -> Run:
    """Composite `verify_match+commit_window`: a window is a run of choices, looked at slot by slot as well."""
    del limits
    verify, a = a.parts
    width, place = verify.drafts.shape[1], a.tokens.place
    commit = Commit(a, ("logit_len",), ({DECODE: {"logit_len": 1, ONE: -1}, OTHERS: {ONE: -1}},))  # drafts that were verified
    nobody, no_tokens = singles(place, 0, 0, -1), paddle.full([1, width + 1], NO_TOKEN, "int32")

    def run(n: int) -> None:
        if not n:
            return
        key, _, (rows, length, start) = commit.sequences(n, a.seq_len, verify.logit_len, verify.logit_start)
        columns = direct.unsqueeze(numbers(width + 1, key), [0])
        places = within(direct.add(direct.unsqueeze(start, [1]), columns), verify.choices.shape[0])
        window = direct.reshape(take(verify.choices, flat(places)), places.shape)
        *sums, drafted = commit.sums(seq_len=rows, logit_len=length)
        accepted = _matches(window, verify.drafts, drafted)
        size = direct.minimum(accepted + 1, length)
        emitted, verified, kept = commit.commit(window, size, tuple(sums))
        of = beside(nobody, emitted, direct.minimum(accepted, verified), drafted)
        for i, column in enumerate((a.out_len, a.out_accepted, verify.drafted)):
            into(column, n, direct.gather, flat(part(of, i, i + 1)), key, 0)
        tokens = direct.concat([choose(kept, window, NO_TOKEN), no_tokens], 0)
        into(a.out_tokens, n, direct.gather, tokens, key, 0)

    return run


def _matches(choices: Tensor, drafts: Tensor, drafted: Tensor) -> Tensor:
    """How many of the first `drafted` [n] of `drafts` [n, K] are those chosen, up to the first that differs, int32 [n]; `choices`
    has one more a row."""
    width = drafts.shape[1]
    if not width:
        return constant(0, drafted)
    verified = direct.less_than(numbers(width, drafted), direct.unsqueeze(drafted, [1]))
    match = both(direct.equal(choices[:, :-1], drafts), verified)
    return direct.sum(paddle.cumprod(as_int(match), dim=1), [1], paddle.int32, False)


def snapshot_output(a: Any, limits: Limits) -> Run:
    """Stack the columns; records past the end become the empty one."""
    del limits
    empty = np.full(a.record.shape, NO_TOKEN, np.int32)
    empty[:, :SNAPSHOT_TOKENS] = 0
    empty[:, Snapshot.SLOT], empty[:, Snapshot.DRAFTED] = PAD_SLOT, -1
    nobody = paddle.to_tensor(empty, place=a.record.place)

    def run(n: int) -> None:
        if not n:
            return
        slots, length, accepted, drafted, tokens = (
            part(t, 0, n) for t in (a.slot_order, a.out_len, a.out_accepted, a.drafted, a.out_tokens)
        )
        epoch, finish, phase, kv_len = taken(clamp(slots), a.epoch, a.finish, a.phase, a.kv_len)
        columns = (slots, epoch, length, accepted, drafted, finish, phase, kv_len)
        record = direct.concat([*(direct.unsqueeze(column, [1]) for column in columns), tokens], 1)
        live = direct.unsqueeze(carried(slots), [1]).expand_as(record)
        into(a.record, n, direct.where, live, record, part(nobody, 0, n))

    return run


def pack_draft_rows(a: Any, limits: Limits) -> Run:
    """Shift the rows by one token; what is not known by then drops out."""
    del limits
    num_slots, length = a.tokens.shape
    last = KNOWN | {ONE: -1}
    sums = Linear(
        ("prompt_len", "num_generated", SLOT_ID, ONE),
        ({PREFILL: last, DECODE: last, OTHERS: {ONE: -ANY}}, {OTHERS: {SLOT_ID: length, ONE: 1}}),
        num_slots,
        a.tokens.place,
        one_of_nobody=1,
    )

    def run(n: int) -> None:
        if not n:
            return
        row_slot, positions = part(a.row_slot, 0, n), part(a.positions, 0, n)
        found = sums.of(a, row_slot)
        keep = direct.less_than(positions, flat(part(found, 0, 1)))
        following = choose(keep, direct.add(positions, flat(part(found, 1, 2))), num_slots * length)
        into(a.draft_ids, n, direct.gather, flat(and_behind(a.tokens)), following, 0)
        put_chosen(a.draft_row_slot, n, keep, row_slot, PAD_SLOT)

    return run


def begin_draft(a: Any, limits: Limits) -> Run:
    """Empty the drafts of slots that had rows; say who drafts, from where and how far."""
    del limits
    sums = Linear(
        ("max_total", "prompt_len", "num_generated", "kv_len", ONE),
        ({DECODE: {"max_total": 1, "prompt_len": -1, "num_generated": -1, ONE: -1}}, {OTHERS: {"kv_len": 1, ONE: -1}}),
        a.phase.shape[0],
        a.phase.place,
    )

    def run(n: int) -> None:
        if not n:
            return
        ran = choose(above(part(a.seq_len, 0, n), 0), part(a.slot_order, 0, n), PAD_SLOT)
        emptied = named(ran, a.draft_len.shape[0])
        write_where(a.draft_len, emptied, 0)
        if a.drafts.shape[1]:
            write_where(a.drafts, emptied, NO_TOKEN)
        found = sums.of(a, ran)
        budget = direct.minimum(flat(part(found, 0, 1)), number(a.num_drafts, ran))
        active = above(budget, 0)
        put_chosen(a.draft_slot, n, active, ran, PAD_SLOT)
        put_chosen(a.draft_position, n, active, flat(part(found, 1, 2)), 0)
        into(a.draft_budget, n, direct.maximum, budget, number(0, budget))

    return run


def advance_draft(a: Any, limits: Limits) -> Run:
    """File what was chosen, then retire what is done."""
    del limits
    (num_slots, width), index = a.drafts.shape, a.pass_index

    def run(n: int) -> None:
        if not n:
            return
        slots, chosen = part(a.draft_slot, 0, n), part(a.chosen, 0, n)
        filed = carried(direct.minimum(slots, chosen))
        slot = choose(filed, slots, num_slots)  # what is not filed goes behind all
        place = direct.scale(slot, width, index, True)
        in_place(direct.put_along_axis_, flat(and_behind(a.drafts)), place, chosen, 0, "assign", True)
        in_place(direct.put_along_axis_, and_behind(a.draft_len), slot, constant(index + 1, slot), 0, "assign", True)
        goes_on = both(filed, above(part(a.draft_budget, 0, n), index + 1))
        in_place(direct.add_, part(a.draft_position, 0, n), as_int(goes_on))
        put_chosen(a.next_ids, n, goes_on, chosen, NO_TOKEN)
        put_chosen(a.draft_slot, n, goes_on, slots, PAD_SLOT)

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
        scatter, reserve_blocks, pack_rows, pack_logit_rows, commit_window, snapshot_output, pack_draft_rows, begin_draft,
        advance_draft,
    )},
    **{function.__name__: plain(function) for function in (
        force_choices, verify_match, draft_ngram, align_drafts, splice_drafts,
    )},
    "pack_rows+pack_logit_rows": pack_both,
    "verify_match+commit_window": verify_and_commit,
}  # fmt: skip
"""Contract name to kernel."""
