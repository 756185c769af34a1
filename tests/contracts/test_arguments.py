"""What a kernel is bound to: every record that does not fit is refused by name, and everything that core binds fits."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from polydraft import LLM
from polydraft.conformance.harness import record_of
from polydraft.conformance.probe import checkpoint
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.arguments import check_arguments, check_records, misfits
from polydraft.contracts.base import Contract, OpaqueSpec, TensorSpec, column_index, column_name
from polydraft.contracts.composite import CompositeArgs
from polydraft.contracts.constraints import Constraint
from polydraft.contracts.inputs import default_cases, field_of, symbols
from polydraft.contracts.kernels.embed import EmbedV1
from polydraft.contracts.kernels.linear import LinearV1
from polydraft.contracts.kernels.residual_add import ResidualAddV1
from polydraft.contracts.kernels.rms_norm import RmsNormV1
from polydraft.contracts.kernels.select_last_rows import SelectLastRowsV1
from polydraft.contracts.kernels.verify_match import VerifyMatchV1
from polydraft.errors import ContractError
from polydraft.reference.device import ReferenceDevice
from polydraft.reference.table import NumpyTable


def buffer(dtype: str, *shape: int) -> Any:
    return SimpleNamespace(dtype=dtype, shape=shape)


def linear(**changes: Any) -> LinearV1:
    given = {"x": buffer("bf16", 4, 8), "weight": object(), "bias": None, "out": buffer("f32", 6, 3)}
    return LinearV1(**{**given, **changes})


def refusal(contract: str, args: Any) -> str:
    with pytest.raises(ContractError) as caught:
        check_arguments(REGISTRY[contract], args)
    return str(caught.value)


def test_a_record_that_fits():
    """Rows are each buffer's own; what may be absent is; "float" is f32 beside another activation dtype."""
    check_arguments(REGISTRY["linear"], linear())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": buffer("i32", 4, 8)}, "linear/1: argument x is of dtype i32, wanted f32 or bf16 or f16; bind it to"),
        ({"x": buffer("f32", 4, 8, 1)}, "argument x is of shape (4, 8, 1), wanted [N I]"),
        ({"x": None}, "argument x is missing, wanted a buffer"),
        ({"weight": None}, "argument weight is missing, wanted what the backend made for it"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str):
    assert said in refusal("linear", linear(**changes))


def test_act_is_one_dtype_and_sizes_agree():
    x, y = buffer("f16", 4, 8), buffer("f32", 4, 8)
    assert "argument y is of dtype f32, wanted f16" in refusal("residual_add", ResidualAddV1(x=x, y=y))
    assert "argument y is of shape (4, 7), wanted H = 8 in [N H]" in refusal(
        "residual_add", ResidualAddV1(x=x, y=buffer("f16", 4, 7))
    )


def test_a_written_buffer_stands_in_one_place():
    x = buffer("f32", 4, 8)
    said = refusal("residual_add", ResidualAddV1(x=x, y=x))
    assert "argument y is the buffer of x, too, wanted one of its own, since one of the two is written" in said
    same = buffer("i32", 3)  # two that are only read may share one
    check_arguments(
        REGISTRY["select_last_rows"],
        SelectLastRowsV1(
            hidden=buffer("f32", 5, 8), positions=same, seq_start=buffer("i32", 3), draft_slot=buffer("i32", 3),
            draft_position=same, out=buffer("f32", 3, 8),
        ),
    )  # fmt: skip


def test_constraints():
    def window(width: int) -> VerifyMatchV1:
        slots = {n: buffer("i32", 2) for n in ("slot_order", "phase", "logit_start", "logit_len")}
        counts = {n: buffer("i32", 2) for n in ("window_len", "accepted", "drafted")}
        return VerifyMatchV1(
            choices=buffer("i32", 8), drafts=buffer("i32", 2, 3), window=buffer("i32", 2, width), **slots, **counts
        )

    check_arguments(REGISTRY["verify_match"], window(4))
    assert refusal("verify_match", window(3)) == (
        "verify_match/1: got W = 3, K = 3, wanted W == K + 1; bind it to sizes and parameters that fit"
    )


