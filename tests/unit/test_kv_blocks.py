"""The block ledger: nothing is lost, nothing is granted twice, and what is shared holds the very same text."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polydraft.errors import OutOfBlocks
from polydraft.host.kv_blocks import BlockLedger
from polydraft.sentinels import NO_BLOCK

SEQS, BLOCKS, SIZE, WIDTH = 3, 7, 2, 5


def ledger(**changes: Any) -> BlockLedger:
    wanted: dict[str, Any] = {"num_blocks": BLOCKS, "block_size": SIZE, "max_seqs": SEQS, "max_blocks": WIDTH, **changes}
    return BlockLedger(**wanted)


def ids(*values: int) -> Any:
    return np.array(values)


def test_blocks_are_granted_in_order_of_position_and_reported():
    book = ledger()
    both, more = book.grant(ids(2, 0), ids(2, 1)), book.grant(ids(2), ids(1))
    assert [part.tolist() for part in both] == [[2, 0], [0, 0], [2, 1], [0, 1, 2]]
    assert [part.tolist() for part in more] == [[2], [2], [1], [3]]
    assert book.table.tolist() == [[2, -1, -1, -1, -1], [-1] * 5, [0, 1, 3, -1, -1]]
    assert book.granted(2).tolist() == [0, 1, 3]
    assert [len(part) for part in book.grant(ids(0), ids(0))] == [0] * 4
    assert book.grant(ids(1), ids(1)).blocks.dtype == np.int32
    book.audit()


def test_more_than_there_is_grants_nothing():
    book = ledger()
    book.grant(ids(0), ids(5))
    with pytest.raises(OutOfBlocks, match="3 KV blocks were asked for, 2 are free; pause or preempt a request"):
        book.grant(ids(1, 2), ids(1, 2))
    assert (book.num_free, book.num_granted.tolist()) == (2, [5, 0, 0])
    book.audit()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (2, 1), (3, 2), (10, 5)])
def test_blocks_for_tokens(tokens: int, blocks: int):
    book = ledger()
    assert book.blocks_for(tokens) == blocks
    assert np.array_equal(book.blocks_for(ids(tokens, 2)), ids(blocks, 1))


def test_lacking_is_what_is_missing_and_never_negative():
    book = ledger()
    book.grant(ids(0), ids(2))
    assert book.lacking(ids(0, 0, 1), ids(3, 5, 3)).tolist() == [0, 1, 2]


def test_room_is_negative_where_something_is_lacking():
    book = ledger()
    book.grant(ids(0), ids(2))
    tokens = np.arange(40)
    for slot in (0, 1):
        slots = np.full(40, slot)
        assert ((book.room(slots, tokens) < 0) == (book.lacking(slots, tokens) > 0)).all()
    assert book.room(ids(0, 1), ids(3, 0)).tolist() == [2 * book.block_size - 3, 0]


def test_release_gives_back_everything_and_may_be_repeated():
    book = ledger()
    book.grant(ids(0, 1), ids(3, 2))
    book.release(0)
    book.release(0)
    assert (book.num_free, book.num_granted.tolist()) == (5, [0, 2, 0])
    assert (book.table[0] == NO_BLOCK).all()
    book.audit()


def text(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def remembered(book: BlockLedger, slot: int, tokens: Any, num_committed: int) -> None:
    table = np.zeros((SEQS, 12), np.int32)
    table[slot, : len(tokens)] = tokens
    book.remember(ids(slot), table, ids(num_committed))


def test_committed_blocks_are_found_by_their_text_and_the_token_behind():
    book = ledger()
    book.grant(ids(0), ids(3))
    first = text(5, 6, 7, 8, 9)
    remembered(book, 0, first, 4)
    blocks = book.table[0, :2].tolist()
    assert book.match(first, 2) == blocks
    assert book.match(first, 1) == blocks[:1]
    assert book.match(text(5, 6, 7, 8, 1), 2) == blocks[:1], "the second block's MTP rows depend on the token behind it"
    assert book.match(text(5, 6, 1, 8, 9), 2) == []
    assert book.match(text(4, 6, 7, 8, 9), 2) == [], "a block is known by all that stands before it"


def test_rows_that_are_not_committed_are_not_shared():
    book = ledger()
    book.grant(ids(0), ids(3))
    remembered(book, 0, text(5, 6, 7, 8, 9), 3)
    assert book.match(text(5, 6, 7, 8, 9), 2) == book.table[0, :1].tolist()


def test_shared_blocks_outlive_the_first_holder_and_are_evicted_only_for_room():
    book = ledger()
    tokens = text(5, 6, 7, 8, 9)
    book.grant(ids(0), ids(3))
    remembered(book, 0, tokens, 4)
    shared = book.match(tokens, 2)
    assert book.room_beside(shared) == 4
    book.adopt(1, shared, tokens)
    assert book.granted(1).tolist() == shared
    book.audit()
    book.release(0)
    book.audit()
    assert (book.num_free, book.num_hits) == (5, 4)
    book.release(1)
    assert (book.num_free, book.room_beside(shared)) == (7, 5)
    assert book.match(tokens, 2) == shared, "idle blocks are still known"
    book.grant(ids(2), ids(5))
    assert book.match(tokens, 2) == shared, "there was room without them"
    book.release(2)
    book.grant(ids(0, 2), ids(5, 1))
    assert book.match(tokens, 2) == shared[:1], "the end of a text is evicted first"
    book.grant(ids(1), ids(1))
    assert book.match(tokens, 2) == []
    book.audit()


def test_idle_block_that_is_shared_again_is_held_and_not_evicted():
    book = ledger()
    tokens = text(5, 6, 7, 8, 9, 1, 2)
    book.grant(ids(0), ids(4))
    remembered(book, 0, tokens, 6)
    book.release(0)
    shared = book.match(tokens, 3)
    assert len(shared) == 3
    book.adopt(1, shared, tokens)
    book.audit()
    assert (book.num_free, book.num_hits) == (4, 6)
    assert not set(shared) & set(book.grant(ids(2), ids(4)).blocks.tolist())
    book.audit()


def test_new_weights_forget_every_text():
    book = ledger()
    tokens = text(5, 6, 7, 8, 9)
    book.grant(ids(0, 1), ids(3, 1))
    remembered(book, 0, tokens, 2)
    book.release(0)
    book.forget_all()
    assert book.match(tokens, 2) == []
    remembered(book, 1, tokens, 2)
    assert book.match(tokens, 2) == [], "a text that began under the old weights is not shared any more"
    book.audit()
    book.release(1)
    book.grant(ids(1), ids(1))
    remembered(book, 1, tokens, 2)
    assert len(book.match(tokens, 2)) == 1
    book.forget_all()
    book.grant(ids(2), ids(1))
    remembered(book, 2, tokens, 2)
    assert len(book.match(tokens, 2)) == 1, "a slot that was empty then begins under the new weights"


def test_ledger_that_does_not_share_knows_no_text():
    book = ledger(shares=False)
    tokens = text(5, 6, 7, 8, 9)
    book.grant(ids(0), ids(3))
    remembered(book, 0, tokens, 4)
    book.release(0)
    assert book.match(tokens, 2) == []
    assert book.num_free == BLOCKS
    book.audit()


def test_adopting_into_a_slot_that_holds_blocks_is_a_mistake():
    book = ledger()
    book.grant(ids(0), ids(1))
    with pytest.raises(AssertionError, match="only an empty slot"):
        book.adopt(0, [3], text(1, 2, 3))


WRONG: dict[str, Any] = {
    "a lost block": lambda book: book.__dict__.update(_num_free=book._num_free - 1),
    "a block held and free": lambda book: book._free.__setitem__(0, book.table[0, 0]),
    "a count without a block": lambda book: book.num_granted.__setitem__(1, 1),
    "a hole": lambda book: book.table.__setitem__(0, book.table[0][[1, 4, 0, 2, 3]]),
    "a holder too many": lambda book: book._holders.__setitem__(book.table[0, 0], 2),
    "a key without a block": lambda book: book._block_of.__setitem__(b"x", 0),
    "an idle block without a key": lambda book: book.__dict__.update(_idle={6: None}, _num_free=book._num_free - 1),
}


@pytest.mark.parametrize("damage", WRONG.values(), ids=list(WRONG))
def test_audit_sees(damage: Any):
    book = ledger()
    book.grant(ids(0), ids(2))
    book.audit()
    damage(book)
    with pytest.raises(AssertionError):
        book.audit()


class Ledger(RuleBasedStateMachine):
    """Any order of admissions, growth, commits, releases and weight updates, against a plain model of what each slot holds.

    The model keeps each slot's text and the text whose rows a block holds; a block that is shared must hold the rows that the
    one who shares it would have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.book = ledger()
        self.texts: dict[int, Any] = {}
        self.committed: dict[int, int] = {}
        self.rows: dict[int, tuple[int, ...]] = {}
        """Block to the text up to and behind its end that its rows were computed from."""

    @initialize(seed=st.integers(0, 3))
    def start(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    @rule(slot=st.integers(0, SEQS - 1), tokens=st.lists(st.sampled_from((0, 0, 0, 1)), min_size=2, max_size=9))
    def admit(self, slot: int, tokens: list[int]) -> None:
        """As the scheduler admits: share what matches, be granted the rest."""
        if slot in self.texts:
            return
        known = text(*tokens)
        shared = self.book.match(known, (len(tokens) - 1) // SIZE)
        need = int(self.book.blocks_for(len(tokens))) - len(shared)
        for index, block in enumerate(shared):
            assert self.rows[block] == tuple(tokens[: (index + 1) * SIZE + 1]), "a shared block holds another text's rows"
        if need > self.book.room_beside(shared):
            return
        self.book.adopt(slot, shared, known)
        grant = self.book.grant(ids(slot), ids(need))
        granted = self.book.granted(slot).tolist()
        assert granted == [*shared, *grant.blocks.tolist()]
        assert granted == self.book.table[slot, : len(granted)].tolist()
        self.texts[slot], self.committed[slot] = known, len(shared) * SIZE

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Compute some more rows of a slot; the token behind the last one is always known."""
        slot = data.draw(st.sampled_from(sorted(self.texts)))
        self._commit(slot, data.draw(st.integers(self.committed[slot], len(self.texts[slot]) - 1)))

    def _commit(self, slot: int, count: int) -> None:
        tokens = self.texts[slot].tolist()
        for index in range(self.committed[slot] // SIZE, count // SIZE):
            self.rows[int(self.book.table[slot, index])] = tuple(tokens[: (index + 1) * SIZE + 1])
        self.committed[slot] = count
        table = np.zeros((SEQS, 2 * WIDTH), np.int32)
        table[slot, : len(tokens)] = tokens
        self.book.remember(ids(slot), table, ids(count))

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.texts)))
        self.book.release(slot)
        del self.texts[slot], self.committed[slot]

    @precondition(lambda self: len(self.texts) < SEQS)
    @rule(tokens=st.lists(st.sampled_from((0, 0, 0, 1)), min_size=5, max_size=9))
    def serve(self, tokens: list[int]) -> None:
        """A whole request, which leaves idle blocks behind."""
        slot = next(s for s in range(SEQS) if s not in self.texts)
        self.admit(slot, tokens)
        if slot in self.texts:
            self._commit(slot, len(tokens) - 1)
            self.book.release(slot)
            del self.texts[slot], self.committed[slot]

    @rule(count=st.integers(1, BLOCKS + 2))
    def ask_for_too_much(self, count: int) -> None:
        free = next((s for s in range(SEQS) if s not in self.texts), None)
        if free is None or count <= self.book.num_free:
            return
        before = self.book.table.copy()
        with pytest.raises(OutOfBlocks):
            self.book.grant(ids(free), ids(count))
        assert np.array_equal(before, self.book.table)

    @rule()
    def replace_weights(self) -> None:
        self.book.forget_all()
        self.rows.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.book.audit()
        held = {block for slot in self.texts for block in self.book.table[slot].tolist() if block != NO_BLOCK}
        assert self.book.num_free == BLOCKS - len(held)
        assert {s for s in range(SEQS) if self.book.num_granted[s]} == set(self.texts)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40)
