"""Packed records: what fits comes back as it was, what does not fit is refused, and nothing is misread silently.

The word with flag and columns is held against its borders; records that the reference's kernel packs are decoded, then damaged
in every word of their header and at random in their body.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydraft.contracts.base import Limits
from polydraft.contracts.layout import MAX_COLUMNS, LogprobHeader, Snapshot, record_words
from polydraft.errors import RecordError
from polydraft.program.packed import Snapshots, Wanted, decode_logprobs, pack_word, unpack_word
from polydraft.reference.logprobs import KERNELS
from polydraft.reference.state_kernels import KERNELS as STATE_KERNELS
from polydraft.sentinels import NO_TOKEN

VOCAB = 50


# -- the first word -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flag", [0, 1, 3, 254, 255])
@pytest.mark.parametrize("columns", [0, 1, 255, 256, 65534, 65535])
def test_a_word_comes_back(flag: int, columns: int) -> None:
    assert unpack_word(pack_word(flag, columns)) == (flag, columns)


@pytest.mark.parametrize(("flag", "columns"), [(256, 0), (-1, 1), (3, 65536), (3, -1), (1 << 31, 1), (0, 1 << 24)])
def test_what_has_no_room_is_refused(flag: int, columns: int) -> None:
    with pytest.raises(RecordError, match="a record has"):
        pack_word(flag, columns)


@pytest.mark.parametrize("word", [-1, 1 << 24, (1 << 31) - 1, -(1 << 31)])
def test_a_word_with_other_bits_is_refused(word: int) -> None:
    with pytest.raises(RecordError, match="first word"):
        unpack_word(word)


@given(st.integers(-(1 << 31), (1 << 31) - 1))
def test_every_word_is_refused_or_unambiguous(word: int) -> None:
    try:
        flag, columns = unpack_word(word)
    except RecordError:
        assert not 0 <= word < 1 << 24
    else:
        assert pack_word(flag, columns) == word


# -- records of log probabilities ---------------------------------------------------------------------------------------
class Packed:
    """A batch, the record that the reference packs of it, and how it is read."""

    def __init__(
        self, seed: int, *, size: int = 5, width: int = 3, columns: int = 4, flag: int = 3, spare: int = 6, tops: bool = False
    ) -> None:
        rng = np.random.default_rng(seed)
        self.order = rng.permutation(size).astype(np.int32)
        self.num_top = rng.integers(-1, columns, size).astype(np.int32)
        self.a = SimpleNamespace(
            slot_order=self.order, num_top=self.num_top, ids=rng.integers(0, VOCAB, (size, width, columns)).astype(np.int32),
            logprobs=-rng.exponential(3, (size, width, columns)).astype(np.float32),
            ranks=rng.integers(1, VOCAB, (size, width)).astype(np.int32),
            extra=rng.integers(-1, width, size).astype(np.int32),
            drafts=rng.integers(0, VOCAB, (size, max(width - 1, 1))).astype(np.int32),
            draft_logprobs=-rng.exponential(3, (size, max(width - 1, 1))).astype(np.float32), flag=flag,
            record=np.full(record_words(size, width, columns, drafts=tops) + spare, 0x5A5A5A5A, np.int32),
            draft_top_ids=None, draft_tops=None,
        )  # fmt: skip
        if tops:
            of_drafts = size, max(width - 1, 1), columns
            self.a.draft_top_ids = rng.integers(NO_TOKEN, VOCAB, of_drafts).astype(np.int32)
            self.a.draft_tops = -rng.exponential(3, of_drafts).astype(np.float32)
        KERNELS["pack_logprobs"](self.a, None)(size)  # type: ignore[arg-type]
        self.wanting = [i for i, slot in enumerate(self.order) if self.num_top[slot] >= 0]
        self.columns = int(self.num_top.max()) + 1
        self.read: dict[str, Any] = {
            "flag": flag, "columns": self.columns, "width": width, "most": size, "max_seqs": size, "vocab": VOCAB,
            "drafts": tops,
        }  # fmt: skip

    def decode(self, **changes: Any) -> Any:
        return decode_logprobs(self.a.record, Wanted(**{**self.read, **changes}))


@given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(1, 9), width=st.integers(1, 7), columns=st.integers(1, 40),
    flag=st.sampled_from([0, 3, 254, 255]), tops=st.booleans(),
)  # fmt: skip
def test_a_record_comes_back(seed: int, size: int, width: int, columns: int, flag: int, *, tops: bool) -> None:
    """Nothing bounds sequences, tokens or columns but the buffers: the record has exactly what was asked for."""
    p = Packed(seed, size=size, width=width, columns=columns, flag=flag, tops=tops)
    block = p.decode()
    assert block["slot"].tolist() == p.order[p.wanting].tolist()
    assert block["extra"].tolist() == p.a.extra[p.wanting].tolist()
    np.testing.assert_array_equal(block["rows"]["rank"], p.a.ranks[p.wanting])
    np.testing.assert_array_equal(block["rows"]["ids"], p.a.ids[p.wanting][..., : p.columns])
    np.testing.assert_array_equal(block["rows"]["logprobs"], p.a.logprobs[p.wanting][..., : p.columns])
    for entry, i in enumerate(p.wanting):
        drafted = max(int(p.a.extra[i]), 0)
        assert block["rows"]["draft"][entry].tolist() == [*p.a.drafts[p.order[i], :drafted], *[NO_TOKEN] * (width - drafted)]
        np.testing.assert_array_equal(block["rows"]["draft_logprob"][entry, :drafted], p.a.draft_logprobs[p.order[i], :drafted])
        if tops:
            for name in ("draft_top_ids", "draft_tops"):
                found, given = block["rows"][name][entry], getattr(p.a, name)[p.order[i], :drafted, : p.columns]
                np.testing.assert_array_equal(found[:drafted], given)
                assert (found[drafted:] == (NO_TOKEN if name == "draft_top_ids" else 0)).all()
    untouched = p.a.record[record_words(len(p.wanting), width, p.columns, drafts=tops) :]
    assert (untouched == 0x5A5A5A5A).all(), "the kernel wrote behind its record"


def test_the_most_columns_that_a_record_can_have() -> None:
    p = Packed(1, size=1, width=1, columns=MAX_COLUMNS)
    p.num_top[:] = MAX_COLUMNS - 1
    p.a.ids[:] = 7
    KERNELS["pack_logprobs"](p.a, None)(1)  # type: ignore[arg-type]
    block = p.decode(columns=MAX_COLUMNS)
    assert block["rows"]["ids"].shape == (1, 1, MAX_COLUMNS)
    assert (block["rows"]["ids"] == 7).all()


@pytest.mark.parametrize("size", [256, 257, 512, 513])
def test_no_batch_is_cut(size: int) -> None:
    """The fixed records that this one replaces ended at 256 and 512 slots."""
    p = Packed(2, size=size, columns=2)
    assert len(p.decode()["slot"]) == len(p.wanting) > size // 2


@given(seed=st.integers(0, 50), word=st.sampled_from(list(LogprobHeader)), bit=st.integers(0, 31))
def test_a_damaged_header_is_refused(seed: int, word: LogprobHeader, bit: int) -> None:
    p = Packed(seed)
    p.a.record.view(np.uint32)[word] ^= np.uint32(1 << bit)
    with pytest.raises(RecordError):
        p.decode()


@given(seed=st.integers(0, 50), place=st.integers(0, 10_000), value=st.integers(-(1 << 31), (1 << 31) - 1))
def test_a_damaged_body_is_refused_or_within_bounds(seed: int, place: int, value: int) -> None:
    p = Packed(seed)
    size = int(p.a.record[LogprobHeader.NUM_WORDS])
    if size == len(LogprobHeader):
        return
    p.a.record[len(LogprobHeader) + place % (size - len(LogprobHeader))] = value
    try:
        block = p.decode()
    except RecordError:
        return
    assert ((block["slot"] >= 0) & (block["slot"] < 5)).all()
    assert ((block["rows"]["ids"] >= NO_TOKEN) & (block["rows"]["ids"] < VOCAB)).all()
    assert ((block["rows"]["rank"] >= 0) & (block["rows"]["rank"] <= VOCAB)).all()
    assert (block["rows"]["logprobs"] <= 1e-3).all()
    assert (block["rows"]["draft_logprob"] <= 1e-3).all()


@pytest.mark.parametrize(
    "changes",
    [{"flag": 4}, {"columns": 9}, {"width": 4}, {"most": 1}, {"max_seqs": 2}, {"vocab": 3}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_was_not_asked_for_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(RecordError):
        Packed(3).decode(**changes)


@given(st.integers(0, 200))
def test_a_cut_record_is_refused(length: int) -> None:
    p = Packed(4)
    size = int(p.a.record[LogprobHeader.NUM_WORDS])
    if length >= size:
        return
    with pytest.raises(RecordError):
        decode_logprobs(p.a.record[:length], Wanted(**p.read))


def test_a_record_of_other_numbers_is_refused() -> None:
    p = Packed(5)
    for words in (p.a.record.astype(np.int64), p.a.record.reshape(1, -1)):
        with pytest.raises(RecordError, match="wanted at least"):
            decode_logprobs(words, Wanted(**p.read))


@pytest.mark.parametrize("value", [np.nan, 0.5, np.inf])
def test_a_number_that_is_no_log_probability_is_refused(value: float) -> None:
    p = Packed(6)
    p.a.logprobs[p.wanting[0], 0, 0] = value
    KERNELS["pack_logprobs"](p.a, None)(5)  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="NaN or above 0"):
        p.decode()


def test_minus_infinity_is_a_log_probability() -> None:
    p = Packed(7)
    p.a.logprobs[p.wanting[0], 0, 0] = -np.inf
    KERNELS["pack_logprobs"](p.a, None)(5)  # type: ignore[arg-type]
    assert p.decode()["rows"]["logprobs"][0, 0, 0] == -np.inf


# -- snapshots ----------------------------------------------------------------------------------------------------------
def limits(size: int, drafts: int) -> Limits:
    return Limits(
        max_seqs=size, num_drafts=drafts, max_rows=64, max_logit_rows=64, max_len=40, block_size=4, num_blocks=64, max_blocks=10,
        vocab_size=VOCAB, max_stop_tokens=4,
    )  # fmt: skip


class Snap:
    """A snapshot that the reference writes of a batch, the batch's slots in launch order, and who reads it."""

    def __init__(self, seed: int, *, size: int = 5, drafts: int = 3, capacity: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        most = capacity or size
        self.slots = rng.permutation(most)[:size].astype(np.int32)
        window = drafts + 1
        self.a = SimpleNamespace(
            slot_order=self.slots, epoch=rng.integers(0, 1 << 30, most).astype(np.int32),
            out_len=rng.integers(0, window + 1, size).astype(np.int32),
            out_accepted=rng.integers(0, drafts + 1, size).astype(np.int32),
            drafted=rng.integers(-1, drafts + 1, size).astype(np.int32), finish=rng.integers(0, 5, most).astype(np.int32),
            phase=rng.integers(0, 5, most).astype(np.int32), kv_len=rng.integers(0, 41, most).astype(np.int32),
            out_tokens=rng.integers(-1, VOCAB, (size, window)).astype(np.int32),
            record=np.full((most, len(Snapshot) + window), 0x5A5A5A5A, np.int32),
        )  # fmt: skip
        STATE_KERNELS["snapshot_output"](self.a, None)(size)  # type: ignore[arg-type]
        self.reader = Snapshots(limits(most, drafts))

    def read(self) -> Any:
        return self.reader.read(self.a.record, self.slots)


@given(
    seed=st.integers(0, 2**32 - 1), capacity=st.sampled_from([1, 2, 9, 256, 257, 513]), drafts=st.integers(0, 9), data=st.data()
)
def test_a_snapshot_comes_back(seed: int, capacity: int, drafts: int, data: st.DataObject) -> None:
    """Batches of one to as many as there is room for, and windows longer than six tokens."""
    size = data.draw(st.sampled_from(sorted({1, max(capacity - 1, 1), capacity})))
    s = Snap(seed, size=size, drafts=drafts, capacity=capacity)
    record = s.read()
    assert record[:, Snapshot.SLOT].tolist() == s.slots.tolist()
    for column, values in (("EPOCH", s.a.epoch), ("FINISH", s.a.finish), ("PHASE", s.a.phase), ("KV_LEN", s.a.kv_len)):
        np.testing.assert_array_equal(record[:, Snapshot[column]], values[s.slots])
    np.testing.assert_array_equal(record[:, Snapshot.DRAFTED], s.a.drafted)
    np.testing.assert_array_equal(record[:, len(Snapshot) :], s.a.out_tokens)
    s.a.record[:] = 0
    assert record[:, Snapshot.SLOT].tolist() == s.slots.tolist(), "it is a copy"


@given(seed=st.integers(0, 50), place=st.integers(0, 59), value=st.integers(-(1 << 31), (1 << 31) - 1))
def test_a_damaged_snapshot_is_refused_or_within_bounds(seed: int, place: int, value: int) -> None:
    s = Snap(seed)
    s.a.record.reshape(-1)[place] = value
    try:
        record = s.read()
    except RecordError:
        return
    assert record[:, Snapshot.SLOT].tolist() == s.slots.tolist()
    assert ((record[:, Snapshot.NUM_TOKENS] >= 0) & (record[:, Snapshot.NUM_TOKENS] <= 4)).all()
    assert ((record[:, len(Snapshot) :] >= NO_TOKEN) & (record[:, len(Snapshot) :] < VOCAB)).all()


@pytest.mark.parametrize("value", [-1, 1 << 30, -(1 << 31), (1 << 31) - 1])
@pytest.mark.parametrize("column", [c for c in range(len(Snapshot) + 4) if c != Snapshot.EPOCH])
def test_no_column_of_a_snapshot_takes_anything(column: int, value: int) -> None:
    if value == -1 and (column >= len(Snapshot) or column == Snapshot.DRAFTED):
        return  # no token, and no round
    s = Snap(1)
    s.a.record[2, column] = value
    with pytest.raises(RecordError, match=f"row 2 of a snapshot has .* {value}, wanted"):
        s.read()


def test_more_rows_than_there_is_room_for_are_refused() -> None:
    s = Snap(2)
    with pytest.raises(RecordError, match="at least 6 rows"):
        s.reader.read(s.a.record, np.append(s.slots, np.int32(5)))
    other = Snap(2, size=6)
    with pytest.raises(RecordError, match="has slot 5, wanted"):
        s.reader.read(other.a.record, other.slots)
    for words in (s.a.record.astype(np.int64), s.a.record[:, :-1], s.a.record.ravel()):
        with pytest.raises(RecordError, match="wanted int32"):
            s.reader.read(words, s.slots)


# -- batches and columns at their borders ---------------------------------------------------------------------------------
@given(flag=st.sampled_from([0, 255, 256]), columns=st.sampled_from([0, 1, 65535, 65536]))
def test_the_borders_of_the_first_word(flag: int, columns: int) -> None:
    if flag > 255 or columns > 65535:
        with pytest.raises(RecordError, match="wanted 0 to"):
            pack_word(flag, columns)
    else:
        assert unpack_word(pack_word(flag, columns)) == (flag, columns)


@given(seed=st.integers(0, 99), size=st.integers(2, 40))
def test_a_record_of_more_entries_than_asked_for_is_refused(seed: int, size: int) -> None:
    """At capacity it is read, and one over it is not."""
    p = Packed(seed, size=size)
    if not p.wanting:
        return
    assert len(p.decode(most=len(p.wanting))) == len(p.wanting)
    with pytest.raises(RecordError, match="wanted at most"):
        p.decode(most=len(p.wanting) - 1)