@pytest.mark.parametrize(
    ("text", "names", "holds", "breaks"),
    [
        ("W == K + 1", ("W", "K"), {"W": 4, "K": 3}, {"W": 4, "K": 4}),
        ("RP <= R", ("RP", "R"), {"RP": 2, "R": 2}, {"RP": 3, "R": 2}),
        ("0 <= a <= b", ("a", "b"), {"a": 0, "b": 0}, {"a": 1, "b": 0}),
        ("q == (h + 2 * k) * d", ("q", "h", "k", "d"), {"q": 12, "h": 2, "k": 2, "d": 2}, {"q": 8, "h": 2, "k": 2, "d": 2}),
        ("a % b == 0", ("a", "b"), {"a": 6, "b": 3}, {"a": 7, "b": 3}),
        ("a // 2 - 1 > 0", ("a",), {"a": 4}, {"a": 3}),
        ("a >= 1", ("a",), {"a": 1}, {"a": "one"}),
        ("a < 1", ("a",), {"a": 0}, {"a": 1}),
        ('a in ("x", "y")', ("a",), {"a": "y"}, {"a": "z"}),
        ("a % b == 1", ("a", "b"), {"a": 3, "b": 2}, {"a": 3, "b": 0}),
    ],
)
def test_constraints_are_read(text: str, names: tuple[str, ...], holds: dict[str, Any], breaks: dict[str, Any]):
    constraint = Constraint.read(text)
    assert (constraint.text, constraint.names) == (text, names)
    assert (constraint.holds(holds), constraint.holds(breaks)) == (True, False)


@pytest.mark.parametrize("text", ["a", "a + 1", "f(a) == 1", "a is b", "a.b == 1", "a == b ** 2", "a == (b if c else d)", "a =="])
def test_what_is_no_constraint(text: str):
    with pytest.raises(SyntaxError):
        Constraint.read(text)


def test_names_of_columns():
    assert (column_name("columns", 12), field_of("columns[12]"), column_index("columns[12]")) == ("columns[12]", "columns", 12)


def test_a_record_of_another_contract():
    embed = EmbedV1(ids=buffer("i32", 4), weight=object(), out=buffer("f32", 4, 8))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="linear/1: got a record of EmbedV1, wanted LinearV1"):
        check_records("linear", embed)


def test_composites_are_checked_part_by_part():
    x, y = buffer("f32", 4, 8), buffer("f32", 4, 8)
    out, weight = buffer("i32", 4, 8), object()
    norm = RmsNormV1(x=x, weight=weight, out=out, eps=1e-5, plus_one=False)  # type: ignore[arg-type]
    parts = (ResidualAddV1(x=x, y=y), norm)
    with pytest.raises(ContractError, match="rms_norm/1: argument out is of dtype i32"):
        check_records("residual_add+rms_norm", CompositeArgs(parts))
    assert "residual_add+rms_norm" in COMPOSITES


# -- every contract ------------------------------------------------------------------------------------
@pytest.mark.parametrize("contract", [*REGISTRY], ids=lambda contract: contract.name)
def test_every_way_to_break_a_record_is_refused(contract: Contract):
    """What the kit binds on every backend is refused, and covers what the record declares: each buffer's dtype, rank and
    presence, each constraint."""
    device = ReferenceDevice()
    case = max((one for one in contract.cases() if one.n), key=lambda one: len(one.arrays))
    args: Any = record_of(contract, case, device, NumpyTable(device))
    check_arguments(contract, args)
    tried = list(misfits(contract, args, device.empty))
    for misfit in tried:
        with pytest.raises(ContractError, match=contract.key) as caught:
            check_arguments(contract, misfit.args)
        assert misfit.names in str(caught.value), misfit.what
    specs = contract.args.specs()
    bound = {name for name, spec in specs.items() if isinstance(spec, TensorSpec) and getattr(args, name) is not None}
    spoilt = {name for misfit in tried for name in bound if getattr(misfit.args, name) is not getattr(args, name)}
    assert spoilt == bound
    assert {misfit.names for misfit in tried} >= set(contract.constraints)
    assert all(isinstance(spec, OpaqueSpec | TensorSpec) or name in vars(args) for name, spec in specs.items())


def test_a_case_that_breaks_a_constraint_is_no_case():
    contract = REGISTRY["swiglu"]
    case = next(default_cases(contract))
    assert "G" in symbols(contract, case)
    with pytest.raises(ContractError, match="wanted G == I"):
        symbols(dataclasses.replace(contract, constraints=("G == I",)), case)


# -- core ----------------------------------------------------------------------------------------------
def test_core_binds_through_the_check(monkeypatch: pytest.MonkeyPatch):
    """Whatever an engine binds was checked, and fits: with log probabilities, sampling, n-grams and a schedule, too."""
    from polydraft.plugins import kernel_table

    seen: list[str] = []

    def noting(name: str, args: Any) -> None:
        seen.append(name)
        check_records(name, args)

    monkeypatch.setattr(kernel_table, "check_records", noting)
    for options in ({"logprobs": 3}, {"proposer": "ngram"}, {"verify": "rejection"}, {"accept_schedule": (0.9, 0.5)}):
        engine = LLM(model=str(checkpoint()), backend="reference", draft_tokens=2, max_num_seqs=2, **options).engine  # type: ignore[arg-type]
        programs = [program for parts in engine.runner.programs.values() for program in parts.values()]
        bound = [entry.contract for program in (*engine.runner.writes.values(), *programs) for entry in program.entries]
        assert [name for name in bound if name != "forward_meta"] == seen
        seen.clear()
