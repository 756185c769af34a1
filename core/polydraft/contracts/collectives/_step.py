"""The argument that every collective has beside its data: the number of the step whose plan it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polydraft.contracts.base import tensor

STEP_MUTANTS: Final[Mapping[str, str]] = {
    f"{change}(step)": "nothing is computed from the number of the step" for change in ("zero", "plus", "minus", "reverse")
}
"""Misreadings of `step` that no case can notice."""


def step_number() -> Any:
    """Declare the field: it lies on the device, uploaded in the order of the stream, so that it is right in a graph, too."""
    return tensor("1", "i32", "Number of the step, which all ranks agree on; for whoever compares what ranks launch.")
