"""A plugin in one file: a request parameter, its slot column, a contract of its own and the reference's kernel of it.

`extra={"logit_scale": 2.0}` multiplies the logits of a request by 2. Name the file as a plugin and its stem as a kernel pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from polydraft import hookimpl
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Args, Case, Contract, tensor
from polydraft.device import Array, Buffer
from polydraft.program.declare import Column, LogitRows, LogitsStage, Parameter
from polydraft.reference.provider import plain
from polydraft.sampling_params import SamplingParams

NAME = "scale_logits"


class ScaleLogitsV1(Args):
    """Buffers of `scale_logits`. Launch length: rows."""

    logits: Buffer = tensor("N V", "f32", "Logits; rows of negative slots stay as they are.", access="inout")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; negative: a row that carries nothing.")
    logit_scale: Buffer = tensor("B", "f32", "Factor of each slot.")


def golden(a: Any, n: int) -> None:
    """Multiply each row."""
    for r in range(n):
        if a.row_slot[r] >= 0:
            a.logits[r] = a.logits[r] * a.logit_scale[a.row_slot[r]]


def _case(name: str, slots: list[int], n: int, rng: np.random.Generator) -> Case:
    logits = rng.standard_normal((len(slots), 5)).astype(np.float32)
    arrays = {
        "logits": logits,
        "row_slot": np.array(slots, np.int32),
        "logit_scale": np.array([2.0, -0.5, 3.0], np.float32),
    }
    return Case(name, arrays, {}, n)


def cases() -> Iterator[Case]:
    """Named cases of `scale_logits`."""
    rng = np.random.default_rng(1)
    yield _case("rows_of_several_slots", [2, 0, 1, 2], 4, rng)
    yield _case("a_row_that_carries_nothing", [1, -1, 0], 3, rng)
    yield _case("stale_rows_beyond_the_launch_length", [0, 1, 2], 1, rng)


def generate(rng: np.random.Generator) -> Case:
    """Random rows."""
    slots = rng.integers(-1, 3, int(rng.integers(1, 6))).tolist()
    return _case("random", slots, int(rng.integers(0, len(slots) + 1)), rng)


if NAME not in REGISTRY:  # a file may be loaded once for each engine
    REGISTRY.add(
        Contract(
            name=NAME, version=1, unit="any", args=ScaleLogitsV1, golden=golden, cases=cases, generate=generate,
            doc="Multiply the logits of each slot.", source="An example.", tolerance={"logits": 1.0},
        )
    )  # fmt: skip

SCALE = Parameter(
    "logit_scale", 1.0, "Multiplies logits.", "a number above 0", lambda value: isinstance(value, (int, float)) and value > 0
)


class ScaleStage:
    """The stage."""

    name = "logit_scale"
    parameters = (SCALE,)
    columns = (Column("logit_scale", SCALE.doc, dtype="f32", empty=1, value=lambda a: SCALE.of(a.params)),)
    contracts = (NAME,)

    def wants(self, params: SamplingParams) -> bool:
        return bool(SCALE.of(params) != 1)

    def prepare(self, params: SamplingParams, encode: Callable[[str], list[int]], vocab_size: int) -> None:
        """Nothing to keep."""

    def emit(self, rows: LogitRows) -> None:
        rows.add(NAME)


def scale(a: Any, n: int) -> None:
    """The kernel in NumPy."""
    there: Array = np.flatnonzero(a.row_slot[:n] >= 0)
    a.logits[there] *= a.logit_scale[a.row_slot[there]][:, None]


@hookimpl
def polydraft_parameters() -> list[LogitsStage]:
    return [ScaleStage()]


@hookimpl
def polydraft_kernels(device: Any) -> Any:
    return SimpleNamespace(providers={NAME: device.bind_kernel(plain(scale))}, versions={NAME: 1})
