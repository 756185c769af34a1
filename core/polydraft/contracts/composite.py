"""Composites: runs of contracts that a provider may implement as one kernel, and what such a kernel has to compute.

The step program replaces a run of launches by a provider's composite, and the conformance kit tests that kernel against the
composition of its parts. Nothing is defined twice: golden, record and cases all come from the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from polydraft.contracts.base import (
    CAPACITY,
    COLLECTIVES,
    REGISTRY,
    Args,
    Array,
    Case,
    Contract,
    Limits,
    ParamSpec,
    Provider,
    Spec,
    TensorSpec,
    Unit,
    Workspace,
)
from polydraft.contracts.sizes import SMALL, Sizes
from polydraft.device import Launch, Stream
from polydraft.errors import ContractError


class Wire(NamedTuple):
    """One buffer that two parts share: field `output` of part `source` is field `input` of the later part `target`."""

    source: int
    output: str
    target: int
    input: str


@dataclass(frozen=True)
class Composite:
    """An ordered run of contracts that one provider may implement as one kernel, named `first+second`.

    The rule that connects the parts: fields of the same name are the same buffer (or the same parameter). `dead` names
    outputs of earlier parts that nothing reads after the run: they arrive poisoned, need not be written, and may hold
    anything afterwards; where somebody does read one, the run may not be fused. The launch length counts the first part's
    unit; a part that counts another unit runs over its whole capacity, so that its tail is written to the buffers' end.
    """

    name: str
    parts: tuple[str, ...]
    doc: str
    dead: tuple[str, ...] = ()

    @property
    def contracts(self) -> tuple[Contract, ...]:
        """The parts' contracts; raises `ContractError` when one is not registered."""
        return tuple(REGISTRY[part] for part in self.parts)

    @property
    def features(self) -> tuple[str, ...]:
        """Features without which nobody needs it."""
        return tuple(dict.fromkeys(contract.feature for contract in self.contracts if contract.feature))

    @property
    def wires(self) -> tuple[Wire, ...]:
        """The buffers that parts share, each from the first part that has it."""
        first: dict[str, int] = {}
        wires = []
        for index, contract in enumerate(self.contracts):
            for name, spec in contract.args.specs().items():
                if isinstance(spec, ParamSpec):
                    continue
                if name in first:
                    wires.append(Wire(first[name], name, index, name))
                first.setdefault(name, index)
        return tuple(wires)


@dataclass(frozen=True, eq=False)
class CompositeArgs:
    """What a composite's provider is bound to: the argument records of its parts, in order, sharing buffers."""

    parts: tuple[Args, ...]


def name_of(args: Args | CompositeArgs) -> str:
    """The contract or composite that `args` are the arguments of; the record's own name where no contract has such a record."""
    names = {contract.args: contract.name for contract in (*REGISTRY, *COLLECTIVES)}
    parts = args.parts if isinstance(args, CompositeArgs) else (args,)
    return "+".join(names.get(type(part), type(part).__name__) for part in parts)


COMPOSITES: Final[dict[str, Composite]] = {}
"""Composites by name."""


def add(composite: Composite) -> Composite:
    """Register `composite`. Raises `ContractError` for a name that is taken or that is not its parts joined by '+'."""
    if composite.name != "+".join(composite.parts) or len(composite.parts) < 2:
        raise ContractError(
            f"composite {composite.name!r}: got parts {composite.parts}, wanted two or more that spell the name; "
            "name it after its parts, joined by '+'"
        )
    if composite.name in COMPOSITES:
        raise ContractError(f"composite {composite.name!r} is registered twice; drop one of the two")
    COMPOSITES[composite.name] = composite
    return composite


def split(composite: Composite, flat: Any) -> tuple[SimpleNamespace, ...]:
    """View a namespace with every field of the composite as one namespace a part (the same objects, nothing copied)."""
    return tuple(
        SimpleNamespace(**{name: getattr(flat, name) for name in contract.args.specs()}) for contract in composite.contracts
    )


