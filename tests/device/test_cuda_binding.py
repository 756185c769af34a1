"""What the CUDA backend can be held to without a GPU: kernels are bound to the arguments that their sources declare."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft.contracts import COLLECTIVES, COMPOSITES, REGISTRY
from polydraft.contracts.inputs import default_cases
from polydraft_cuda.kernels import kernels, routing
from tests.device.paper import (
    SHAPES,
    Bound,
    Shape,
    bind_collectives,
    bind_of_ranks,
    bind_on_paper,
    bind_shape,
    given,
    parameters,
)
from tests.support.launched import launched

pytest.importorskip("cuda.bindings", reason="matrices are described to the copy engine in types of cuda-bindings")
SCALARS = {"pointer", "int", "float", "int64_t", "uint32_t", "uint64_t"}


def held_to_its_source(one: Bound) -> None:
    """As many arguments as the kernel has parameters, each of the kind that it declares."""
    declared = [kind if kind in SCALARS else "struct" for kind in parameters(one.source, one.name)]
    passed = [given(argument) for argument in one.arguments]
    assert passed == declared, f"{one.source.name}: {one.name}"


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize("name", sorted(kernels()))
def test_a_kernel_gets_the_arguments_that_it_declares(name: str, act: str):
    for case in list(default_cases(COMPOSITES.get(name) or REGISTRY[name], seeds=1))[:3]:
        bound = bind_on_paper(name, case, act)
        assert bound, f"{name} binds no kernel"
        for one in bound:
            held_to_its_source(one)


@pytest.mark.parametrize("name", COLLECTIVES.names())
def test_so_do_collectives(name: str):
    for act, ranks in (("f32", 4), ("bf16", 2)):
        bound = bind_collectives(name, act, ranks)
        assert bound
        for one in bound:
            held_to_its_source(one)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_so_do_the_kernels_of_real_shapes(shape: Shape, act: str, arch: str):
    for invariant in (False, True):
        bound = bind_shape(shape, act, arch=arch, row_invariant=invariant)
        assert len(bound) >= 6
        for one in bound:
            held_to_its_source(one)


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"hidden{shape.hidden}")
def test_so_do_those_that_ranks_join(shape: Shape, act: str):
    bound = bind_of_ranks(shape, act, 2)
    assert {"norm_of_few", "norm_of_sum"} <= {one.name for one in bound}
    assert ("argmax_keys" in {one.name for one in bound}) == (act == "bf16")
    for one in bound:
        held_to_its_source(one)


@pytest.mark.parametrize("name", sorted(kernels()))
def test_rows_are_on_the_axis_of_a_grid_that_has_room_for_them(name: str):
    """The first; the others have 65,535 blocks. Kernels with TOKENS are launched for so many rows, or in blocks of so many."""
    for act, arch in itertools.product(("f32", "bf16"), ("sm_80", "sm_90")):
        for case in list(default_cases(COMPOSITES.get(name) or REGISTRY[name], seeds=1))[:3]:
            for one in bind_on_paper(name, case, act, arch=arch):
                size = one.grid(70_000) if callable(one.grid) and "TOKENS" not in one.defines else 1
                assert isinstance(size, int) or max(size[1:]) < 1 << 16, f"{one.name} {size}"


def test_every_contract_that_something_launches_is_served():
    assert launched() <= set(kernels())


@pytest.mark.parametrize("experts", [64, 256, 300, 320, 352, 384, 512])
def test_a_router_asks_for_shared_memory_beside_its_own(experts: int):
    """More than 48 KiB, its own arrays included, a block has only where the dynamic ones alone are more than that."""
    choice: Any = SimpleNamespace(logits=np.empty((1, experts)), expert_ids=np.empty((1, 8)), num_groups=1)
    asked = routing.chooser_bytes(choice)
    assert asked >= 4 * 16 * (2 * experts + 1 + 8)
    own = 16 * 16 * 8 * 4 + (16 * experts * 4 if experts <= 64 else 4)
    assert asked > 48 << 10 or asked + own <= 48 << 10
