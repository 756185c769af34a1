"""Log probabilities on a GPU: of rows as long as a real vocabulary, and those of the demo model, held against the committed
numbers of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import polydraft_cuda
from polydraft.backend import DeviceOptions
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.kernels.draft_logprobs import DraftLogprobsV1
from polydraft.contracts.kernels.draft_top_logprobs import DraftTopLogprobsV1
from polydraft.contracts.kernels.pack_logprobs import PackLogprobsV2
from polydraft.contracts.kernels.top_logprobs import TopLogprobsV1
from polydraft.contracts.layout import record_words
from polydraft.device import Array
from polydraft.sentinels import NO_TOKEN
from polydraft_cuda.device import CudaDevice
from tests.device.test_cuda_shapes import filled, launch_of, limits
from tests.parity.test_logprobs import hold

pytestmark = [pytest.mark.device("cuda"), pytest.mark.timeout(300)]
COLUMNS = 601
VOCABS = (151_680, 32_003, 4096)
"""The second is no multiple of the logits that are read at once."""


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    opened = polydraft_cuda.polydraft_open_device("", DeviceOptions("bf16"))
    yield opened
    opened.close()


def rows_of(vocab: int) -> Array:
    """Flat, peaked, with thousands of equals at the border, all equal, mostly forbidden, and far below zero."""
    rng = np.random.default_rng(vocab)
    rows = rng.standard_normal((6, vocab), np.float32) * np.float32(3)
    rows[1, [7, vocab - 1]] = 40, 39
    rows[2] = np.floor(rows[2])
    rows[3] = 1.25
    rows[4, rng.permutation(vocab)[30:]] = -np.inf
    rows[5] -= 400
    return rows


def report(row: Array, temperature: float, token: int, count: int) -> tuple[list[int], Array, int]:
    """Ids of a row's columns, their log probabilities in float64, and the token's rank."""
    order = np.lexsort((np.arange(row.size), -row))
    z = row.astype(np.float64) / (temperature or 1.0)
    values = z - z.max() - np.log(np.exp(z - z.max()).sum())
    ids = [token, *order[:count].tolist()]
    return ids, values[ids], 1 + int(np.flatnonzero(order == token)[0])


def allowed(row: Array, temperature: float) -> float:
    return float(4 * 2**-23 * (1 + np.abs(row[np.isfinite(row)]).max() / (temperature or 1.0)))


@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_of_a_whole_vocabulary_have_their_numbers_and_ranks(device: CudaDevice, vocab: int) -> None:
    """For no columns, a few, and more than anybody asks for, at every temperature; twice, since nothing may be left over."""
    rows, slots = rows_of(vocab), np.array([2, 0], np.int32)
    tokens = np.array([[5, vocab - 1, 900], [17, int(np.argmax(rows[4])), NO_TOKEN]], np.int32)
    ids, numbers = device.empty("ids", (2, 3, COLUMNS), "i32"), device.empty("numbers", (2, 3, COLUMNS), "f32")
    ranks, num_top, warm = (
        device.empty("ranks", (2, 3), "i32"),
        device.empty("top", (3,), "i32"),
        device.empty("warm", (3,), "f32"),
    )
    a = TopLogprobsV1(
        logits=filled(device, "logits", rows, "f32"), slot_order=filled(device, "order", slots, "i32"),
        logit_start=filled(device, "start", np.array([0, 3], np.int32), "i32"), out_tokens=filled(device, "out", tokens, "i32"),
        num_top=num_top, temperature=warm, ids=ids, logprobs=numbers, ranks=ranks,
    )  # fmt: skip
    launch = launch_of(device, "top_logprobs", a, limits(6))
    for counts in ((0, -1, 0), (20, 3, 20), (COLUMNS - 1, 3, 5), (20, 3, 0)):
        temperature = np.array([0.5, 1.0, 0.0 if counts[2] else 1.7], np.float32)
        device.load(num_top, np.array(counts, np.int32))
        device.load(warm, temperature)
        launch(device.stream, 2)
        found = [device.read(one.pointer, one.shape, one.dtype).copy() for one in (ids, numbers, ranks)]
        for i, j in np.ndindex(2, 3):
            slot, token = slots[i], tokens[i, j]
            count = counts[slot] if token != NO_TOKEN else -1
            if count < 0:
                assert (found[0][i, j] == NO_TOKEN).all()
                assert found[2][i, j] == 0
                continue
            row = rows[3 * i + j]
            listed, values, rank = report(row, float(temperature[slot]), int(token), count)
            assert found[0][i, j].tolist() == [*listed, *[NO_TOKEN] * (COLUMNS - 1 - count)], (counts, i, j)
            assert found[2][i, j] == rank
            real = np.isfinite(values)
            mine = found[1][i, j, : count + 1]
            assert np.array_equal(mine[~real], values[~real].astype(np.float32))
            assert np.abs(mine[real] - values[real]).max() <= allowed(row, float(temperature[slot])), (counts, i, j)


@pytest.mark.parametrize("vocab", VOCABS)
def test_drafts_of_a_whole_vocabulary_have_their_numbers(device: CudaDevice, vocab: int) -> None:
    rows, count, columns = rows_of(vocab), 20, 21
    tokens = np.array([5, 7, 900, 17, int(np.argmax(rows[4])), 3], np.int32)
    slots, known, wanted = (
        np.array([3, 1, -1, 0, 2, 4], np.int32),
        np.array([0, 1, 1, 0, 1], np.int32),
        np.full(5, count, np.int32),
    )
    shared = {
        "logits": filled(device, "logits", rows, "f32"), "row_slot": filled(device, "slots", slots, "i32"),
        "tokens": filled(device, "tokens", tokens, "i32"), "draft_len": filled(device, "known", known, "i32"),
        "num_top": filled(device, "top", wanted, "i32"), "given": "logits",
    }  # fmt: skip
    own = filled(device, "own", np.zeros((5, 2), np.float32), "f32")
    ids = filled(device, "ids", np.zeros((5, 2, columns), np.int32), "i32")
    tops = filled(device, "tops", np.zeros((5, 2, columns), np.float32), "f32")
    launch_of(device, "draft_logprobs", DraftLogprobsV1(**shared, draft_logprobs=own), limits(6))(device.stream, 6)
    both = DraftTopLogprobsV1(**shared, draft_top_ids=ids, draft_tops=tops)
    launch_of(device, "draft_top_logprobs", both, limits(6))(device.stream, 6)
    numbers, listed, values = (device.read(one.pointer, one.shape, one.dtype).copy() for one in (own, ids, tops))
    for r, slot in enumerate(slots):
        if slot < 0:
            continue
        at, most = (slot, known[slot]), allowed(rows[r], 1.0)
        ids_of, wanted_of, _ = report(rows[r], 1.0, int(tokens[r]), count)
        assert abs(numbers[at] - wanted_of[0]) <= most
        assert listed[at].tolist() == ids_of
        assert np.abs(values[at] - wanted_of)[np.isfinite(wanted_of)].max() <= most
        assert numbers[slot, 1 - known[slot]] == 0.0, "the other place of the slot is not written"


@pytest.mark.parametrize("columns", [6, 1])
@pytest.mark.parametrize("of_drafts", [False, True])
def test_a_captured_record_is_that_of_two_launches(device: CudaDevice, of_drafts: bool, columns: int) -> None:
    """Windows of several lengths, slots that want nothing, the end of the order, no sequence at all."""
    rng, vocab, width, slots = np.random.default_rng(3), 4096, 3, 8
    order, num_top = np.array([5, 0, -1, 2, 7, 3], np.int32), np.array([5, -1, 0, 2, 5, 3, 1, 5], np.int32)
    num_top = np.minimum(num_top, columns - 1)
    tokens = rng.integers(0, vocab, (6, width)).astype(np.int32)
    tokens[0, 1:], tokens[4] = NO_TOKEN, NO_TOKEN

    def made(name: str, value: Array) -> Any:
        return filled(device, name, value, "f32" if value.dtype == np.float32 else "i32")

    top = TopLogprobsV1(
        logits=made("logits", rng.standard_normal((6 * width, vocab), np.float32)), slot_order=made("order", order),
        logit_start=made("start", np.arange(0, 6 * width, width, dtype=np.int32)), out_tokens=made("out", tokens),
        num_top=made("top", num_top), temperature=None, ids=device.empty("ids", (6, width, columns), "i32"),
        logprobs=device.empty("numbers", (6, width, columns), "f32"), ranks=device.empty("ranks", (6, width), "i32"),
    )  # fmt: skip
    places = (slots, width - 1, columns)
    record = device.empty("record", (record_words(6, width, columns, drafts=of_drafts),), "i32")
    pack = PackLogprobsV2(
        slot_order=top.slot_order, num_top=top.num_top, ids=top.ids, logprobs=top.logprobs, ranks=top.ranks, record=record,
        extra=made("drafted", np.array([2, 1, 0, -1, 2, 1], np.int32)), flag=9,
        drafts=made("drafts", rng.integers(0, vocab, places[:2]).astype(np.int32)),
        draft_logprobs=made("own", rng.standard_normal(places[:2], np.float32)),
        draft_top_ids=made("listed", rng.integers(0, vocab, places).astype(np.int32)) if of_drafts else None,
        draft_tops=made("tops", rng.standard_normal(places, np.float32)) if of_drafts else None,
    )  # fmt: skip
    apart = [launch_of(device, "top_logprobs", top, limits(6)), launch_of(device, "pack_logprobs", pack, limits(6))]
    together = launch_of(device, "reported", CompositeArgs((top, pack)), limits(6))
    for n in (6, 4, 1, 0):
        found = []
        for launches in (apart, [together]):
            device.fill_bytes(record, 0x55)
            for launch in launches:
                launch(device.stream, n)
            found.append(device.read(record.pointer, record.shape, "i32").copy())
        assert np.array_equal(found[0], found[1]), n
        assert found[0][2] == sum(num_top[slot] >= 0 for slot in order[:n] if slot >= 0)


def test_the_numbers_are_those_of_transformers() -> None:
    hold("cuda")
