"""Owns the contract record: what one kernel takes, writes, promises, and the float64 golden that defines it.

Backends bind providers against these records, the step program launches them, and tests, docs and the conformance kit
are generated from them. Nothing here runs a backend's kernel: a contract is a definition.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from polydraft.device import Launch
from polydraft.errors import ContractError

if sys.version_info >= (3, 11):
    from typing import dataclass_transform
else:  # only type checkers need it

    def dataclass_transform(**options: Any) -> Callable[[Any], Any]:
        """Return a decorator that does nothing."""
        del options
        return lambda cls: cls


Array = NDArray[Any]
Access = Literal["in", "out", "inout"]
Unit = Literal[
    "rows", "logit_rows", "seqs", "slot_updates", "token_updates", "block_updates", "bias_updates", "bad_word_updates",
    "prompt_rows",
]  # fmt: skip
"""What a launch length counts. `rows`: packed token rows of a pass; `logit_rows`: rows that need logits; `seqs`: scheduled
sequences in launch order; the `*_updates`: staged writes of this step; `prompt_rows`: rows that predict a prompt token."""
UNITS: tuple[Unit, ...] = (
    "rows", "logit_rows", "seqs", "slot_updates", "token_updates", "block_updates", "bias_updates", "bad_word_updates",
    "prompt_rows",
)  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """One buffer argument: symbolic `shape` ("R H": space-separated symbols or numbers), `dtype` name ("act" is the
    engine's activation dtype), `access`, and the rule for rows that carry nothing.

    `pad` says what an output holds in rows below the launch length that carry nothing (negative slot, inactive sequence):
    a number (written explicitly), "any" (unspecified but finite where the inputs are) or None (the notion does not apply).
    Rows at or beyond the launch length are never written.
    """

    shape: str
    dtype: str
    access: Access
    doc: str
    pad: float | str | None = None

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(self.shape.split())


@dataclass(frozen=True)
class ParamSpec:
    """One static argument, fixed when the kernel is bound."""

    doc: str


@dataclass(frozen=True)
class OpaqueSpec:
    """One backend-owned argument that core passes through without looking: a weight, a cache or forward metadata."""

    kind: Literal["weight", "cache", "meta"]
    doc: str
    access: Access = "in"
    shape: str = ""


def tensor(
    shape: str, dtype: str, doc: str, *, access: Access = "in", pad: float | str | None = None, optional: bool = False
) -> Any:
    """Declare a buffer field of an `Args` record; `optional` fields default to None."""
    spec = TensorSpec(shape, dtype, access, doc, pad)
    return field(default=None, metadata={"spec": spec}) if optional else field(metadata={"spec": spec})


def param(doc: str) -> Any:
    """Declare a static field of an `Args` record."""
    return field(metadata={"spec": ParamSpec(doc)})


def opaque(
    kind: Literal["weight", "cache", "meta"],
    doc: str,
    *,
    access: Access = "in",
    shape: str = "",
    optional: bool = False,
) -> Any:
    """Declare a backend-owned field of an `Args` record."""
    spec = OpaqueSpec(kind, doc, access, shape)
    return field(default=None, metadata={"spec": spec}) if optional else field(metadata={"spec": spec})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(tensor, param, opaque))
class Args:
    """Base of every contract's argument record: subclasses become frozen keyword-only dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True, eq=False)(cls)

    @classmethod
    @functools.cache  # records do not change, and building a step program asks thousands of times
    def specs(cls) -> dict[str, TensorSpec | ParamSpec | OpaqueSpec]:
        """Field name to its declaration, in order."""
        return {f.name: f.metadata["spec"] for f in dataclasses.fields(cls)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """One input to a contract: host arrays by field name (weights and caches in their canonical form), static parameters,
    and the launch length `n`. Output-only arrays are given by shape through poison the harness fills in."""

    name: str
    arrays: Mapping[str, Any]
    params: Mapping[str, Any]
    n: int
    outputs: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Output-only fields: shape and dtype name."""


class LogicalCache:
    """The canonical form of one layer's KV cache in goldens and cases: `k`, `v` float arrays
    [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, k: Array, v: Array) -> None:
        self.k, self.v = k, v


class Workspace(Protocol):
    """Scratch memory owned by core, sized by `Provider.workspace_bytes`; contents do not survive a launch."""

    @property
    def nbytes(self) -> int: ...


A = TypeVar("A", bound=Args)


class Provider(Protocol):
    """A backend's implementation of one contract (or composite): binds once to buffers, launches many times."""

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Capture `args` and return the launch. Called before the first step, never during one, and any number of times: each
        binding is for itself. `args` fits its contract, which core has checked (`contracts/arguments.py`)."""

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """Bytes of scratch wanted for these arguments; 0 when none."""


@dataclass(frozen=True)
class Limits:
    """Capacities that never change while an engine lives; all are counts.

    `max_seqs` slots (B), `num_drafts` per round (K), `max_rows` packed rows of a pass (R), `max_logit_rows` (NL),
    `max_len` tokens of one sequence (L), `block_size` tokens of a block, `num_blocks` in the pool, `max_blocks` entries of a
    slot's block table (MB), `max_stop_tokens` (S), `vocab_size` (V), `max_biases` (A) and `max_bad_words` (X): places of a slot's
    tables of logit biases and of bad words. `max_logprobs`: most likely tokens reported beside a token at most (E is one more);
    -1 where an engine reports no log probabilities.
    """

    max_seqs: int
    num_drafts: int
    max_rows: int
    max_logit_rows: int
    max_len: int
    block_size: int
    num_blocks: int
    max_blocks: int
    max_stop_tokens: int
    vocab_size: int
    max_biases: int = 1
    max_bad_words: int = 1
    max_logprobs: int = -1

    @property
    def window(self) -> int:
        """Tokens of a full window: K drafts and the one the target adds."""
        return self.num_drafts + 1


@dataclass(frozen=True)
class Contract:
    """One kernel's definition. `golden(a, n)` works in place on a namespace of arrays named like the `Args` fields, floats in
    float64, naive and never optimised; everything else in this record is data.

    `tolerance` maps an output to `c`: the error allowed is `c * eps(dtype) * scale`, with `scale(a, n)[output]` (default: the
    largest magnitude of the golden's output row). Outputs without an entry are compared bit for bit.
    `equivalent_mutants` maps the id of an automatic mutant that cannot be told apart to a one-line proof.
    `constraints` are comparisons between sizes (by their shape symbols) and static parameters, as expressions; core refuses a
    record that breaks one before a provider sees it (`contracts/arguments.py`).
    """

    name: str
    version: int
    unit: Unit | Literal["any"]
    args: type[Args]
    golden: Callable[[Any, int], None]
    cases: Callable[[], Iterator[Case]]
    generate: Callable[[np.random.Generator], Case]
    doc: str
    source: str
    tolerance: Mapping[str, float] = field(default_factory=dict)
    scale: Callable[[Any, int], Mapping[str, Array]] | None = None
    equivalent_mutants: Mapping[str, str] = field(default_factory=dict)
    deterministic: Literal["bitwise", "run-to-run", "none"] = "bitwise"
    pool_temporaries: bool = False
    constraints: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.name}/{self.version}"


class Registry:
    """Contracts by name and version; a name registered twice is an error."""

    def __init__(self) -> None:
        self._contracts: dict[str, Contract] = {}

    def add(self, contract: Contract) -> Contract:
        if contract.key in self._contracts:
            raise ContractError(f"contract {contract.key} is registered twice; give the new one the next version")
        self._contracts[contract.key] = contract
        return contract

    def __getitem__(self, name: str) -> Contract:
        """The newest version of `name`, or the exact one for a `name/version` key."""
        if name in self._contracts:
            return self._contracts[name]
        versions = [c for c in self._contracts.values() if c.name == name]
        if not versions:
            raise ContractError(f"no contract is named {name!r}; known: {', '.join(self.names())}")
        return max(versions, key=lambda c: c.version)

    def arrange(self, order: Sequence[str]) -> None:
        """Put contracts into the order of their names in `order`, whichever module was imported first; others stay behind."""
        place = {name: index for index, name in enumerate(order)}
        ordered = sorted(self._contracts.items(), key=lambda item: place.get(item[1].name, len(place)))
        self._contracts = dict(ordered)

    def newest(self) -> Iterator[Contract]:
        """Every contract in its newest version."""
        return (self[name] for name in self.names())

    def names(self) -> list[str]:
        return list(dict.fromkeys(c.name for c in self._contracts.values()))

    def __iter__(self) -> Iterator[Contract]:
        return iter(self._contracts.values())


REGISTRY = Registry()
