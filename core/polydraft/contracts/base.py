"""The contract record: what one kernel takes, writes and promises, and the float64 golden that defines it.

Backends bind providers against these records, the step program launches them, and tests, docs and the conformance kit are
generated from them. No backend's kernel runs here: a contract is a definition.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar, get_args

from numpy.typing import NDArray

from polydraft.contracts.features import FEATURES
from polydraft.contracts.sizes import Ladder, Sizes
from polydraft.device import Buffer, Launch
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
Unit = Literal["rows", "logit_rows", "seqs", "runs", "prompt_rows"]
UNIT_MEANING: Final[Mapping[Unit | Literal["any"], str]] = {
    "rows": "packed token rows of a pass",
    "logit_rows": "rows that need logits",
    "seqs": "scheduled sequences, in launch order",
    "runs": "staged runs of slot columns in this step",
    "prompt_rows": "rows that predict a prompt token",
    "any": "rows, of whatever pass launches it",
}
"""What a launch length counts."""
UNITS: Final[tuple[Unit, ...]] = get_args(Unit)
CAPACITY: Final[Mapping[Unit, str]] = {"rows": "R", "logit_rows": "NL", "seqs": "B", "runs": "U", "prompt_rows": "NL"}
"""The shape symbol that bounds a launch length."""


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


@dataclass(frozen=True)
class ColumnsSpec:
    """A tuple of slot columns: buffers [B] or [B, width] in "i32" or "f32", each of its own width. All are read and written."""

    doc: str
    access: Access = "inout"


Spec = TensorSpec | ColumnsSpec | ParamSpec | OpaqueSpec
"""The declaration of one field of an `Args` record."""


def tensor(
    shape: str, dtype: str, doc: str, *, access: Access = "in", pad: float | str | None = None, optional: bool = False
) -> Any:
    """Declare a buffer field of an `Args` record; `optional` fields default to None."""
    spec = TensorSpec(shape, dtype, access, doc, pad)
    return field(default=None, metadata={"spec": spec}) if optional else field(metadata={"spec": spec})


def columns(doc: str) -> Any:
    """Declare a field of an `Args` record that holds a tuple of slot columns."""
    return field(metadata={"spec": ColumnsSpec(doc)})


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


def column_name(name: str, index: int) -> str:
    """What column `index` of the field `name`, a tuple of slot columns, is called."""
    return f"{name}[{index}]"


def column_index(name: str) -> int:
    """The index that `column_name` put into `name`."""
    return int(name.partition("[")[2].removesuffix("]"))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(tensor, columns, param, opaque))
class Args:
    """Base of every contract's argument record: subclasses become frozen keyword-only dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True, eq=False)(cls)

    @classmethod
    @functools.cache  # records do not change, and building a step program asks thousands of times
    def specs(cls) -> dict[str, Spec]:
        """Field name to its declaration, in order."""
        return {f.name: f.metadata["spec"] for f in dataclasses.fields(cls)}  # type: ignore[arg-type]

    @functools.cached_property
    def touches(self) -> Mapping[int, bool]:
        """Buffers, weights, caches and metadata of the record, by identity, to whether the contract reads what was there. Worked
        out once a record, because every program of a step asks for it."""
        found: dict[int, bool] = {}
        for name, reads, several in self._touching():
            value = getattr(self, name)
            for one in value if several else () if value is None else (value,):
                found[id(one)] = found.get(id(one), False) or reads
        return found

    @classmethod
    @functools.cache
    def _touching(cls) -> tuple[tuple[str, bool, bool], ...]:
        """Fields that `touches` looks at, whether the contract reads what was there, and whether it is a tuple of columns."""
        found = ((name, spec) for name, spec in cls.specs().items() if not isinstance(spec, ParamSpec))
        return tuple((name, spec.access != "out", isinstance(spec, ColumnsSpec)) for name, spec in found)

    def buffers(self) -> dict[str, tuple[Buffer, Access]]:
        """Every buffer of the record with what is done to it, in order; columns of a tuple are called as `column_name`
        says. Fields that were left out, weights, caches and metadata are not among them."""
        found: dict[str, tuple[Buffer, Access]] = {}
        for name, spec in self.specs().items():
            value = getattr(self, name)
            if isinstance(spec, ColumnsSpec):
                found |= {column_name(name, i): (column, spec.access) for i, column in enumerate(value)}
            elif isinstance(spec, TensorSpec) and value is not None:
                found[name] = value, spec.access
        return found


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
    repeats: Repeats | None = None
    """The small case whose places this one repeats, where there is one: its golden says what is in every place of this one."""


