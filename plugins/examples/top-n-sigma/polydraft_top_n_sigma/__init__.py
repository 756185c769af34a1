"""A sampling parameter as a package: `SamplingParams(extra={"top_n_sigma": 1.5})` keeps what lies that near to the highest logit.

The hooks are asked once for each engine that names the package. `docs/tutorials/add_a_parameter.md` goes through its files.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from polydraft import hookimpl
from polydraft.program.declare import LogitsStage
from polydraft_top_n_sigma.contract import CONTRACT
from polydraft_top_n_sigma.kernels import table
from polydraft_top_n_sigma.stage import PARAMETER, TopNSigma

__all__ = ["CONTRACT", "PARAMETER", "TopNSigma"]


@hookimpl
def polydraft_parameters() -> list[LogitsStage]:
    """What a request may say, and what becomes of it."""
    return [TopNSigma()]


@hookimpl
def polydraft_kernels(device: Any) -> SimpleNamespace:
    """What this package computes on the engine's device."""
    return table(device)
