"""Every registered contract: the record is complete, the cases fit it and are adequate, golden and reference agree.

These tests hold for all contracts alike; the meaning of a single contract is tested in the tables beside this module. All cases
of a contract are one test, since a test costs more than most cases; what fails names its case, and `polydraft conform reference
--contract rms_norm --case seed-13` runs one.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from polydraft import reference
from polydraft.backend import DeviceOptions
from polydraft.conformance.adequacy import audit
from polydraft.conformance.harness import check_kernel, run_golden
from polydraft.conformance.kernel_checks import COUNTED, SPARE, larger
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import UNITS, Case, ColumnsSpec, Contract, LogicalCache, OpaqueSpec, ParamSpec, TensorSpec
from polydraft.contracts.compare import EPS
from polydraft.contracts.docs import SYMBOL_MEANING
from polydraft.contracts.inputs import FLEXIBLE, SEEDS, Poison, default_cases, field_of, generated, namespace, symbols
from polydraft.device import DTYPES, Buffer
from polydraft.reference import invariant_kernels

CONTRACTS = list(REGISTRY)
FLOATS = {*EPS, *FLEXIBLE}
DRAWN = 8
"""Generated cases of a contract. The kit runs the reference over all `SEEDS` of them, whoever claims it."""

each = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
each_seed = pytest.mark.parametrize("seed", range(SEEDS), ids=lambda seed: f"seed-{seed}")


def arrays_of(contract: Contract) -> Iterator[tuple[str, TensorSpec | OpaqueSpec]]:
    for name, spec in contract.args.specs().items():
        if not isinstance(spec, (ParamSpec, ColumnsSpec)):
            yield name, spec


# -- the record -----------------------------------------------------------------------------------------


def test_there_are_contracts():
    assert len(CONTRACTS) >= 26
    assert len({contract.key for contract in CONTRACTS}) == len(CONTRACTS)


@each
def test_names_agree(contract: Contract):
    module = importlib.import_module(contract.golden.__module__)
    assert module.__name__ == f"polydraft.contracts.kernels.{contract.name}"
    assert module.CONTRACT is contract
    assert contract.args.__name__ == f"{contract.name.title().replace('_', '')}V{contract.version}"
    assert getattr(module, contract.args.__name__) is contract.args
    assert contract.version >= 1
    assert contract.unit in (*UNITS, "any")


@each
def test_everything_is_described(contract: Contract):
    for name, spec in contract.args.specs().items():
        assert len(spec.doc.split()) >= 2, name
    texts = (contract.doc, contract.source, contract.args.__doc__, contract.golden.__doc__)
    for text in (*texts, contract.scale.__doc__) if contract.scale else texts:
        assert text
        assert len(text.split()) >= 2
    for mutant, proof in contract.equivalent_mutants.items():
        assert len(proof.split()) >= 4, f"{mutant}: {proof!r} is no proof"
        assert "\n" not in proof


@each
def test_tensors_are_declared_consistently(contract: Contract):
    for name, spec in arrays_of(contract):
        if isinstance(spec, OpaqueSpec):
            assert bool(spec.shape) == (spec.kind == "weight"), name
            assert spec.access in (("in", "inout") if spec.kind == "cache" else ("in",)), name
            continue
        assert spec.dtype in {*DTYPES, *FLEXIBLE}, name
        assert spec.symbols, name
        assert spec.access in ("in", "out", "inout"), name
        assert spec.pad is None or spec.access != "in", f"{name} is an input, so its padding is the caller's"
        if isinstance(spec.pad, str):
            assert spec.pad == "any", name
        elif spec.pad is not None and spec.dtype not in FLOATS:
            assert float(spec.pad).is_integer(), name


@each
def test_fields_are_annotated(contract: Contract):
    hints = typing.get_type_hints(contract.args)
    for name, spec in contract.args.specs().items():
        if isinstance(spec, TensorSpec):
            assert Buffer in (hints[name], *typing.get_args(hints[name])), name
        elif isinstance(spec, ParamSpec):
            assert hints[name] in (int, float, bool, tuple[float, ...]) or typing.get_origin(hints[name]) is typing.Literal, name


@each
def test_symbols_have_a_meaning(contract: Contract):
    used = {symbol for _, spec in arrays_of(contract) for symbol in spec.shape.split() if not symbol.isdigit()}
    assert used <= {*SYMBOL_MEANING, *contract.symbols}
    assert set(contract.symbols) <= used


@each
def test_tolerance_is_for_floats_that_are_written(contract: Contract):
    written = set()
    for name, spec in arrays_of(contract):
        if spec.access != "in" and isinstance(spec, TensorSpec) and spec.dtype in FLOATS:
            written.add(name)
        elif spec.access != "in" and isinstance(spec, OpaqueSpec):
            written |= {name, f"{name}.k", f"{name}.v"}
    assert set(contract.tolerance) <= written
    assert all(0 < c < 100 for c in contract.tolerance.values())
    if contract.scale is not None:
        case = generated(contract, 0)
        assert set(contract.scale(namespace(contract, case), case.n)) <= set(contract.tolerance)


def test_every_symbol_in_the_glossary_is_used():
    used = {symbol for c in CONTRACTS for _, spec in arrays_of(c) for symbol in spec.shape.split()}
    assert set(SYMBOL_MEANING) <= used


# -- the cases ------------------------------------------------------------------------------------------


@each
def test_named_cases(contract: Contract):
    cases = list(contract.cases())
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z][a-z0-9_.]+", name), name
    assert any(case.n == 0 for case in cases), "no case with nothing to do"
    assert any(case.n > 1 for case in cases), "no case with several rows"


@each
def test_generator_depends_on_its_seed_alone(contract: Contract):
    def flat(seed: int) -> list[Any]:
        a = namespace(contract, generated(contract, seed))
        values = [[v.k, v.v] if isinstance(v, LogicalCache) else [v] for v in vars(a).values()]
        return [repr(value) if not isinstance(value, np.ndarray) else value.tobytes() for some in values for value in some]

    assert all(flat(seed) == flat(seed) for seed in range(SEEDS))
    assert len({tuple(flat(seed)) for seed in range(SEEDS)}) > SEEDS // 2


# -- the golden -----------------------------------------------------------------------------------------


@each
def test_golden(contract: Contract):
    """Each case fits the record; the golden changes no input, reads no output and writes every row below the launch length."""
    for case in default_cases(contract, DRAWN):
        keeps_to_its_record(contract, case)


def keeps_to_its_record(contract: Contract, case: Case) -> None:
    assert symbols(contract, case), case.name
    want, other = run_golden(contract, case), run_golden(contract, case, poison=Poison(real=1536.0, integer=0x3C3C3C3C))
    for name, one in want.items():
        spec = contract.args.specs()[field_of(name)]
        assert not isinstance(spec, ParamSpec)
        about = f"{case.name}: {name}"
        kept = (one.value == one.before) | ((one.value != one.value) & (one.before != one.before))
        if spec.access == "in":
            assert kept.all(), f"{about} is an input and was changed"
        if spec.access == "out":
            assert isinstance(spec, TensorSpec)
            unwritten = kept & (other[name].value == other[name].before)
            assert spec.pad == "any" or not unwritten[: case.n].any(), f"{about} has rows that are not written"
        else:
            unwritten = np.zeros_like(kept)
        np.testing.assert_array_equal(one.value[~unwritten], other[name].value[~unwritten], f"{about} depends on poison")
        if one.allowed is not None:
            computed = np.isfinite(one.value) & ~kept
            allowed = np.broadcast_to(one.allowed, one.value.shape)[computed]
            assert np.isfinite(allowed).all(), f"{about} has a tolerance that is no number"
            assert (allowed >= 0).all(), about


@each
@pytest.mark.parametrize("act", [act for act in EPS if act != "f32"])
def test_golden_in_other_activation_dtypes(contract: Contract, act: str):
    """Rounding the inputs must not take a case out of what the contract allows."""
    for case in default_cases(contract, seeds=5):
        want = run_golden(contract, case, act)
        wide = run_golden(contract, case)
        for name, one in want.items():
            assert np.array_equal(np.isnan(one.value), np.isnan(wide[name].value)), f"{case.name}: {name}"


# -- the reference --------------------------------------------------------------------------------------


@functools.cache
def opened(row_invariant: bool) -> tuple[Any, Any]:
    device = reference.polydraft_open_device("cpu", DeviceOptions(row_invariant=row_invariant))
    return device, reference.polydraft_kernels(device)


@each
def test_reference_equals_golden(contract: Contract):
    """Those of its kernels that are others in row-invariant arithmetic in both."""
    kinds = [opened(row_invariant=False), *([opened(row_invariant=True)] if contract.name in invariant_kernels.KERNELS else [])]
    has_meta = any(isinstance(spec, OpaqueSpec) and spec.kind == "meta" for _, spec in arrays_of(contract))
    hook: Any = reference.polydraft_init_forward_meta
    for case in default_cases(contract, DRAWN):
        want = run_golden(contract, case)
        for (device, table), init_meta in itertools.product(kinds, (None, hook) if has_meta else (None,)):
            result = check_kernel(contract, case, device, table, init_meta=init_meta, want=want)
            if not result.ok:
                pytest.fail(result.describe(), pytrace=False)


# -- adequacy -------------------------------------------------------------------------------------------


@each
def test_default_cases_are_adequate(contract: Contract):
    report = audit(contract)
    if not report.ok:
        pytest.fail(report.describe(), pytrace=False)


@pytest.mark.parametrize("contract", [c for c in CONTRACTS if c.unit in COUNTED], ids=lambda contract: contract.name)
def test_rows_that_carry_nothing_change_no_others(contract: Contract):
    """What the kit asks of backends in a larger bucket, the golden does."""
    for seed in range(4):
        case = generated(contract, seed)
        more = larger(contract, case)
        symbols(contract, more)
        one, other = run_golden(contract, case), run_golden(contract, more)
        for name in one:
            mine, theirs = one[name].value, other[name].value
            assert len(theirs) - len(mine) in (0, SPARE)
            rows = len(mine) if len(mine) == len(theirs) else case.n
            np.testing.assert_array_equal(theirs[:rows], mine[:rows], err_msg=name)
