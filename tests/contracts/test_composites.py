"""Composites: their golden is that of their parts, their cases fit together, and the reference's fused kernels agree.

This tests what `contracts/composite.py` promises; the parts have their own tables and cases. The inside of a fused kernel is not
examined.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft.conformance.harness import check_kernel
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Limits, Workspace
from polydraft.contracts.composite import (
    Composite,
    Expansion,
    Wire,
    add,
    as_contract,
    compose,
    part_lengths,
    split,
)
from polydraft.contracts.inputs import default_cases
from polydraft.device import Launch, Stream
from polydraft.errors import ContractError
from polydraft.reference.device import ReferenceDevice
from polydraft.reference.provider import EagerProvider, NumpyProvider, plain
from polydraft.reference.table import NumpyTable

FUSED = ("residual_add+rms_norm", "gumbel_noise+sample", "verify_match+commit_window")
"""Composites that the reference has a kernel for."""


def failures(composite: Composite, provider: Any, seeds: int = 20) -> list[str]:
    """Run a provider of the composite on all default cases; describe the cases that fail."""
    device = ReferenceDevice()
    table: Any = NumpyTable(device)
    table.providers = {composite.name: provider}
    results = [check_kernel(composite, case, device, table) for case in default_cases(composite, seeds)]
    assert len(results) >= seeds
    return [result.describe() for result in results if not result.ok]


@pytest.mark.parametrize("name", COMPOSITES)
def test_parts_one_after_the_other_are_the_composite(name: str) -> None:
    composite = COMPOSITES[name]
    assert failures(composite, Expansion(composite, NumpyTable(ReferenceDevice()).providers)) == []


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_of_the_reference(name: str) -> None:
    assert failures(COMPOSITES[name], NumpyTable(ReferenceDevice()).providers[name]) == []


def test_the_reference_fuses_what_this_file_tests() -> None:
    assert set(FUSED) == set(COMPOSITES) & set(NumpyTable(ReferenceDevice()).providers)


def faulty(fault: Callable[[Any, int], None]) -> NumpyProvider:
    """The reference's verify-and-commit, followed by a fault."""
    from polydraft.reference.state_kernels import verify_and_commit

    def kernel(a: Any, n: int) -> None:
        verify_and_commit(a, n)
        fault(a, n)

    return EagerProvider(plain(kernel), enqueue=lambda stream, work: work())


def fill(part: int, field: str) -> Callable[[Any, int], None]:
    """Write what no case holds below the launch length."""

    def fault(a: Any, n: int) -> None:
        getattr(a.parts[part], field)[:n] = 12345

    return fault


def test_dead_buffers_may_hold_anything_and_live_ones_may_not() -> None:
    composite = COMPOSITES["verify_match+commit_window"]
    assert composite.dead == ("window", "window_len", "accepted")
    for field in composite.dead:
        assert failures(composite, faulty(fill(0, field))) == []
    for part, field in ((0, "drafted"), (0, "choices"), (1, "out_len"), (1, "slot_order")):
        assert failures(composite, faulty(fill(part, field))), field


def test_fields_of_the_same_name_are_the_same_buffer() -> None:
    assert COMPOSITES["residual_add+rms_norm"].wires == (Wire(0, "x", 1, "x"),)
    assert COMPOSITES["gumbel_noise+sample"].wires == (
        Wire(0, "noise", 1, "noise"),
        Wire(0, "row_slot", 1, "row_slot"),
        Wire(0, "temperature", 1, "temperature"),
    )
    shared = {wire.output for wire in COMPOSITES["verify_match+commit_window"].wires}
    assert shared == {"slot_order", "phase", "window", "window_len", "accepted"}


def test_what_an_earlier_part_writes_is_no_input_of_the_whole() -> None:
    specs: dict[str, Any] = as_contract(COMPOSITES["verify_match+commit_window"]).args.specs()
    access = {name: spec.access for name, spec in specs.items()}
    assert (access["window"], access["choices"], access["phase"], access["tokens"]) == ("out", "in", "inout", "inout")
    packing: dict[str, Any] = as_contract(COMPOSITES["pack_rows+pack_logit_rows"]).args.specs()
    assert (packing["seq_len"].access, packing["logit_row"].access, packing["phase"].access) == ("out", "out", "in")


def test_the_composed_golden_leaves_dead_buffers_as_they_arrived() -> None:
    composite = COMPOSITES["gumbel_noise+sample"]
    flat = SimpleNamespace(
        row_slot=np.array([0], np.int32), positions=np.array([3], np.int32), seed=np.zeros((1, 2), np.uint32),
        temperature=np.ones(1), noise=np.full((1, 3), 7.0), logits=np.array([[-np.inf, 0.0, -np.inf]]), top_p=np.ones(1),
        min_p=np.zeros(1), top_k=np.zeros(1, np.int32), tokens=np.zeros(1, np.int32), ahead=1, draw=0,
    )  # fmt: skip
    parts = split(composite, flat)
    assert parts[0].noise is parts[1].noise
    compose(composite)(parts, 1)
    assert flat.noise.tolist() == [[7.0, 7.0, 7.0]]
    assert flat.tokens.tolist() == [1]


def test_a_part_that_counts_something_else_runs_over_its_whole_capacity() -> None:
    packing, verifying = COMPOSITES["pack_rows+pack_logit_rows"], COMPOSITES["verify_match+commit_window"]
    rows, logit_rows = SimpleNamespace(ids=np.zeros(9)), SimpleNamespace(logit_row=np.zeros(5))
    assert part_lengths(packing, (rows, logit_rows), 4) == (4, 5)
    assert part_lengths(verifying, (None, None), 4) == (4, 4)
    case = next(as_contract(packing).cases())
    assert case.n == next(REGISTRY["pack_rows"].cases()).n


def test_names_spell_the_parts_and_are_given_once() -> None:
    with pytest.raises(ContractError, match="spell the name"):
        add(Composite("embed+swiglu", ("embed", "rms_norm"), ""))
    with pytest.raises(ContractError, match="spell the name"):
        add(Composite("embed", ("embed",), ""))
    with pytest.raises(ContractError, match="registered twice"):
        add(COMPOSITES["residual_add+rms_norm"])


def test_parts_share_the_largest_workspace() -> None:
    class Wanting:
        def __init__(self, nbytes: int) -> None:
            self.nbytes, self.given = nbytes, -1

        def workspace_bytes(self, args: Any, limits: Limits) -> int:
            return self.nbytes

        def bind(self, args: Any, limits: Limits, workspace: Workspace | None) -> Launch:
            self.given = workspace.nbytes if workspace else 0

            def launch(stream: Stream, n: int) -> None:
                raise AssertionError

            return launch

    providers = {"residual_add": Wanting(8), "rms_norm": Wanting(32)}
    expansion = Expansion(COMPOSITES["residual_add+rms_norm"], providers)
    args, limits = SimpleNamespace(parts=(None, None)), Limits(1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    assert expansion.workspace_bytes(args, limits) == 32
    expansion.bind(args, limits, SimpleNamespace(nbytes=32))
    assert [provider.given for provider in providers.values()] == [32, 32]
