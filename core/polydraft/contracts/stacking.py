"""A collective as one contract of all its ranks: what its golden works on, and what its cases hold.

The kit and the tests of collectives run goldens and compare by it; the step program and providers never see it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from polydraft.contracts.base import Args, Contract, TensorSpec, param, tensor


def stacked(contract: Contract) -> Contract:
    """The collective with an axis of ranks, G, before the others of each array; parameters are the same on all ranks."""
    fields: dict[str, Any] = {}
    for name, spec in contract.args.specs().items():
        if isinstance(spec, TensorSpec):
            fields[name] = tensor(f"G {spec.shape}", spec.dtype, spec.doc, access=spec.access, pad=spec.pad)
        else:
            fields[name] = param(spec.doc)
    space = {**fields, "__annotations__": dict.fromkeys(fields, Any), "__doc__": contract.args.__doc__}
    record = type(f"{contract.args.__name__}OfRanks", (Args,), space)
    return dataclasses.replace(contract, args=record)