@dataclass(frozen=True, eq=False)
class Repeats:
    """How a large case is made of a small one: `places` has, for each shape symbol that grew, the place of the small case that
    each place of the large one repeats."""

    case: Case
    places: Mapping[str, Array]


class LogicalCache:
    """The canonical form of one layer's KV cache in goldens and cases: `k`, `v` float arrays
    [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, k: Array, v: Array) -> None:
        self.k, self.v = k, v


class Workspace(Protocol):
    """Scratch memory owned by core, sized by `Provider.workspace_bytes`; contents do not survive a launch."""

    @property
    def buffer(self) -> Buffer:
        """[nbytes] u8 of the device, at an address that stays."""

    @property
    def nbytes(self) -> int:
        """At least what was wanted."""


A = TypeVar("A", bound=Args)


class Provider(Protocol):
    """A backend's implementation of one contract (or composite): binds once to buffers, launches many times."""

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Capture `args` and return the launch. Called before the first step, never during one, and any number of times: each
        binding is for itself. `args` fits its contract, which core has checked (`contracts/arguments.py`). `workspace` is None
        where none was wanted; all launches share it."""

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """Bytes of scratch wanted for these arguments; 0 when none."""


@dataclass(frozen=True)
class Limits:
    """Capacities that never change while an engine lives; all are counts.

    `max_seqs` slots (B), `num_drafts` per round (K), `max_rows` packed rows of a pass (R), `max_logit_rows` (NL),
    `max_len` tokens of one sequence (L), `block_size` tokens of a block, `num_blocks` in the pool, `max_blocks` entries of a
    slot's block table (MB), `max_stop_tokens` (S), `vocab_size` (V). `max_logprobs`: most likely tokens reported beside a token
    at most (E is one more); -1 where an engine reports no log probabilities.
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
    max_logprobs: int = -1

    @property
    def window(self) -> int:
        """Tokens of a full window: K drafts and the one the target adds."""
        return self.num_drafts + 1

    @functools.cached_property
    def sizes(self) -> Mapping[str, int]:
        """Shape symbol to size, as the records of contracts and the declarations of modules use them."""
        return {
            "B": self.max_seqs, "K": self.num_drafts, "W": self.window, "R": self.max_rows, "NL": self.max_logit_rows,
            "L": self.max_len, "MB": self.max_blocks, "S": self.max_stop_tokens, "V": self.vocab_size, "E": self.max_logprobs + 1,
        }  # fmt: skip