def compose(composite: Composite) -> Callable[[Sequence[Any], int], None]:
    """Return the golden of `composite`: `golden(parts, n)` over one namespace a part, sharing arrays by identity. It runs
    the parts' goldens one after the other, then puts back into dead buffers what was there."""
    contracts = composite.contracts

    def golden(parts: Sequence[Any], n: int) -> None:
        dead: list[Array] = [next(getattr(a, name) for a in parts if hasattr(a, name)) for name in composite.dead]
        before = [array.copy() for array in dead]
        for contract, a, length in zip(contracts, parts, part_lengths(composite, parts, n), strict=True):
            contract.golden(a, length)
        for array, old in zip(dead, before, strict=True):
            array[...] = old

    return golden


def part_lengths(composite: Composite, parts: Sequence[Any], n: int) -> tuple[int, ...]:
    """Launch length of each part: `n`, or the capacity of its buffers where it counts another unit than the first part."""
    contracts = composite.contracts
    counted = ("any", _unit(contracts))
    return tuple(n if contract.unit in counted else _capacity(contract, a) for contract, a in zip(contracts, parts, strict=True))


def _unit(contracts: Iterable[Contract]) -> Unit | Literal["any"]:
    """The unit that the launch length of a run counts."""
    return next((c.unit for c in contracts if c.unit != "any"), "any")


def _capacity(contract: Contract, a: Any) -> int:
    """Places that the buffers of a contract have for what it counts."""
    symbol = CAPACITY[contract.unit]  # type: ignore[index]  # a composite counts something
    for name, spec in contract.args.specs().items():
        if isinstance(spec, TensorSpec) and spec.symbols[0] == symbol:
            return int(getattr(a, name).shape[0])
    raise ContractError(f"contract {contract.key} counts {contract.unit} but has no buffer of shape {symbol}; declare one")


def as_contract(composite: Composite) -> Contract:
    """Return `composite` as one contract over the union of its parts' fields, for whatever runs and compares contracts;
    arrays in `composite.dead` are not to be compared."""
    contracts = composite.contracts
    golden = compose(composite)

    def flat_golden(a: Any, n: int) -> None:
        golden(split(composite, a), n)

    def scale(a: Any, n: int) -> dict[str, Array]:
        scales: dict[str, Array] = {}
        parts = split(composite, a)
        for contract, part, length in zip(contracts, parts, part_lengths(composite, parts, n), strict=True):
            if contract.scale is not None:
                scales.update(contract.scale(part, length))
            contract.golden(part, length)
        return scales

    return Contract(
        name=composite.name,
        version=1,
        unit=_unit(contracts),
        args=_record(composite),
        golden=flat_golden,
        cases=lambda: _cases(composite),
        generate=lambda rng, sizes=SMALL: _generate(composite, rng, sizes),
        doc=composite.doc,
        source="Composition of " + " and ".join(contract.key for contract in contracts) + ".",
        tolerance={name: c for contract in contracts for name, c in contract.tolerance.items()},
        scale=scale if any(contract.scale for contract in contracts) else None,
        sums={name: symbol for contract in contracts for name, symbol in contract.sums.items()},
        products=any(contract.products for contract in contracts),
        deterministic="bitwise" if all(c.deterministic == "bitwise" for c in contracts) else "run-to-run",
        symbols={symbol: meaning for contract in contracts for symbol, meaning in contract.symbols.items()},
        grows=contracts[-1].grows,  # what several parts read comes from the last of them
        independent=tuple(s for s in contracts[0].independent if all(s in contract.independent for contract in contracts)),
    )


@dataclass(frozen=True)
class Expansion:
    """A provider of a composite that launches the parts one after the other: what a fused kernel is measured against."""

    composite: Composite
    providers: Mapping[str, Provider]

    def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
        """Bind every part to its record; parts share the workspace, since they run in order."""
        named = zip(self.composite.parts, args.parts, strict=True)
        launches = [self.providers[name].bind(part, limits, workspace) for name, part in named]

        def launch(stream: Stream, n: int) -> None:
            for part, length in zip(launches, part_lengths(self.composite, args.parts, n), strict=True):
                part(stream, length)

        return launch

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        """The most that a part wants."""
        named = zip(self.composite.parts, args.parts, strict=True)
        return max(self.providers[name].workspace_bytes(part, limits) for name, part in named)


