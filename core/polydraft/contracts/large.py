"""Cases at the sizes that products have, and cases that nobody has listed: drawn by a contract's own generator.

The conformance kit runs them beside the named and the small generated cases. A large case costs milliseconds: along the axes that
a contract calls independent it repeats the places of a small one in random order, and the golden, which is one and the same, runs
over the small one alone. What it leaves in a place is wanted in every place that repeats it, so all elements are compared.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from polydraft.contracts.base import CAPACITY, Case, Contract, OpaqueSpec, Repeats
from polydraft.contracts.inputs import Kernel, contract_of, generated, symbols
from polydraft.contracts.packing import PACKINGS, pack
from polydraft.contracts.sizes import FEW, MODELS, Sizes, named
from polydraft.device import Array

SPOT: Final = 24
"""Places of the small case along an axis that is repeated, where what they cost is not much."""
MOST_DEFINED, MOST_REPEATED = 1 << 16, 1 << 21
"""Product of the sizes of a surprise: of the golden's case, and of the one that repeats it."""
MANY: Final = 1000
"""Outputs of a packed matrix that are many."""
MOST_OF_A_MODEL: Final = 1 << 27
"""The sizes of a model's case multiplied; the largest of them is cut to it, so that half a gigabyte is enough for a matrix."""


def large_names(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """Symbol and size of each large case of a contract; the largest of all for the first symbol comes first."""
    for symbol, ladder in contract_of(kernel).grows.items():
        yield from ((symbol, size) for size in reversed(ladder.steps))


def large_sizes(kernel: Kernel) -> Iterator[Sizes]:
    """The sizes of each large case of a contract: one of them large, in the same order, then each at its largest with one row,
    for which kernels have ways of their own, then those with several."""
    contract = contract_of(kernel)
    yield from ({symbol: size} for symbol, size in large_names(kernel))
    others = {symbol: ladder.steps[-1] for symbol, ladder in contract.grows.items() if symbol != "N"}
    yield from ({"N": 1, symbol: size} for symbol, size in others.items() if "N" in contract.grows)
    yield from contract.together


def large(kernel: Kernel, symbol: str, size: int) -> Case:
    """The case `SYMBOL-SIZE`, in which one dimension is large and all else is small; the same in every run. Of rows it launches
    that many."""
    return several_large(kernel, {symbol: size})


def several_large(kernel: Kernel, sizes: Sizes) -> Case:
    """The case `SYMBOL-SIZE+SYMBOL-SIZE`, in which these dimensions are large at once."""
    words = (word for pair in sizes.items() for word in pair)
    return _sized(contract_of(kernel), sizes, _rng(kernel, *words), named(sizes))


def large_packed(contract: Contract, packing: str) -> Iterator[Case]:
    """Cases with matrices in the packing of that name, each of whose axes is large in turn, with several rows and with one."""
    for sizes in (one for symbol, size in _of_matrices(contract).items() for one in ({symbol: size}, {"N": 1, symbol: size})):
        case = contract.generate(_rng(contract, packing, *sizes), sizes)
        arrays = {n: pack(a, PACKINGS[packing]) if n in _matrices(contract) else a for n, a in case.arrays.items()}
        yield replace(case, name=f"{named(sizes)} {packing}", arrays=arrays)


def _of_matrices(contract: Contract) -> Sizes:
    """Sizes of the axes of matrices that can be large: the largest, save of outputs, which goldens work out one by one."""
    axes = dict.fromkeys(symbol for spec in _matrices(contract).values() for symbol in reversed(spec.shape.split()[-2:]))
    steps = {symbol: contract.grows[symbol].steps for symbol in axes if symbol in contract.grows}
    return {s: next(size for size in one if size > MANY) if s in contract.independent else one[-1] for s, one in steps.items()}


def _matrices(contract: Contract) -> Mapping[str, OpaqueSpec]:
    """The arguments of a contract that are matrices, or stacks of them."""
    specs = {name: spec for name, spec in contract.args.specs().items() if isinstance(spec, OpaqueSpec)}
    return {name: spec for name, spec in specs.items() if spec.kind == "weight" and " " in spec.shape}


def sizes_of(kernel: Kernel, name: str) -> Sizes:
    """The sizes that a case such as `V-152064` is called after, whatever they are; none where it is called otherwise."""
    parts = [part.rpartition("-") for part in name.split("+")]
    legal = all(symbol in contract_of(kernel).grows and size.isdecimal() for symbol, _, size in parts)
    return {symbol: int(size) for symbol, _, size in parts} if legal else {}


def surprise(kernel: Kernel, seed: int, number: int) -> Case:
    """Case `surprise-NUMBER` of those that `seed` draws: shapes, lengths and contents that are on no list."""
    contract, rng = contract_of(kernel), _rng(kernel, "surprise", seed, number)
    sizes: dict[str, int] = {}
    defined = whole = 1
    for place, symbol in enumerate(rng.permutation(list(contract.grows)).tolist()):
        steps, free = contract.grows[symbol].steps, symbol in contract.independent
        most = min(steps[-1], MOST_REPEATED // whole, *(() if free or defined == 1 else (MOST_DEFINED // defined,)))
        least = 1 if symbol == "N" else max(2, steps[0] // 4)
        if (place == 0 or rng.random() < 0.5) and most > least:
            sizes[symbol] = int(math.exp(rng.uniform(math.log(least), math.log(most))))
            whole, defined = whole * sizes[symbol], defined * (1 if free else sizes[symbol])
    return _sized(contract, sizes, rng, f"surprise-{number}")


def called(kernel: Kernel, name: str) -> Case | None:
    """The case `name` of a contract, where it has one: a named one, `seed-7`, `V-152064` (of any sizes) or `model-mimo-7b`."""
    kind, _, which = name.partition("-")
    if kind == "model" and which in models(kernel):
        return of_model(kernel, which)
    if which.isdecimal() and kind == "seed":
        return generated(kernel, int(which))
    if sizes := sizes_of(kernel, name):
        return several_large(kernel, sizes)
    return next((case for case in contract_of(kernel).cases() if case.name == name), None)


def models(kernel: Kernel) -> Iterable[str]:
    """The published models that say how large a case of a contract is."""
    return MODELS if any(ladder.of for ladder in contract_of(kernel).grows.values()) else ()


def of_model(kernel: Kernel, model: str) -> Case:
    """The case `model-NAME` with all the sizes at once that a model of `MODELS` gives to this contract."""
    contract = contract_of(kernel)
    sizes = {symbol: int(getattr(MODELS[model], ladder.of)) for symbol, ladder in contract.grows.items() if ladder.of}
    largest = max(sizes, key=lambda symbol: sizes[symbol])
    sizes[largest] = min(sizes[largest], MOST_OF_A_MODEL * sizes[largest] // math.prod(sizes.values()))
    return _sized(contract, sizes, _rng(kernel, model), f"model-{model}")


def _rng(kernel: Kernel, *words: Any) -> np.random.Generator:
    """What draws one case: the same for the same words in every run and on every machine."""
    return np.random.default_rng(zlib.crc32(" ".join(map(str, (kernel.name, *words))).encode()))


def _sized(contract: Contract, sizes: Sizes, rng: np.random.Generator, name: str) -> Case:
    """A case of the given sizes."""
    fixed = math.prod(size for symbol, size in sizes.items() if symbol not in contract.independent)
    spot = max(FEW, min(SPOT, MOST_DEFINED // fixed))
    small = {symbol: min(size, spot) if symbol in contract.independent else size for symbol, size in sizes.items()}
    case: Case = contract.generate(rng, small) if contract.grows else contract.generate(rng)
    free = [symbol for symbol in sizes if symbol in contract.independent]
    grown = {s: sizes[s] for s in free if s == _launched(contract) or sizes[s] != small[s]}
    return replace(repeated(contract, case, grown, rng) if grown else case, name=name)


def _launched(contract: Contract) -> str:
    """The symbol of the axis that the launch length counts along."""
    return "N" if contract.unit == "any" else CAPACITY[contract.unit]


def repeated(contract: Contract, case: Case, sizes: Sizes, rng: np.random.Generator) -> Case:
    """`case` with the independent axes of `sizes` made longer: each place repeats one of the case's, drawn at random. Of rows as
    many are launched; at most two lie beyond, and repeat rows that do."""
    have, n = symbols(contract, case), case.n
    places: dict[str, Array] = {}
    for symbol, size in sizes.items():
        if symbol == _launched(contract):
            n, beyond = size, have[symbol] - case.n
            later = case.n + rng.integers(0, max(beyond, 1), min(beyond, 2))
            places[symbol] = np.concatenate((rng.integers(0, case.n, size), later))
        else:
            places[symbol] = rng.integers(0, have[symbol], size)
    specs: Mapping[str, Any] = contract.args.specs()
    arrays = {name: value if value is None else taken(value, specs[name], places) for name, value in case.arrays.items()}
    outputs = {
        name: (
            tuple(len(places.get(axis, range(length))) for axis, length in zip(specs[name].symbols, shape, strict=True)),
            dtype,
        )
        for name, (shape, dtype) in case.outputs.items()
    }
    return Case(case.name, arrays, case.params, n, outputs, Repeats(case, places))


def taken(value: Any, spec: Any, places: Mapping[str, Array]) -> Any:
    """An argument, or what belongs to each of its elements, with its axes in `places` repeated as they say."""
    for axis, symbol in enumerate(getattr(spec, "shape", "").split()):
        if symbol in places:
            value = np.take(value, places[symbol], axis=axis)
    return value
