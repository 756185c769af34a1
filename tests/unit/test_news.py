"""Records of news: what was packed comes back, whatever was damaged is refused, and nothing has a fixed size."""

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
from polydraft.runtime.news import REASONS, Count, Head, News, news_of, pack, unpack
from polydraft.runtime.output import Converter
from tests.support.runs import engine


def one(rng: np.random.Generator, handle: int, columns: int, *, text: str = "", error: str = "") -> News:
    t, r = int(rng.integers(0, 40)), int(rng.integers(0, 9))
    rows = t + int(rng.integers(0, 4)) if columns else 0
    drafts = -rng.exponential(2, rows).astype(np.float32)
    drafts[rng.random(rows) < 0.5] = np.nan
    tokens, rounds, verified, forced = (rng.integers(0, 9999, n).astype(np.int32) for n in (t, r, r, t // 3))
    return News(
        handle, str(rng.choice(["", *list(REASONS)[1:]])), tokens, rounds, verified, forced,
        rng.integers(1, 99, rows).astype(np.int32), drafts, rng.integers(-1, 9999, (rows, columns)).astype(np.int32),
        -rng.exponential(3, (rows, columns)).astype(np.float32), text, error,
    )  # fmt: skip


def batch(seed: int, size: int, columns: int, texts: list[str]) -> list[News]:
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


def same(got: News, wanted: News) -> None:
    pairs: Any = zip(News._fields, got, wanted, strict=True)
    for name, left, right in pairs:
        if name in ("ids", "logprobs") and len(wanted.ranks):
            np.testing.assert_array_equal(left[:, : right.shape[1]], right, name)
        elif isinstance(right, np.ndarray):
            assert left.size == right.size
            np.testing.assert_array_equal(left.ravel(), right.ravel(), name)
        else:
            assert left == right, name


@given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(0, 12), columns=st.integers(0, 30),
    texts=st.lists(st.text(max_size=20), min_size=1, max_size=4),
)  # fmt: skip
def test_news_come_back(seed: int, size: int, columns: int, texts: list[str]) -> None:
    news = batch(seed, size, columns, texts)
    got = unpack(pack(news))
    assert len(got) == size
    for left, right in zip(got, news, strict=True):
        same(left, right)


@pytest.mark.parametrize(("size", "columns"), [(600, 3), (2, 65535), (1, 1)])
def test_nothing_has_a_fixed_size(size: int, columns: int) -> None:
    news = batch(1, size, columns, ["x"])
    for left, right in zip(unpack(pack(news)), news, strict=True):
        same(left, right)


def test_more_columns_than_a_record_has_are_refused() -> None:
    rng = np.random.default_rng(2)
    news = one(rng, 1, 1)._replace(ranks=np.ones(1, np.int32), draft_logprobs=np.zeros(1, np.float32))
    news = news._replace(ids=np.zeros((1, 65536), np.int32), logprobs=np.zeros((1, 65536), np.float32))
    with pytest.raises(RecordError, match="65536 columns"):
        pack([news])


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
    news = batch(seed, 3, 2, ["x"])
    data = bytearray(pack(news))
    at = 4 * (len(Head) + place % (3 * len(Count)))
    data[at : at + 4] = np.int32(value).tobytes()
    try:
        got = unpack(bytes(data))
    except RecordError:
        return
    assert sum(len(n.token_ids) + 2 * len(n.rounds) + len(n.forced) + n.ids.size * 2 + 2 * len(n.ranks) for n in got) == sum(
        len(n.token_ids) + 2 * len(n.rounds) + len(n.forced) + n.ids.size * 2 + 2 * len(n.ranks) for n in unpack(pack(news))
    )


def test_the_news_of_an_engine_add_up_to_its_outputs() -> None:
    running = engine("narrow", draft_tokens=3, logprobs=4)
    wishes: list[dict[str, Any]] = [{"logprobs": 2, "prompt_logprobs": 3}, {}, {"logprobs": 0, "temperature": 0.9, "seed": 5}]
    for i, wish in enumerate(wishes):
        running.add((5, 9 + i, 33), SamplingParams(max_new_tokens=13, ignore_eos=True, **wish), id=str(i), stream=True)
    news: dict[int, list[News]] = {i: [] for i in range(3)}
    last: dict[int, RequestOutput] = {}
    converter = Converter(running.tokenizer)
    while running.has_work:
        running.step()
        pieces = converter.pieces(running.take())
        for found in unpack(pack([news_of(int(p.request.id), p) for p in pieces])):
            news[found.handle].append(found)
        last |= {int(p.request.id): p.output() for p in pieces if p.finished}
    for i, output in last.items():
        mine = news[i]
        assert [t for n in mine for t in n.token_ids.tolist()] == list(output.token_ids)
        assert [t for n in mine for t in n.rounds.tolist()] == list(output.rounds)
        assert [t for n in mine for t in n.round_drafts.tolist()] == list(output.round_drafts)
        assert "".join(n.text for n in mine) == output.text
        assert [n.finish for n in mine] == [""] * (len(mine) - 1) + [output.finish_reason]
        if output.logprobs:
            rows = [(int(n.ids[j, 0]), n.logprobs[j, 0].item(), int(n.ranks[j])) for n in mine for j in range(len(n.token_ids))]
            assert rows == [(t.token_id, t.logprob, t.rank) for t in output.tokens]
            drafts = [n.draft_logprobs[j].item() for n in mine for j in range(len(n.token_ids))]
            for got, token in zip(drafts, output.tokens, strict=True):
                assert got == token.draft_logprob or (token.draft_logprob is None and np.isnan(got))
    prompt = last[0].prompt_logprobs
    assert prompt is not None
    final = news[0][-1]
    at = len(final.token_ids)
    assert [int(t) for t in final.ids[at:, 0]] == [p.token_id for p in prompt if p is not None]
    assert dataclasses.is_dataclass(last[0])