def _record(composite: Composite) -> type[Args]:
    """The union of the parts' records: what an earlier part writes is no input of the whole."""
    specs: dict[str, Spec] = {}
    for contract in composite.contracts:
        for name, spec in contract.args.specs().items():
            old = specs.setdefault(name, spec)
            if not isinstance(old, ParamSpec) and not isinstance(spec, ParamSpec) and old.access == "in":
                specs[name] = replace(old, access="in" if spec.access == "in" else "inout")
    fields = {name: field(metadata={"spec": spec}) for name, spec in specs.items()}
    body: dict[str, Any] = {"__annotations__": dict.fromkeys(fields, Any), "__doc__": composite.doc, **fields}
    title = "".join(part.title().replace("_", "") for part in composite.parts)
    return type(title, (Args,), body)


def _cases(composite: Composite) -> Iterator[Case]:
    """The named cases that every part has."""
    named = [{case.name: case for case in contract.cases()} for contract in composite.contracts]
    for name in named[0]:
        if all(name in others for others in named):
            yield _join(composite, name, [cases[name] for cases in named])


def _generate(composite: Composite, rng: np.random.Generator, sizes: Sizes) -> Case:
    """Generate one case a part from the same seed (contracts that share a scene then agree on it) and join them."""
    seed = int(rng.integers(2**63))
    given = [(sizes,) if contract.grows else () for contract in composite.contracts]
    cases = [c.generate(np.random.default_rng(seed), *asked) for c, asked in zip(composite.contracts, given, strict=True)]
    return _join(composite, f"joined seed {seed}", cases)


def _join(composite: Composite, name: str, cases: Sequence[Case]) -> Case:
    """One case of the composite from one of each part.

    A field that several parts read comes from the last of them. What the earlier parts have for themselves is repeated or
    cut to the sizes of those fields, so that parts whose cases know nothing of each other fit together.
    """
    arrays: dict[str, Any] = {}
    params: dict[str, Any] = {}
    outputs: dict[str, tuple[tuple[int, ...], str]] = {}
    for contract, case in reversed(list(zip(composite.contracts, cases, strict=True))):
        specs = contract.args.specs()
        known = {
            **{key: np.shape(value) for key, value in arrays.items()},
            **{key: out[0] for key, out in outputs.items()},
        }
        sizes = {
            symbol: size
            for key, spec in specs.items()
            if isinstance(spec, TensorSpec) and key in known
            for symbol, size in zip(spec.symbols, known[key], strict=True)
        }
        params = {**case.params, **params}
        for key, value in case.arrays.items():
            spec = specs[key]
            fits = isinstance(spec, TensorSpec) and value is not None
            arrays.setdefault(key, np.resize(value, _shape(spec, value.shape, sizes)) if fits else value)  # type: ignore[arg-type]
        for key, (shape, dtype) in case.outputs.items():
            spec = specs[key]
            assert isinstance(spec, TensorSpec)  # only buffers are outputs
            outputs.setdefault(key, (_shape(spec, shape, sizes), dtype))
            if key in arrays:  # a later part reads what this one writes
                outputs[key] = (arrays.pop(key).shape, dtype)
    return Case(name, arrays, params, _joined_length(composite, cases), outputs)


def _shape(spec: TensorSpec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """`shape` with the sizes that the later parts have settled."""
    return tuple(sizes.get(symbol, size) for symbol, size in zip(spec.symbols, shape, strict=True))


def _joined_length(composite: Composite, cases: Sequence[Case]) -> int:
    """The launch length of the last part that counts what the first one counts."""
    unit = _unit(composite.contracts)
    return [case.n for contract, case in zip(composite.contracts, cases, strict=True) if contract.unit in ("any", unit)][-1]


add(Composite("residual_add+rms_norm", ("residual_add", "rms_norm"), "Add a branch to the residual stream and normalise it."))
add(
    Composite(
        "gumbel_noise+sample",
        ("gumbel_noise", "sample"),
        "Sample with noise that is never stored.",
        dead=("noise",),
    )
)
add(
    Composite(
        "verify_match+commit_window",
        ("verify_match", "commit_window"),
        "Verify a window and commit it at once; only `drafted` is left for the snapshot.",
        dead=("window", "window_len", "accepted"),
    )
)
add(
    Composite(
        "pack_rows+pack_logit_rows",
        ("pack_rows", "pack_logit_rows"),
        "Pack the rows and the logit rows of a pass together; the logit rows over their whole capacity.",
    )
)