@dataclass(frozen=True)
class Contract:
    """One kernel's definition. `golden(a, n)` works in place on a namespace of arrays named like the `Args` fields, floats in
    float64, naive and never optimised; everything else in this record is data.

    `tolerance` maps an output to `c`: the error allowed is `c * eps(dtype) * scale`, with `scale(a, n)[output]` (default: the
    largest magnitude of the golden's output row). Outputs without an entry are compared bit for bit. `sums` maps an output to the
    symbol of how many numbers are added up for each element: a float32 sum in any order, one after the other too, is allowed
    `sqrt(count) / 4 * eps(f32) * scale` more.
    `products`: it multiplies matrices, and where a device rounds the factors of float32 products to TF32 an eps of float32
    activations is that of TF32.
    `equivalent_mutants` maps the id of an automatic mutant that cannot be told apart to a one-line proof.
    `constraints` are comparisons between sizes (by their shape symbols) and static parameters, as expressions; core refuses a
    record that breaks one before a provider sees it (`contracts/arguments.py`).
    `feature` is the one of `FEATURES` that it belongs to; "" of a plugin's contract, which no claim is about. `compute`: a kernel
    of the arithmetic, of which a claim needs one at least to be the backend's own. `symbols`: what shape symbols count that this
    contract has for itself.
    `optional_cases` has cases that are asked only of backends that declare a capability, by its name. `packed_cases(packing)` has
    cases whose weights are packed, for backends that declare that packing in the capability `packings`; None where weights are
    never packed.
    `tipped(a, n, off)[output]` is allowed beside the tolerance: how far an output is moved by numbers that are rounded on the
    way, where `off` is the tolerance's c * eps of the activations: to either side of a border of a grid, or to another dtype than
    the output's.
    `generate(rng)` draws a small case, `generate(rng, sizes)` one in which the named sizes are as asked. `grows` has the names
    that may be asked for (shape symbols, parameters and `num_blocks`, the blocks of a cache), each with the sizes that the kit
    tries one at a time (`contracts/sizes.py`), and `together` sizes that it tries at once. `independent`: shape symbols along
    which no place looks at another, so that a large case may repeat the places of a small one, and the small one's golden says
    what each of them holds.
    """

    name: str
    version: int
    unit: Unit | Literal["any"]
    args: type[Args]
    golden: Callable[[Any, int], None]
    cases: Callable[[], Iterator[Case]]
    generate: Callable[..., Case]
    doc: str
    source: str
    tolerance: Mapping[str, float] = field(default_factory=dict)
    scale: Callable[[Any, int], Mapping[str, Array]] | None = None
    sums: Mapping[str, str] = field(default_factory=dict)
    products: bool = False
    equivalent_mutants: Mapping[str, str] = field(default_factory=dict)
    deterministic: Literal["bitwise", "run-to-run", "none"] = "bitwise"
    pool_temporaries: bool = False
    constraints: tuple[str, ...] = ()
    feature: str = ""
    compute: bool = False
    symbols: Mapping[str, str] = field(default_factory=dict)
    grows: Mapping[str, Ladder] = field(default_factory=dict)
    together: tuple[Sizes, ...] = ()
    independent: tuple[str, ...] = ()
    optional_cases: Mapping[str, Callable[[], Iterator[Case]]] = field(default_factory=dict)
    packed_cases: Callable[[str], Iterator[Case]] | None = None
    packings: str = "weight_packings"
    tipped: Callable[[Any, int, float], Mapping[str, Array]] | None = None

    @property
    def key(self) -> str:
        return f"{self.name}/{self.version}"

    @property
    def features(self) -> tuple[str, ...]:
        """Features without which nobody needs it."""
        return (self.feature,) if self.feature else ()


class Registry:
    """Contracts by name, one version of each; a name registered twice is an error. They come in the order of their names,
    whichever module was imported first."""

    def __init__(self) -> None:
        self._contracts: dict[str, Contract] = {}

    def add(self, contract: Contract) -> Contract:
        if contract.name in self._contracts:
            first = self._contracts[contract.name].key
            raise ContractError(f"contract {contract.key} is registered twice, first as {first}, wanted one; drop or rename one")
        if contract.feature and contract.feature not in FEATURES:
            raise ContractError(
                f"contract {contract.key} belongs to feature {contract.feature!r}, wanted one of {', '.join(FEATURES)}, or none; "
                "correct it"
            )
        self._contracts[contract.name] = contract
        return contract

    def remove(self, name: str) -> Contract:
        """Take the contract called `name` out again, for tests that share their process with others; `add` brings it back.
        Raises `ContractError` where there is none."""
        contract = self[name]
        del self._contracts[name]
        return contract

    def __getitem__(self, name: str) -> Contract:
        """The contract called `name`. Raises `ContractError` where there is none."""
        if name not in self._contracts:
            raise ContractError(f"no contract is named {name!r}; known: {', '.join(self.names())}")
        return self._contracts[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is a contract called `name`."""
        return name in self._contracts

    def names(self) -> list[str]:
        """Every name, in alphabetical order."""
        return sorted(self._contracts)

    def of(self, features: Collection[str]) -> list[Contract]:
        """The contracts that make up `features`, by name."""
        return [contract for contract in self if contract.feature in features]

    def __iter__(self) -> Iterator[Contract]:
        """Every contract, by name."""
        return (self._contracts[name] for name in self.names())


REGISTRY = Registry()
COLLECTIVES = Registry()
"""The collectives: contracts that all ranks of an engine launch together (`polydraft.contracts.collectives`)."""


def contract_named(name: str) -> Contract:
    """The contract that a launch names, a kernel's or a collective's. Raises `ContractError` for one that there is not."""
    return COLLECTIVES[name] if name in COLLECTIVES else REGISTRY[name]
