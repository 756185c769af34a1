"""The record of an adaptor: how one operator of FastDeploy is called to serve one contract, and what it does differently.

`adaptors.py` holds them all. What a record cannot say, the arithmetic around the call, stands under its name in `steps.py`; the
documentation is tested against these records. Nothing here imports Paddle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Given:
    """A parameter that gets the tensor called `name` of what the adaptor's step works out, converted to `dtype`; as it is where
    none is named."""

    name: str
    dtype: str = ""


@dataclass(frozen=True)
class Fill:
    """A parameter that gets a tensor of the shape of the step's `like`, in `dtype`, filled with `value`."""

    value: float
    dtype: str
    like: str


@dataclass(frozen=True)
class HostFlag:
    """A parameter that gets one boolean in host memory."""

    value: bool


Source = Given | Fill | HostFlag | bool | int | float | None
"""Where a parameter of an operator comes from; a number or None is passed as it is."""


@dataclass(frozen=True)
class Adaptor:
    """One operator, called for one contract (or composite)."""

    contract: str
    operator: str
    takes: Mapping[str, Source]
    """Every parameter of the operator, in the order of its C++ function."""
    returns: tuple[str, ...]
    """What the operator returns, in order, as the step calls it."""
    step: str
    """The function of `steps.py` that makes the tensors and files what comes back."""
    read: str
    """The commit of PaddlePaddle/FastDeploy at which signature and semantics were read."""
    differs: tuple[str, ...]
    """What the operator does differently from the contract and the adaptor steps around, a sentence each."""
    writes: tuple[str, ...] = ()
    """Parameters that the operator writes in place. It gets tensors of the adaptor's own."""
    waits: str = ""
    """Why its call cannot be captured in a graph; "" where nothing is known against it."""
    only: str = ""
    """To which arguments of the contract it can be bound; "" for all."""
    fits: Callable[[Any], bool] | None = None
    """The same as a function of the record's tensors, by shape alone."""


@dataclass(frozen=True)
class Refusal:
    """An operator that has no adaptor, the contracts that it comes nearest to, and why it cannot meet them."""

    operator: str
    contracts: tuple[str, ...]
    why: str
    read: str
