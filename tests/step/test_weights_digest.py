"""The digest of an engine's weights: of the numbers, wherever they come from, and of nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from polydraft import Engine
from polydraft.contracts.packing import PACKINGS, pack
from polydraft.errors import CheckpointError
from polydraft.models.digest import Digested, Unchanged
from tests.step.test_weights_from_memory import MODEL, MOVED, arrays
from tests.support import runs, tiny


def engine(model: str = MODEL, **options: Any) -> Engine:
    return runs.engine(model, draft_tokens=3, weights_digest=True, **options)


def test_the_same_numbers_have_the_same_digest_wherever_they_come_from(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "polydraft.engine_weights")
    with closing(engine()) as first, closing(engine(MOVED)) as second:
        before, other = first.weights.digest, second.weights.digest
        assert len(before) == 64
        assert before != other
        first.update_weights(tiny.checkpoint(MOVED))
        assert first.weights.digest == other
        first.update_weights(arrays(MODEL))
        assert first.weights.digest == before
    said = [record.getMessage().rpartition(" ")[2] for record in caplog.records]
    assert said == [before, other, other, before]


def test_a_dtype_that_holds_the_numbers_changes_nothing_and_another_number_does():
    given = {name: torch.from_numpy(value).bfloat16() for name, value in arrays().items()}
    with closing(engine()) as served:
        served.update_weights(given)
        half = served.weights.digest
        served.update_weights({name: value.float() for name, value in given.items()})
        assert served.weights.digest == half
        name = "model.norm.weight"
        served.update_weights({**given, name: given[name] * 2})
        assert served.weights.digest != half


def test_what_is_packed_at_load_is_digested_before_and_what_is_stored_packed_as_it_is():
    with closing(engine()) as plain, closing(engine(weights="int8")) as packed:
        assert plain.weights.digest == packed.weights.digest
    value = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    found = set()
    for packing in PACKINGS.values():
        digested = Digested({"w": pack(value, packing)})
        digested["w"], digested["w"]
        found.add(digested.digest())
    assert len(found) == len(PACKINGS)


def test_shapes_names_and_order_count_as_they_should():
    def digest(read: tuple[str, ...], **values: Any) -> str:
        digested = Digested(values)
        for name in read:
            digested[name]
        return digested.digest()

    one, two = np.zeros((2, 3), np.float32), np.ones(4, np.float32)
    whole = digest(("a", "b"), a=one, b=two)
    assert digest(("b", "a", "b"), b=two, a=one, c=two) == whole
    others = digest(("a", "b"), a=two, b=one), digest(("a",), a=one, b=two), digest(("a", "b"), a=one.reshape(3, 2), b=two)
    assert len({whole, *others}) == 4


def test_without_the_option_there_is_none():
    with closing(runs.engine(MODEL)) as plain:
        assert not plain.weights.digest


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda a: np.negative(a, out=a), id="every sign"),
        pytest.param(lambda a: a.__setitem__([0, 1], a[[1, 0]]), id="rows that change places"),
        pytest.param(lambda a: a.__setitem__([7, 263], a[[263, 7]]), id="rows far apart that change places"),
        pytest.param(lambda a: a.view(np.uint32).__setitem__((3, 5), a.view(np.uint32)[3, 5] ^ 1), id="a bit"),
        pytest.param(lambda a: a.__setitem__((-1, -1), 3.0), id="the last number"),
        pytest.param(lambda a: a.__setitem__(slice(None), np.roll(a, 1)), id="all move"),
    ],
)
def test_what_changes_between_two_readings_is_seen(change: Callable[[Any], Any]):
    value = np.random.default_rng(0).standard_normal((517, 1024), np.float32)
    given: dict[str, Any] = {"w": value, "packed": pack(value, next(iter(PACKINGS.values())))}
    read = Unchanged(given)
    for _ in range(2):
        assert all(read[name] is given[name] for name in read)
    change(value)
    given["packed"].numbers.reshape(-1)[3] ^= 1
    for name in read:
        with pytest.raises(CheckpointError, match=f"have changed since they were checked, first seen of {name}, wanted the same"):
            read[name]
