"""The request parameter `top_n_sigma`: its allowed values, its slot column, and its launch.

The engine asks the stage while it is built, when a request arrives and when it takes a slot. No step ever calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polydraft.program.declare import Column, LogitRows, Parameter
from polydraft.sampling_params import SamplingParams
from polydraft_top_n_sigma.contract import CONTRACT


def accepts(value: Any) -> bool:
    """A number whose float32 is neither 0, which would be off, nor so large that its product with a deviation overflows."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and (value == 0 or 1e-3 <= value <= 1e3)


PARAMETER = Parameter(
    "top_n_sigma",
    0.0,
    "Standard deviations kept below the highest logit; 0: off.",
    "0 (off) or a number from 0.001 to 1000",
    accepts,
)


class TopNSigma:
    """The stage."""

    name = "top_n_sigma"
    parameters = (PARAMETER,)
    columns = (Column("top_n_sigma", PARAMETER.doc, dtype="f32", empty=0, value=lambda a: PARAMETER.of(a.params)),)
    contracts = (CONTRACT.name,)

    def wants(self, params: SamplingParams) -> bool:
        """Whether it is on."""
        return bool(PARAMETER.of(params))

    def prepare(self, params: SamplingParams, encode: Callable[[str], list[int]], vocab_size: int) -> None:
        """Nothing to check beyond the parameter, and nothing to keep."""

    def emit(self, rows: LogitRows) -> None:
        """One launch."""
        rows.add(CONTRACT.name)
