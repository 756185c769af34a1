"""Messages of deltas: what was packed comes back, whatever was damaged is refused, and nothing has a fixed size."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydraft import RequestOutput, SamplingParams
from polydraft.errors import RecordError
from polydraft.output.output_processor import OutputProcessor
from polydraft.output.request_delta import FINISHES, Count, Head, RequestDelta, pack, unpack
from polydraft.program.packed import NO_ROWS, entry_type, row_type
from tests.support.runs import engine


def rows(rng: np.random.Generator, count: int, columns: int) -> Any:
    """Rows of log probabilities; some as views of a record with more columns than they have."""
    if not columns or not count:
        return NO_ROWS
    found = (
        np.zeros(count, entry_type(1, columns + 2, columns))["rows"][:, 0] if count % 2 else np.zeros(count, row_type(columns))
    )
    found["rank"], found["draft"] = rng.integers(1, 99, count), rng.integers(-1, 9999, count)
    found["draft_logprob"] = -rng.exponential(2, count)
    found["ids"], found["logprobs"] = rng.integers(-1, 9999, (count, columns)), -rng.exponential(3, (count, columns))
    return found


def one(rng: np.random.Generator, handle: int, columns: int, *, text: str = "", error: str = "") -> RequestDelta:
    t, r = int(rng.integers(0, 40)), int(rng.integers(0, 9))
    tokens, rounds, verified, looked_up, forced = (
        rng.integers(0, 9999, n).astype(np.int32) for n in (t, r, r, r, rng.integers(0, 3))
    )
    prompt = rows(rng, int(rng.integers(0, 4)), int(rng.integers(1, 4)))
    return RequestDelta(
        handle, str(rng.choice(["", *list(FINISHES)[1:]])), tokens, rounds, verified, looked_up, forced, rows(rng, t, columns),
        prompt, text, error,
    )  # fmt: skip


def batch(seed: int, size: int, columns: int, texts: list[str]) -> list[RequestDelta]:
    rng = np.random.default_rng(seed)
    return [
        one(
            rng,
            i * 7 + 1,
            columns if rng.random() < 0.6 else 0,
            text=texts[i % len(texts)],
            error=texts[-1] if i % 3 == 2 else "",
        )
        for i in range(size)
    ]


def same(got: RequestDelta, wanted: RequestDelta) -> None:
    pairs: Any = zip(RequestDelta._fields, got, wanted, strict=True)
    for name, left, right in pairs:
        if isinstance(right, np.ndarray) and right.dtype.names:
            for field in right.dtype.names:
                np.testing.assert_array_equal(left[field], right[field], f"{name}.{field}")
        elif isinstance(right, np.ndarray):
            np.testing.assert_array_equal(left, right, name)
        else:
            assert left == right, name


@given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(0, 12), columns=st.integers(0, 30),
    texts=st.lists(st.text(max_size=20), min_size=1, max_size=4),
)  # fmt: skip
def test_deltas_come_back(seed: int, size: int, columns: int, texts: list[str]) -> None:
    deltas = batch(seed, size, columns, texts)
    got = unpack(pack(deltas))
    assert len(got) == size
    for left, right in zip(got, deltas, strict=True):
        same(left, right)


@pytest.mark.parametrize(("size", "columns"), [(600, 3), (2, 65535), (1, 1)])
def test_nothing_has_a_fixed_size(size: int, columns: int) -> None:
    deltas = batch(1, size, columns, ["x"])
    for left, right in zip(unpack(pack(deltas)), deltas, strict=True):
        same(left, right)


def test_more_columns_than_a_record_has_are_refused() -> None:
    rng = np.random.default_rng(2)
    wide = one(rng, 1, 0)._replace(token_ids=np.ones(1, np.int32), logprobs=np.zeros(1, row_type(65536)))
    with pytest.raises(RecordError, match="65536 columns"):
        pack([wide])


@given(seed=st.integers(0, 99), word=st.sampled_from(list(Head)), bit=st.integers(0, 31))
def test_a_damaged_header_is_refused(seed: int, word: Head, bit: int) -> None:
    words = bytearray(pack(batch(seed, 4, 3, ["abc", "d"])))
    words[4 * word + bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        unpack(bytes(words))


@given(seed=st.integers(0, 99), data=st.data())
def test_cut_and_padded_records_are_refused(seed: int, data: st.DataObject) -> None:
    whole = pack(batch(seed, 3, 2, ["äöü", "x"]))
    with pytest.raises(RecordError):
        unpack(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(RecordError):
        unpack(whole + b"\0\0\0\0")


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_empty(data: bytes) -> None:
    with contextlib.suppress(RecordError):
        assert unpack(data) == []


@given(seed=st.integers(0, 99), place=st.integers(0, 10_000), value=st.integers(-(1 << 31), (1 << 31) - 1))
def test_a_damaged_count_never_reads_elsewhere(seed: int, place: int, value: int) -> None:
    """Whatever a count says, lengths still add up to the record, or it is refused."""
    deltas = batch(seed, 3, 2, ["x"])
    data = bytearray(pack(deltas))
    at = 4 * (len(Head) + place % (3 * len(Count)))
    data[at : at + 4] = np.int32(value).tobytes()
    try:
        got = unpack(bytes(data))
    except RecordError:
        return
    assert words(got) == words(deltas)


def words(deltas: list[RequestDelta]) -> int:
    """Of all the arrays."""
    return sum(len(d.token_ids) + 2 * len(d.rounds) + len(d.forced) for d in deltas) + sum(
        len(part) * (3 + 2 * part.dtype["ids"].shape[0]) for d in deltas for part in (d.logprobs, d.prompt_logprobs)
    )


def test_the_deltas_of_an_engine_add_up_to_its_outputs() -> None:
    def started() -> Any:
        running = engine("narrow", draft_tokens=3, logprobs=4, draft_logprobs=True)
        wishes: list[dict[str, Any]] = [{"logprobs": 2, "prompt_logprobs": 3}, {}, {"logprobs": 0, "temperature": 0.9, "seed": 5}]
        for i, wish in enumerate(wishes):
            running.add((5, 9 + i, 33), SamplingParams(max_new_tokens=13, ignore_eos=True, **wish), id=str(i), stream=True)
        return running

    running, polled = started(), started()
    deltas: dict[int, list[RequestDelta]] = {i: [] for i in range(3)}
    last: dict[int, RequestOutput] = {}
    processor = OutputProcessor(running.tokenizer)
    while running.has_work:
        running.step()
        for found in unpack(pack(processor.deltas(running.take()))):
            deltas[found.handle].append(found)
    while polled.has_work:
        polled.step()
        last |= {int(output.id): output for output in polled.poll() if output.finished}
    assert len(last) == 3
    for i, output in last.items():
        mine = deltas[i]
        assert [t for d in mine for t in d.token_ids.tolist()] == list(output.token_ids)
        assert [t for d in mine for t in d.rounds.tolist()] == list(output.rounds)
        assert [t for d in mine for t in d.round_drafts.tolist()] == list(output.round_drafts)
        assert [t for d in mine for t in d.round_lookups.tolist()] == list(output.round_lookups)
        assert not any(len(d.forced) for d in mine)
        assert "".join(d.text for d in mine) == output.text
        assert [d.finish for d in mine] == [""] * (len(mine) - 1) + [output.finish_reason]
        assert bool(output.logprobs) == (i != 1)
        if output.logprobs:
            emitted = [row for d in mine for row in d.logprobs]
            assert [(int(r["ids"][0]), r["logprobs"][0].item(), int(r["rank"])) for r in emitted] == [
                (t.token_id, t.logprob, t.rank) for t in output.tokens
            ]
            for row, token in zip(emitted, output.tokens, strict=True):
                assert token.draft_logprob is None or row["draft_logprob"] == token.draft_logprob
                assert (token.draft_logprob is None) == (token.draft_position == 0)
        else:
            assert not any(len(d.logprobs) for d in mine)
    prompt = last[0].prompt_logprobs
    assert prompt is not None
    (final,) = (d.prompt_logprobs for d in deltas[0] if len(d.prompt_logprobs))
    assert [(int(r["ids"][0]), int(r["rank"]), len(r["ids"]) - 1) for r in final] == [
        (p.token_id, p.rank, len(p.top)) for p in prompt if p is not None
    ]
    assert dataclasses.is_dataclass(last[0])
